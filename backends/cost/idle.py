"""Measures what a start has guessed, one short run at a time, while the engine has nothing else to do."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from backends.cost.probe import CostProbe
from backends.cost.step_cost import StepCost, Timings, medians, refined

SHORT_S = 0.1
"""A request that arrives during a run waits for its end. Sizes that would take longer stay guessed."""
_TURNS = 3
# Beside the others in every turn: the machine's mood is another than at the start, and what counts is how sizes
# compare.
_REFERENCE_ROWS = 8
_WARM_UP, _BURST = 1, 3


class _Run(NamedTuple):
    rows: int
    timed: bool
    last: bool = False
    """Of its size in this turn."""


@dataclass(slots=True)
class IdleMeasuring:
    """The guesses of ``cost``, the table in use, and what becomes of them. ``probe``: of the runner that serves, so
    :meth:`step` is for the thread that runs the steps, while no request is in it."""

    probe: CostProbe
    cost: StepCost
    short_s: float = SHORT_S
    _timings: Timings = field(init=False)
    _reference: int = field(init=False)
    _runs: Iterator[_Run] = field(init=False)
    _begun: bool = False

    def __post_init__(self) -> None:
        measured = [size for size, _ in self.cost.rows if size not in self.cost.guessed]
        self._timings = self.probe.timings()
        self._reference = max((size for size in measured if size <= _REFERENCE_ROWS), default=measured[0])
        self._runs = _runs(self.cost.guessed, self._reference)

    def step(self) -> bool:
        """One run that is expected to be short; False: there is none left. :attr:`cost` may be a better table then."""
        for run in self._runs:
            if self._expected_s(run.rows) > self.short_s:
                continue
            self._timings.once(run.rows, keep=run.timed)
            self._begun = True
            if run.last:
                self._take_over()
            return True
        return False

    def _expected_s(self, rows: int) -> float:
        """Guesses of the table are at the dear end, and so is what follows from smaller sizes that ran just now."""
        by_table = self.cost.forward_ms(rows) / 1e3
        return min(by_table, self._timings.expected_s(rows)) if self._begun else by_table

    def _take_over(self) -> None:
        times = self._timings.times()
        reference = times.pop(self._reference, None)
        if reference:
            level = self.cost.forward_ms(self._reference) / statistics.median(reference)
            self.cost = refined(self.cost, {size: ms * level for size, ms in medians(times)}, like=self.cost)


def _runs(sizes: Sequence[int], reference: int) -> Iterator[_Run]:
    """Sizes take turns, as at the start, so that a noisy moment does not fall on one of them only."""
    for _ in range(_TURNS):
        for size in sizes:
            yield _Run(reference, timed=False)
            yield _Run(reference, timed=True)
            for number in range(_WARM_UP + _BURST):
                yield _Run(size, timed=number >= _WARM_UP, last=number == _WARM_UP + _BURST - 1)
