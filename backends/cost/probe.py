"""Measures what steps cost on this device: the model's forward by rows, the heads by sequences."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from backends.cost.record import CHECKED_ROWS, restless
from backends.cost.step_cost import Budget, StepCost, Timings, completed, medians, smoothed
from backends.heads.expansion import usual_tree
from backends.runners.base import HeadsRunner, ModelRunner, ProposalRequest
from backends.runners.batch import PAGE_SIZE, BatchBuilder

# Sizes at which the table is made, in the order of their worth: doublings first, as the others lie between them, and
# few rows before many. Enough to see where a step stops being bound by memory.
ROWS = (1, 2, 4, 8, 16, 32, 3, 6, 12, 5, 7, 10, 64, 24, 48, 128, 96)
SEQUENCES = (1, 4, 16, 32)
CONTEXT = 256
EARLY_ROWS = 32
"""Up to here a start measures. Larger steps have more requests in them than the first ones will be, and are dear to
measure: their times are guessed until the engine is idle, see :mod:`backends.cost.idle`."""
MEASURE_S = 5.0
"""What measuring may take of a start, checking a kept table included. A machine on which that is not enough goes on
with guesses for the rest."""
_CHECK_SHARE = 0.3
_RANKS = 10
# Turns; runs before and timed runs in a turn, by rows: trees of one or a few requests have few rows, and there a tenth
# of a millisecond decides about a node.
_TURNS, _HEADS_TURNS = 3, 5
_RUNS = {range(1, 17): (4, 5), range(17, 1 << 20): (1, 1)}
_CHECKS = 3
_SMALL = 8


@dataclass(frozen=True, slots=True)
class Measured:
    """``usable``: there was time for what small trees are decided by; what else is missing is marked as guessed.
    ``restless``: the machine was too busy for the times to mean much."""

    cost: StepCost
    usable: bool
    restless: bool

    @property
    def worth_keeping(self) -> bool:
        """To be believed by others, and later."""
        return self.usable and not self.restless


@dataclass(slots=True)
class CostProbe:
    """A runner that nobody else uses at the time, with its heads. Measures over a context of a few hundred tokens.

    All that one probe does fits ``budget_s``, but for one run of a size that takes longer. ``most_rows``: larger sizes
    are not measured but guessed.
    """

    runner: ModelRunner
    heads: HeadsRunner | None
    budget_s: float = MEASURE_S
    clock: Callable[[], float] = time.perf_counter
    most_rows: int = max(ROWS)
    _budget: Budget = field(init=False)

    def __post_init__(self) -> None:
        self._budget = Budget(self.budget_s, self.clock)

    def measure(self) -> Measured:
        """A whole table; on a slow machine what the budget allows, and guesses for the rest."""
        every = [size for size in ROWS if size <= self.runner.max_rows]
        sizes = [size for size in every if size <= self.most_rows]
        forward, heads = self.timings(), self._heads_timings()
        # First every size once, and once more. Without those of one row and one sequence there is no table.
        self._first(forward, sizes[:1])
        in_time = self._heads_once(heads) and forward.turn(sizes[1:]) and forward.turn(sizes)
        for _ in range(_TURNS if in_time else 0):
            for rows, (warm_up, burst) in _RUNS.items():
                in_time &= forward.turn([size for size in sizes if size in rows], warm_up=warm_up, burst=burst)
            if heads is not None:
                in_time &= heads.turn(SEQUENCES * (_HEADS_TURNS // _TURNS + 1))
            if not in_time:
                break
        # One row is never a guess: guesses start from there.
        times, settled = forward.times(), forward.settled() | {1}
        table = completed(smoothed(medians(dict(sorted(times.items())))), every)
        cost = StepCost.from_measurements(table, self._heads_points(heads), sorted(set(every) - settled))
        return Measured(cost, settled >= {size for size in sizes if size <= _SMALL}, restless(times))

    def measure_heads(self) -> list[tuple[int, float]]:
        """Milliseconds of the heads by number of sequences; empty without heads."""
        heads = self._heads_timings()
        if heads is not None and self._heads_once(heads):
            heads.turn(SEQUENCES * _HEADS_TURNS)
        return self._heads_points(heads)

    def check(self) -> list[tuple[int, float]]:
        """Milliseconds at the few sizes by which a kept table is judged, in a fraction of the time."""
        sizes = [size for size in CHECKED_ROWS if size <= self.runner.max_rows]
        forward = self.timings(_CHECK_SHARE)
        self._first(forward, sizes[:1])
        if forward.turn(sizes[1:]):
            for _ in range(_CHECKS):
                forward.turn(sizes, warm_up=_CHECKS)
        return medians(forward.times())

    def timings(self, share: float = 1.0) -> Timings:
        """Of forwards by rows."""
        return Timings(self._forward, self._budget, share=share)

    @staticmethod
    def _first(forward: Timings, size: list[int]) -> None:
        """The very first run touches new memory, and may take fifty times what the next does. So there is another, if
        there is time: by it the others are expected."""
        forward.turn(size, anyway=True)
        forward.turn(size)

    def _heads_timings(self) -> Timings | None:
        heads, runner = self.heads, self.runner
        if heads is None:
            return None
        hidden = torch.zeros(SEQUENCES[-1], runner.hidden_size, dtype=runner.dtype, device=runner.device)
        shapes = [usual_tree(heads.num_heads)] * SEQUENCES[-1]
        asked = {n: ProposalRequest(hidden, [[0]] * n, _RANKS, shapes[:n], rows=range(n)) for n in SEQUENCES}

        def propose(sequences: int) -> None:
            heads.propose(asked[sequences])

        # In service a forward has just swept their weights out of the caches.
        return Timings(propose, self._budget, before=lambda: self._forward(1))

    @staticmethod
    def _heads_once(heads: Timings | None) -> bool:
        if heads is None:
            return True
        heads.turn(SEQUENCES[:1], anyway=True)
        return heads.turn(SEQUENCES[1:])

    @staticmethod
    def _heads_points(heads: Timings | None) -> list[tuple[int, float]]:
        return [] if heads is None else completed(medians(heads.times()), SEQUENCES)

    def _forward(self, rows: int) -> float:
        runner = self.runner
        context = min(CONTEXT, runner.max_context - 2, (runner.num_pages - 1) * PAGE_SIZE)
        batch = BatchBuilder(runner.num_pages * PAGE_SIZE)
        # Pages are read only: an engine that is idle keeps in them what its next prompts may begin with. What a row
        # writes goes to the scratch slots, the last of which few steps need.
        scratch = runner.num_pages + -(-runner.max_rows // PAGE_SIZE) - 1
        pages = [*range(context // PAGE_SIZE), scratch]
        batch.add_tree(pages, 0, context, [0] * (rows - 1), [0] * (rows - 1))
        # Taking one number waits for a device that works on its own, and costs nothing else.
        return runner.logits(runner.forward(batch.build()))[0, 0].item()
