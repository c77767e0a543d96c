"""The cost table: interpolation, monotony, and how it is measured."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.cost.step_cost import Budget, StepCost, Timings, completed, medians, smoothed

COST = StepCost(rows=((1, 10.0), (4, 10.0), (8, 14.0), (16, 30.0)), heads=((1, 2.0), (3, 3.0)))


@pytest.mark.parametrize(
    ("rows", "expected"), [(0, 10.0), (1, 10.0), (3, 10.0), (4, 10.0), (5, 11.0), (8, 14.0), (12, 22.0), (20, 38.0)]
)
def test_time_is_linear_between_points_and_beyond_the_last(rows: int, expected: float) -> None:
    assert COST.forward_ms(rows) == pytest.approx(expected)


def test_heads_that_stop_early_cost_their_levels_only() -> None:
    assert COST.levels_ms(lists=8, levels=4, heads=4) == pytest.approx(COST.heads_ms(2)) == pytest.approx(2.5)
    assert COST.levels_ms(lists=2, levels=1, heads=4) == pytest.approx(COST.heads_ms(2) / 4)
    assert COST.levels_ms(lists=6, levels=4, heads=4) == pytest.approx(2.25)
    assert COST.levels_ms(lists=0, levels=0, heads=4) == 0.0
    assert StepCost(rows=((1, 5.0),)).levels_ms(7, 1, 4) == 0.0


@given(
    st.dictionaries(st.integers(1, 200), st.floats(0.01, 100), min_size=1, max_size=10),
    st.lists(st.integers(0, 400), min_size=2, max_size=10),
)
def test_more_rows_never_look_cheaper_and_measured_points_are_bounds(
    points: dict[int, float], sizes: list[int]
) -> None:
    cost = StepCost.from_measurements(list(points.items()))
    times = [cost.forward_ms(size) for size in sorted(sizes)]
    assert all(later >= earlier - 1e-9 for earlier, later in itertools.pairwise(times))
    for size in points:
        highest_so_far = max(time for other, time in points.items() if other <= size)
        assert cost.forward_ms(size) == pytest.approx(highest_so_far)


class Device:
    """Seconds pass when it runs, and only then."""

    def __init__(self, seconds: Callable[[int], float]) -> None:
        self.now, self._seconds = 0.0, seconds
        self.ran: list[int] = []

    def clock(self) -> float:
        return self.now

    def run(self, size: int) -> None:
        self.ran.append(size)
        self.now += self._seconds(size)

    def timings(self, budget_s: float = 1e9, **options: Any) -> Timings:
        return Timings(self.run, Budget(budget_s, self.clock), **options)


def test_measuring_takes_turns_and_gives_the_median_in_milliseconds() -> None:
    # Seconds that each run takes, in the order of the calls. The first of each size touches new memory and is dropped;
    # then size 4 has one outlier, size 2 two of three slow.
    script = iter([7.0, 7.0, 0.002, 0.004, 0.005, 0.004, 0.005, 9.0])
    device = Device(lambda size: next(script))
    timings = device.timings()
    for _ in range(4):
        assert timings.turn([2, 4])
    assert medians(timings.times()) == [(2, pytest.approx(5.0)), (4, pytest.approx(4.0))]
    assert device.ran == [2, 4] * 4


def test_what_comes_before_a_run_is_not_timed() -> None:
    device = Device(lambda size: 0.25)

    def before() -> None:
        device.now += 9.0

    timings = device.timings(before=before)
    timings.turn([2], burst=3)
    assert timings.times() == {2: [250.0, 250.0]}


def test_a_turn_is_a_burst_of_runs_of_one_size() -> None:
    device = Device(lambda size: 0.0)
    timings = device.timings()
    for _ in range(2):
        timings.turn([1, 8], warm_up=2, burst=3)
    assert device.ran == ([1] * 5 + [8] * 5) * 2
    assert {size: len(found) for size, found in timings.times().items()} == {1: 5, 8: 5}


def test_what_would_take_too_long_is_not_begun() -> None:
    device = Device(lambda size: 0.1 * size)
    timings = device.timings(budget_s=1.0)
    assert timings.turn([1, 2, 4])
    assert not timings.turn([8, 1])
    assert device.ran == [1, 2, 4, 1], "0.3 s are left, 8 are expected to take 0.8"
    assert not timings.turn([4], anyway=False) and timings.turn([4], anyway=True)


@given(
    st.lists(st.tuples(st.integers(1, 128), st.floats(0.001, 1e4)), min_size=1, max_size=8, unique_by=lambda p: p[0]),
    st.lists(st.integers(1, 200), max_size=12),
)
def test_a_table_of_few_measurements_is_whole_rising_and_positive(
    points: list[tuple[int, float]], more: list[int]
) -> None:
    times = sorted(ms for _, ms in points)
    known = list(zip(sorted(size for size, _ in points), times, strict=True))
    sizes = sorted({*more, *(size for size, _ in known)})
    found = completed(known, sizes)
    assert [size for size, _ in found] == sizes
    assert all(ms > 0 for _, ms in found)
    assert all(later >= earlier * (1 - 1e-9) for (_, earlier), (_, later) in itertools.pairwise(found))
    assert dict(found).items() >= dict(known).items()


def test_what_was_not_measured_does_not_look_cheap() -> None:
    assert completed([(1, 5.0)], [1, 4, 32]) == [(1, 5.0), (4, 20.0), (32, 160.0)]
    assert completed([(2, 5.0), (4, 7.0)], [1, 2, 3, 4, 8]) == [(1, 5.0), (2, 5.0), (3, 6.0), (4, 7.0), (8, 14.0)]


def test_smoothing_leaves_straight_lines_and_halves_a_spike() -> None:
    line = [(1, 10.0), (2, 11.0), (4, 13.0), (8, 17.0)]
    assert smoothed(line) == line
    spiked = smoothed([(1, 10.0), (2, 15.0), (4, 13.0), (8, 17.0)])
    assert spiked[1] == (2, 13.0) and (spiked[0], spiked[3]) == ((1, 10.0), (8, 17.0))
    assert smoothed([(1, 1.0)]) == [(1, 1.0)] and smoothed([]) == []


def test_decoding_does_not_answer_for_prompts() -> None:
    cost = StepCost(rows=((1, 10.0), (4, 10.0), (104, 110.0)))
    assert cost.decode_ms(2, 0, 0) == cost.decode_ms(2, 0, 64) == 10.0
    assert cost.decode_ms(2, 3, 64) == pytest.approx(13.0)
    assert cost.decode_ms(2, 3, 0) == cost.forward_ms(5)
    assert cost.decode_ms(0, 0, 64) == 0.0
