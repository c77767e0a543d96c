"""What a step costs on this device, as a function of its rows: the denominator of every decision about speculation."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

_LISTED_ROWS = 512


@dataclass(frozen=True)
class StepCost:
    """Milliseconds of a forward (with ``lm_head``) by number of rows, and of the heads by number of sequences.

    Between measured points it is linear; beyond the last it goes on with the last slope. Both tables are ascending in
    size; times are made non-decreasing, since noise must not make more rows look cheaper.
    """

    rows: tuple[tuple[int, float], ...]
    heads: tuple[tuple[int, float], ...] = ()
    _by_rows: list[float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Asked dozens of times in every step.
        object.__setattr__(self, "_by_rows", [_interpolate(self.rows, size) for size in range(_LISTED_ROWS)])

    @classmethod
    def from_measurements(cls, rows: Sequence[tuple[int, float]], heads: Sequence[tuple[int, float]] = ()) -> StepCost:
        return cls(_non_decreasing(rows), _non_decreasing(heads))

    def forward_ms(self, rows: int) -> float:
        return self._by_rows[rows] if rows < _LISTED_ROWS else _interpolate(self.rows, rows)

    def heads_ms(self, sequences: float) -> float:
        """All heads, with one list of guesses from each for every sequence."""
        if sequences == 0 or not self.heads:
            return 0.0
        return _interpolate(self.heads, sequences)

    def levels_ms(self, lists: int, levels: int, heads: int) -> float:
        """``levels`` of ``heads`` heads that run one after the other, making so many lists of guesses together."""
        return self.heads_ms(lists / levels) * levels / heads if lists else 0.0

    def decode_ms(self, sequences: int, nodes: int, prompt_rows: int) -> float:
        """The forward that decoding has to answer for: a vanilla step, and what ``nodes`` add to the rows there are.

        The prompts beside it are read in any case. Were their time counted, every node would look cheap next to it.
        """
        if not sequences:
            return 0.0
        rows = sequences + prompt_rows
        return self.forward_ms(sequences) + self.forward_ms(rows + nodes) - self.forward_ms(rows)


def measure_runs(
    sizes: Sequence[int],
    run: Callable[[int], object],
    clock: Callable[[], float],
    repeats: int = 5,
    before: Callable[[], object] = lambda: None,
    warm_up: int = 0,
    burst: int = 1,
) -> dict[int, list[float]]:
    """Milliseconds of every ``run(size)``. Sizes take turns, so a noisy moment does not fall on one of them only.

    In each of the ``repeats`` turns of a size, ``burst`` runs are timed after ``warm_up`` others, as in service a step
    most often follows its like. ``before`` each timed run: what leaves the caches as they are in service.
    """
    times: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(repeats):
        for size in sizes:
            for _ in range(warm_up):
                run(size)
            for _ in range(burst):
                before()
                start = clock()
                run(size)
                times[size].append((clock() - start) * 1e3)
    return times


def medians(times: Mapping[int, Sequence[float]]) -> list[tuple[int, float]]:
    """By size; of two in the middle the slower."""
    return [(size, sorted(found)[len(found) // 2]) for size, found in times.items()]


def smoothed(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Half of every point but the ends, and half of the line between its neighbours; ascending in size.

    Times rise smoothly with the rows, what was measured does not, and the best number of nodes hangs on differences.
    """
    result = list(points)
    for index in range(1, len(points) - 1):
        size, ms = points[index]
        result[index] = (size, (ms + _interpolate((points[index - 1], points[index + 1]), size)) / 2)
    return result


def _non_decreasing(points: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    highest, result = 0.0, []
    for size, value in sorted(points):
        highest = max(highest, value)
        result.append((size, highest))
    return tuple(result)


def _interpolate(points: tuple[tuple[int, float], ...], size: float) -> float:
    if len(points) == 1 or size <= points[0][0]:
        return points[0][1]
    index = min(max(bisect_right(points, (size, float("inf"))), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[index - 1], points[index]
    return y0 + (y1 - y0) * (size - x0) / (x1 - x0)
