"""``medusa-gateway bench peers``: contestants take turns on every cell, one awake at a time.

A cell is either a class of prompts at a number of requests in flight, or the time to the first token of a prompt of so
many tokens. In every round of a cell all contestants run it one after the other, in rotating order.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from backends.bench.peers.contestants import (
    CONTESTANTS,
    QUICK,
    USUAL,
    Contestant,
    Place,
    Program,
    Unavailable,
    command,
    environment_of,
    load_options,
)
from backends.bench.peers.figures import Answer
from backends.bench.peers.process import WorkerFailed, WorkerProcess
from backends.bench.turns import prompts_of_round, rotated

_LOAD_S = 240.0
_RUN_S = 120.0
_SLOW_S = 10.0
"""Who took longer for a cell has run it once, and doesn't again: nobody waits for the same answer twice."""
_LONG_PROMPT = 512
"""Tokens; from here on one prompt says how long the first token takes, of shorter ones two a round."""

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cell:
    """``kind``: a class of prompts; "" for the time to the first token of prompts of ``prompt_tokens``."""

    kind: str
    concurrency: int = 1
    prompt_tokens: int = 0

    def __str__(self) -> str:
        return f"{self.kind} x{self.concurrency}" if self.kind else f"first token of {self.prompt_tokens}"


@dataclass(frozen=True, slots=True)
class PeersOptions:
    """``prompts``: by concurrency, how many prompts of a class a round decodes; ``seconds``: no round is begun that
    would end later than this after the start, judged by the longest so far."""

    contestants: tuple[str, ...] = USUAL
    concurrencies: tuple[int, ...] = (1, 4, 16)
    rounds: int = 3
    max_tokens: int = 32
    first_token_of: tuple[int, ...] = (64, 1024)
    prompts: Mapping[int, int] = field(default_factory=lambda: {1: 1, 4: 4, 16: 16})
    seconds: float | None = 330.0

    @classmethod
    def quick(cls) -> PeersOptions:
        """One request, few contestants."""
        return cls(QUICK, concurrencies=(1,), max_tokens=48, seconds=80.0)


@dataclass(slots=True)
class Measured:
    """``answers``: by cell and contestant, a run for each round; ``facts`` and ``memory_mb`` by contestant. ``slow``:
    the cells that a contestant ran only once, as that took so long."""

    answers: dict[Cell, dict[str, list[list[Answer]]]]
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    memory_mb: dict[str, float | None] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    slow: dict[str, list[str]] = field(default_factory=dict)
    rounds: int = 0


def cells_of(options: PeersOptions, classes: Sequence[str]) -> list[Cell]:
    """Each class alone at one request, all of them mixed at several."""
    cells = [Cell("", prompt_tokens=length) for length in options.first_token_of]
    for concurrency in options.concurrencies:
        kinds = classes if concurrency == 1 or len(classes) == 1 else ("mixed",)
        cells += [Cell(kind, concurrency) for kind in kinds]
    return cells


