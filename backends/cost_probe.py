"""Measures what steps cost on this device: the model's forward by rows, the heads by sequences."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from backends.batch import PAGE_SIZE, BatchBuilder
from backends.cost import StepCost, measure_runs, medians, smoothed
from backends.cost_record import CHECKED_ROWS, restless
from backends.follow import usual_tree
from backends.runner import HeadsRunner, ModelRunner

# Sizes at which the table is measured; enough to see where a step stops being bound by memory.
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 48, 64, 96, 128)
SEQUENCES = (1, 4, 16, 32)
CONTEXT = 256
_RANKS = 10
# Turns, runs before and timed runs in a turn, by rows: trees of one or a few requests have few rows, and there a tenth
# of a millisecond decides about a node.
_TURNS = {range(1, 17): (3, 4, 5), range(17, 1 << 20): (3, 1, 1)}
_CHECKS = 3


@dataclass(frozen=True, slots=True)
class Measured:
    """``restless``: the machine was too busy for this to be believed by others, or later."""

    cost: StepCost
    restless: bool


@dataclass(frozen=True, slots=True)
class CostProbe:
    """A runner that nobody else uses at the time, with its heads. Measures over a context of a few hundred tokens."""

    runner: ModelRunner
    heads: HeadsRunner | None

    def measure(self) -> Measured:
        """The whole table, in about five seconds for the demo model."""
        rows = [size for size in ROWS if size <= self.runner.max_rows]
        self._touch(rows[-1])
        heads, forward = self.measure_heads(), {}
        for sizes, (turns, warm_up, burst) in _TURNS.items():
            some = [size for size in rows if size in sizes]
            forward |= measure_runs(some, self._forward, time.perf_counter, turns, warm_up=warm_up, burst=burst)
        return Measured(StepCost.from_measurements(smoothed(medians(forward)), heads), restless(forward))

    def measure_heads(self) -> list[tuple[int, float]]:
        """Milliseconds of the heads by number of sequences; empty without heads.

        In service a forward has just swept their weights out of the caches.
        """
        heads, runner = self.heads, self.runner
        if heads is None:
            return []
        hidden = torch.zeros(SEQUENCES[-1], runner.hidden_size, dtype=runner.dtype, device=runner.device)
        shapes = [usual_tree(heads.num_heads)] * SEQUENCES[-1]
        asked = {n: (range(n), [[0]] * n, shapes[:n]) for n in SEQUENCES}

        def propose(sequences: int) -> None:
            rows, contexts, trees = asked[sequences]
            heads.propose(hidden, contexts, _RANKS, trees, rows=rows)

        return medians(measure_runs(SEQUENCES, propose, time.perf_counter, before=lambda: self._forward(1)))

    def check(self) -> list[tuple[int, float]]:
        """Milliseconds at the few sizes by which a kept table is judged, in a fraction of the time."""
        rows = [size for size in CHECKED_ROWS if size <= self.runner.max_rows]
        self._touch(rows[-1])
        return medians(measure_runs(rows, self._forward, time.perf_counter, _CHECKS, warm_up=_CHECKS))

    def _touch(self, rows: int) -> None:
        """The first touch of the memory, which takes longer than any after it."""
        self._forward(rows)

    def _forward(self, rows: int) -> float:
        runner = self.runner
        context = min(CONTEXT, runner.max_context - 2, (runner.num_pages - 1) * PAGE_SIZE)
        batch = BatchBuilder(runner.num_pages * PAGE_SIZE)
        batch.add_tree(list(range(-(-(context + 1) // PAGE_SIZE))), 0, context, [0] * (rows - 1), [0] * (rows - 1))
        # Taking one number waits for a device that works on its own, and costs nothing else.
        return runner.logits(runner.forward(batch.build()))[0, 0].item()
