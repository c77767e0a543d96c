"""Raw counts of decoding, kept by the engine's thread and taken by whoever reports them."""

from __future__ import annotations

import threading

from backends.runners.base import Proposals
from backends.types import DecodeCounters


class CounterBook:
    """One :class:`DecodeCounters` per statistics key. Thread-safe: what is taken is gone from the book."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_key: dict[str, DecodeCounters] = {}

    def take(self) -> dict[str, DecodeCounters]:
        with self._lock:
            taken, self._by_key = self._by_key, {}
        return taken

    def add_step(
        self,
        key: str,
        *,
        rows: int,
        emitted: list[int],
        drafted: int,
        proposals: Proposals | None,
        control: bool,
        vanilla_ms: float,
        spent_ms: float,
        measured_ms: float,
    ) -> None:
        """One sequence's part of one decode step; times are that sequence's share of the step."""
        vanilla_us, measured_us = round(vanilla_ms * 1e3 * len(emitted)), round(measured_ms * 1e3)
        with self._lock:
            counters = self._by_key.setdefault(key, DecodeCounters())
            counters.steps += 1
            counters.medusa_steps += drafted > 0
            counters.rows += rows
            counters.emitted_tokens += len(emitted)
            counters.drafted_tokens += drafted
            counters.accepted_tokens += len(emitted) - 1
            counters.vanilla_us += vanilla_us
            counters.spent_us += round(spent_ms * 1e3)
            counters.measured_us += measured_us
            if control:
                counters.control_steps += 1
                counters.control_tokens += len(emitted)
                counters.control_vanilla_us += vanilla_us
                counters.control_measured_us += measured_us
            if proposals is not None:
                _count_hits(counters, emitted, proposals)


def _count_hits(counters: DecodeCounters, emitted: list[int], proposals: Proposals) -> None:
    """Attempts and hits by head, along the emitted tokens as far as guesses follow them."""
    siblings = 0
    for head, token in enumerate(emitted):
        if siblings < 0:
            return
        if head == len(counters.attempts):
            counters.attempts.append(0)
            counters.hits.append([])
        counters.attempts[head] += 1
        guesses, hits = proposals.tokens_of(siblings), counters.hits[head]
        # A request whose tree is wide makes the heads guess more for all in its batch.
        hits.extend([0] * (len(guesses) - len(hits)))
        rank = guesses.index(token) if token in guesses else None
        if rank is not None:
            hits[rank] += 1
        # A list that follows every guess follows a missed one too.
        follows_any = rank is not None or not proposals.look_ahead
        siblings = proposals.following(siblings)[rank or 0] if follows_any else -1