def measure(
    options: PeersOptions,
    place: Place,
    classes: Mapping[str, Sequence[Ids]],
    text: Ids,
    progress: Callable[[str], object] = lambda line: None,
    *,
    contestants: Mapping[str, Contestant] = CONTESTANTS,
    start: Callable[[Program, Place], WorkerProcess] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Measured:
    """Load all, then run the rounds. ``classes``: token ids of prompts by class; ``text``: ids of which prompts of any
    length are cut.

    A contestant that can't be had, or fails on the way, is left out from there on; ``skipped`` says why.
    """
    began = clock()
    cells = cells_of(options, list(classes))
    asked = {name: contestants[name] for name in options.contestants}
    measured = Measured({cell: {name: [] for name in asked} for cell in cells})
    pools = {**classes, "mixed": [ids for each in zip(*classes.values(), strict=False) for ids in each]}
    with _loaded(asked, place, measured, progress, start or _start) as workers:
        rounds = _Rounds(options, asked, workers, pools, text, measured, clock)
        rounds.warm_up(cells)
        progress(f"loaded after {clock() - began:.0f} s")
        longest = 0.0
        for turn in range(options.rounds):
            if turn and options.seconds is not None and clock() - began + longest > options.seconds:
                progress(f"no time is left for round {turn + 1}")
                break
            round_began = clock()
            for number, cell in enumerate(cells):
                rounds.run_cell(cell, turn, turn + number)
                progress(f"round {turn + 1}: {cell}")
            longest = max(longest, clock() - round_began)
            measured.rounds = turn + 1
    return measured


@dataclass(frozen=True, slots=True)
class _Rounds:
    """``workers``: by contestant, those that are still in."""

    options: PeersOptions
    asked: Mapping[str, Contestant]
    workers: dict[str, WorkerProcess]
    pools: Mapping[str, Sequence[Ids]]
    text: Ids
    measured: Measured
    clock: Callable[[], float]

    def warm_up(self, cells: Sequence[Cell]) -> None:
        """What is done once (compiled, allocated, touched) is done before the clock runs."""
        widest = max(cell.concurrency for cell in cells)
        lengths = sorted({cell.prompt_tokens for cell in cells if cell.prompt_tokens})
        pool = next(iter(self.pools.values()))
        for name in list(self.workers):
            with self._dropping(name):
                self._ask(name, [pool[i % len(pool)] for i in range(widest)], 4, widest)
                self._ask(name, [pool[0]], 8)
                for length in lengths:
                    began = self.clock()
                    self._ask(name, [cut(self.text, min(length, _LONG_PROMPT // 2), 1000)], 1)
                    if length >= _LONG_PROMPT and self.clock() - began < _SLOW_S / 8:
                        self._ask(name, [cut(self.text, length, 1001)], 1)

    def run_cell(self, cell: Cell, turn: int, order: int) -> None:
        """Everybody once."""
        if cell.kind:
            count, pool = self.options.prompts.get(cell.concurrency, cell.concurrency), self.pools[cell.kind]
            prompts = prompts_of_round(pool, turn, count)
        else:
            # Another beginning each time: no one answers from a cache of prompts.
            count = 1 if cell.prompt_tokens >= _LONG_PROMPT else 2
            prompts = [cut(self.text, cell.prompt_tokens, turn * count + i) for i in range(count)]
        for name in rotated(list(self.workers), order):
            if str(cell) in self.measured.slow.get(name, ()):
                continue
            with self._dropping(name):
                began = self.clock()
                told = self._ask(name, prompts, self.options.max_tokens if cell.kind else 1, cell.concurrency)
                if self.clock() - began > _SLOW_S:
                    self.measured.slow.setdefault(name, []).append(str(cell))
                self.measured.answers[cell][name].append([Answer.parse(each) for each in told["answers"]])
                self.measured.memory_mb[name] = told["memory_mb"]

    def _ask(self, name: str, prompts: Sequence[Ids], max_tokens: int, concurrency: int = 1) -> dict[str, Any]:
        order = {"do": "run", "prompts": prompts, "max_tokens": max_tokens, "concurrency": concurrency}
        return self.workers[name].ask({**order, "mode": self.asked[name].mode}, _RUN_S)

    @contextlib.contextmanager
    def _dropping(self, name: str) -> Iterator[None]:
        """Who fails is out, and the others go on."""
        try:
            yield
        except WorkerFailed as error:
            self.measured.skipped[name] = str(error)
        except (KeyError, TypeError, ValueError) as error:
            self.measured.skipped[name] = f"it answered what can't be read: {type(error).__name__}: {error}"
        if name in self.measured.skipped:
            del self.workers[name]


def cut(text: Ids, length: int, which: int) -> Ids:
    """``length`` ids of ``text``, beginning elsewhere for each ``which``, and at its start again where it ends."""
    start = which * 97 % len(text)
    return tuple(text[(start + i) % len(text)] for i in range(length))


@contextlib.contextmanager
def _loaded(
    asked: Mapping[str, Contestant],
    place: Place,
    measured: Measured,
    progress: Callable[[str], object],
    start: Callable[[Program, Place], WorkerProcess],
) -> Iterator[dict[str, WorkerProcess]]:
    """A worker for each contestant, asleep; contestants of one program share one."""
    programs = list({contestant.program.name: contestant.program for contestant in asked.values()}.values())
    running: dict[str, WorkerProcess] = {}
    failed: dict[str, str] = {}
    facts: dict[str, dict[str, Any]] = {}

    def attempt(program: Program, act: Callable[[], None]) -> None:
        try:
            act()
        except (Unavailable, WorkerFailed, OSError) as error:
            failed[program.name] = str(error)
            progress(f"{program.name} is left out: {error}")

    def start_one(program: Program) -> None:
        running[program.name] = start(program, place)

    def load(program: Program) -> None:
        order = {"do": "load", "options": load_options(program, place)}
        facts[program.name] = running[program.name].ask(order, _LOAD_S)["facts"]
        progress(f"{program.name} is loaded")

    try:
        # All in this thread: a worker ends with the thread that started it.
        for program in programs:
            attempt(program, lambda program=program: start_one(program))
        started = [program for program in programs if program.name in running]
        # The gateway's own measure at their start what steps cost, so they are alone; of the others two at a time.
        for program in started:
            if program.environment is None:
                attempt(program, lambda program=program: load(program))
        with ThreadPoolExecutor(2) as pool:
            others = [program for program in started if program.environment is not None]
            list(pool.map(lambda program: attempt(program, lambda: load(program)), others))
        for name, contestant in asked.items():
            if (reason := failed.get(contestant.program.name)) is not None:
                measured.skipped[name] = reason
            else:
                measured.facts[name] = facts[contestant.program.name]
        yield {
            name: running[contestant.program.name] for name, contestant in asked.items() if name not in measured.skipped
        }
    finally:
        for worker in running.values():
            worker.close()


def _start(program: Program, place: Place) -> WorkerProcess:
    return WorkerProcess(command(program, place), environment_of(program, place))
