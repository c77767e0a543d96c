"""Contestants take turns, so that a noisy moment of a shared machine falls on each of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

Name = TypeVar("Name")
Result = TypeVar("Result")


def rotated(names: Sequence[Name], turn: int) -> list[Name]:
    """The order of turn number ``turn`` (from 0): the next one begins, and each is at each place equally often."""
    start = turn % len(names) if names else 0
    return [*names[start:], *names[:start]]


def mirrored(names: Sequence[Name], turn: int) -> list[Name]:
    """As :func:`rotated` every other turn, and backwards in between.

    So each contestant is as often before another as after it, and as often at each place.
    """
    order = rotated(names, turn // 2)
    return order[::-1] if turn % 2 else order


def take_turns(names: Sequence[Name], turn: int, measure: Callable[[Name], Result]) -> dict[Name, Result]:
    """Measure each once, in the order of :func:`rotated`; results in the order of ``names``."""
    found = {name: measure(name) for name in rotated(names, turn)}
    return {name: found[name] for name in names}


def rounds_within(
    rounds: int, seconds: float | None = None, clock: Callable[[], float] = time.perf_counter
) -> Iterator[int]:
    """Numbers of rounds from 0; no new one where, by those before it, it would end after ``seconds``. At least one."""
    began = clock()
    for turn in range(rounds):
        if turn and seconds is not None and (clock() - began) * (turn + 1) / turn > seconds:
            return
        yield turn


def prompts_of_round(pool: Sequence[Name], turn: int, count: int) -> list[Name]:
    """The ``count`` prompts of a round: those that follow the round's before, from the start again at the end."""
    return [pool[(turn * count + i) % len(pool)] for i in range(count)]
