"""What steps cost on a device that runs them in buckets of rows: a staircase for each context.

A CUDA graph is captured for a bucket of rows, and a step is filled up to one with rows that do nothing. So all steps of
a bucket take the same, and the rows that are left in it are free: nothing is smoothed or interpolated between buckets.
How much of the step is attention depends on the context, which is the second axis, linear between its points.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import log2
from statistics import median
from typing import Any

import torch

from backends.cost.step_cost import Budget, StepCost
from backends.runners.base import ModelRunner
from backends.runners.batch import PAGE_SIZE, BatchBuilder, StepBatch

CONTEXTS = (256, 1024, 4096, 16384)
_TURNS = 5
# Tables are made for contexts this far apart, so that a growing answer does not make a new one in every step.
_STEPS_TO_DOUBLE = 4


@dataclass(frozen=True, slots=True)
class StepTable:
    """Milliseconds of a step by (bucket of rows, context). Raises ValueError when a pair is missing or not positive."""

    ms: Mapping[tuple[int, int], float]
    heads: tuple[tuple[int, float], ...] = ()
    _made: dict[int, StepCost] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        missing = [
            (rows, context) for rows in self.buckets for context in self.contexts if (rows, context) not in self.ms
        ]
        if not self.ms or missing:
            raise ValueError(f"a step table lacks the times of (rows, context) {missing[:3] or 'of any size'}")
        if wrong := [pair for pair, ms in self.ms.items() if not ms > 0.0]:
            raise ValueError(f"a step table's time of (rows, context) {wrong[0]} is not positive")

    @property
    def buckets(self) -> list[int]:
        return sorted({rows for rows, _ in self.ms})

    @property
    def contexts(self) -> list[int]:
        return sorted({context for _, context in self.ms})

    def at(self, context: float) -> StepCost:
        """The staircase of steps whose sequences have ``context`` tokens on average. The same object for contexts that
        are close together."""
        place = context_place(context)
        found = self._made.get(place)
        if found is None:
            points = [(rows, self.step_ms(rows, 2 ** (place / _STEPS_TO_DOUBLE))) for rows in self.buckets]
            found = self._made[place] = StepCost.from_measurements(points, self.heads, staircase=True)
        return found

    def step_ms(self, bucket: int, context: float) -> float:
        """Of a measured bucket: linear in the context, beyond the ends as between the last two, never less than half of
        the smallest that was measured."""
        contexts = self.contexts
        if len(contexts) == 1:
            return self.ms[bucket, contexts[0]]
        right = min(max(bisect_left(contexts, context), 1), len(contexts) - 1)
        (x0, x1) = contexts[right - 1 : right + 1]
        y0, y1 = self.ms[bucket, x0], self.ms[bucket, x1]
        ms = y0 + (y1 - y0) * (context - x0) / (x1 - x0)
        return max(ms, min(self.ms[bucket, each] for each in contexts) / 2)


def context_place(context: float) -> int:
    """Which of the contexts, four to a doubling, this one is closest to."""
    return round(_STEPS_TO_DOUBLE * log2(max(context, 1.0)))


# Runs something on the device and returns the milliseconds that it took there.
Timer = Callable[[Callable[[], object]], float]


def event_timer(device: torch.device, cuda: Any = torch.cuda) -> Timer:
    """By events in the device's own stream, so that the host's time is not in it. ``cuda``: for tests."""

    def timed(run: Callable[[], object]) -> float:
        with cuda.device(device):
            began, ended = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
            began.record()
            run()
            ended.record()
            ended.synchronize()
            return float(began.elapsed_time(ended))

    return timed


def measure_steps(
    runner: ModelRunner,
    buckets: Sequence[int],
    timer: Timer,
    budget: Budget,
    heads: Sequence[tuple[int, float]] = (),
    contexts: Sequence[int] = CONTEXTS,
) -> StepTable:
    """The median of a few runs of each bucket and context. Small sizes first; when the budget is over the rest is made
    of what is known: of a bucket's time at a shorter context, and of a smaller bucket in proportion to the rows, which
    is the dear end of what can be."""
    buckets = sorted(rows for rows in buckets if rows <= runner.max_rows)
    longest = min(runner.max_context - 2, runner.num_pages * PAGE_SIZE - 2)
    contexts = sorted({min(context, longest) for context in contexts})
    ms: dict[tuple[int, int], float] = {}
    for context in contexts:
        for rows in buckets:
            if ms and budget.left() <= 0.0:
                ms[rows, context] = _dear_guess(ms, rows, context, buckets)
                continue
            batch = _batch(runner, rows, context)
            # The first run captures the bucket's graph.
            timer(lambda batch=batch: runner.logits(runner.forward(batch)))
            ms[rows, context] = median(
                timer(lambda batch=batch: runner.logits(runner.forward(batch))) for _ in range(_TURNS)
            )
    return StepTable(ms, tuple(heads))


def _dear_guess(ms: Mapping[tuple[int, int], float], rows: int, context: int, buckets: Sequence[int]) -> float:
    shorter = [known for size, known in ms if size == rows and known < context]
    if shorter:
        return ms[rows, max(shorter)] * context / max(shorter)
    smaller = max(size for size, known in ms if known == context and size < rows)
    return ms[smaller, context] * rows / smaller


def _batch(runner: ModelRunner, rows: int, context: int) -> StepBatch:
    builder = BatchBuilder(runner.num_pages * PAGE_SIZE)
    pages = list(range(-(-(context + 1) // PAGE_SIZE)))
    # Single rows of the same sequence, each on its own: as many sequences would be, without their pages.
    for _ in range(rows):
        builder.add_tree(pages, 0, context - 1, [], [])
    return builder.build()
