"""What a step costs on this device, as a function of its rows: the denominator of every decision about speculation."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

_LISTED_ROWS = 512


@dataclass(frozen=True)
class StepCost:
    """Milliseconds of a forward (with ``lm_head``) by number of rows, and of the heads by number of sequences.

    Between measured points it is linear; beyond the last it goes on with the last slope. Both tables are ascending in
    size; times are made non-decreasing, since noise must not make more rows look cheaper.

    ``guessed``: the numbers of rows whose times are not measured yet, see :func:`completed`. ``staircase``: a step of
    fewer rows than a measured size takes what that size takes, as on a device that fills steps up.
    """

    rows: tuple[tuple[int, float], ...]
    heads: tuple[tuple[int, float], ...] = ()
    guessed: tuple[int, ...] = ()
    staircase: bool = False
    _by_rows: list[float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Asked dozens of times in every step.
        object.__setattr__(self, "_by_rows", [self._at(size) for size in range(_LISTED_ROWS)])

    @classmethod
    def from_measurements(
        cls,
        rows: Sequence[tuple[int, float]],
        heads: Sequence[tuple[int, float]] = (),
        guessed: Sequence[int] = (),
        *,
        staircase: bool = False,
    ) -> StepCost:
        return cls(_non_decreasing(rows), _non_decreasing(heads), tuple(sorted(guessed)), staircase)

    def forward_ms(self, rows: int) -> float:
        return self._by_rows[rows] if rows < _LISTED_ROWS else self._at(rows)

    def _at(self, rows: int) -> float:
        if self.staircase and rows <= self.rows[-1][0]:
            return self.rows[bisect_left(self.rows, (rows, 0.0))][1]
        return _interpolate(self.rows, rows)

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


@dataclass(slots=True)
class Budget:
    """Seconds that measuring may take altogether, from the first look on."""

    seconds: float
    clock: Callable[[], float]
    _began: float | None = None

    def left(self, share: float = 1.0) -> float:
        """What is left of the whole, or of its first ``share``."""
        now = self.clock()
        if self._began is None:
            self._began = now
        return self._began + self.seconds * share - now


@dataclass(slots=True)
class Timings:
    """Runs of several sizes, timed within a budget. ``before`` each run, untimed: what leaves the caches as they are in
    service. A run that is expected to last longer than what is left isn't begun."""

    run: Callable[[int], object]
    budget: Budget
    before: Callable[[], object] = lambda: None
    share: float = 1.0
    _times: dict[int, list[float]] = field(default_factory=dict)
    _whole_s: dict[int, float] = field(default_factory=dict)

    def turn(self, sizes: Sequence[int], *, warm_up: int = 0, burst: int = 1, anyway: bool = False) -> bool:
        """Of each size ``burst`` timed runs after ``warm_up`` others, as in service a step most often follows its like.
        Sizes take turns, so a noisy moment does not fall on one of them only. ``anyway``: whatever the budget says.

        Returns whether there was time for all of them.
        """
        complete = True
        for size in sizes:
            for number in range(warm_up + burst):
                if not anyway and self.expected_s(size) > self.budget.left(self.share):
                    complete = False
                    break
                self.once(size, keep=number >= warm_up)
        return complete

    def times(self) -> dict[int, list[float]]:
        """Milliseconds of every timed run, by size; without the first one of a size, which touched new memory, where
        there are others."""
        return {size: found[1:] or found for size, found in self._times.items()}

    def settled(self) -> set[int]:
        """Sizes whose times are more than the first touch of memory."""
        return {size for size, found in self._times.items() if len(found) > 1}

    def once(self, size: int, *, keep: bool = True) -> None:
        """One run, whatever the budget says."""
        clock = self.budget.clock
        began = clock()
        self.before()
        start = clock()
        self.run(size)
        ended = clock()
        self._whole_s[size] = ended - began
        if keep:
            self._times.setdefault(size, []).append((ended - start) * 1e3)

    def expected_s(self, size: int) -> float:
        """What a run would take, with what comes before it: by the nearest size that has run; of a larger one, each
        row takes at most what the others took. 0 when none has."""
        smaller = max((known for known in self._whole_s if known <= size), default=None)
        if smaller is not None:
            return self._whole_s[smaller] * size / smaller
        return min(self._whole_s.values(), default=0.0)


def medians(times: Mapping[int, Sequence[float]]) -> list[tuple[int, float]]:
    """By size; of two in the middle the slower."""
    return [(size, sorted(found)[len(found) // 2]) for size, found in times.items()]


def completed(
    points: Sequence[tuple[int, float]], sizes: Sequence[int], like: StepCost | None = None
) -> list[tuple[int, float]]:
    """A point for each of ``sizes``, which the points are among: as measured; on the line between its neighbours; below
    the smallest as that. Beyond the largest it rises as ``like`` does, a table of the same CPU; without one in
    proportion to the rows, which is the dear end of what can be: what was not measured must not look cheap.
    """
    ordered, measured = tuple(sorted(points)), dict(points)
    largest, ms = ordered[-1]

    def estimate(size: int) -> float:
        if size <= largest:
            return _interpolate(ordered, size)
        dearest = size / largest
        return ms * (dearest if like is None else min(like.forward_ms(size) / like.forward_ms(largest), dearest))

    return [(size, measured[size] if size in measured else estimate(size)) for size in sorted(sizes)]


def refined(cost: StepCost, found: Mapping[int, float], like: StepCost | None = None) -> StepCost:
    """The table with what was ``found`` of its guesses, in milliseconds by rows; what stays guessed follows anew from
    what is measured by now (see :func:`completed`)."""
    sizes = [size for size, _ in cost.rows]
    left = [size for size in cost.guessed if size not in found]
    known = {size: found.get(size, ms) for size, ms in cost.rows if size not in left}
    return StepCost.from_measurements(completed(_non_decreasing(list(known.items())), sizes, like), cost.heads, left)


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
