"""The cost table: interpolation, monotony, and how it is measured."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.cost import StepCost, measure_runs, medians, smoothed

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


def test_measuring_takes_turns_and_gives_the_median_in_milliseconds() -> None:
    now, calls = [0.0], []
    # Seconds that each run takes, in the order of the calls: size 4 has one outlier, size 2 two of three slow.
    script = iter([0.002, 0.004, 0.005, 0.004, 0.005, 9.0])

    def run(size: int) -> None:
        calls.append(size)
        now[0] += next(script)

    times = measure_runs([2, 4], run, lambda: now[0], repeats=3)
    assert medians(times) == [(2, pytest.approx(5.0)), (4, pytest.approx(4.0))]
    assert calls == [2, 4, 2, 4, 2, 4]


def test_what_comes_before_a_run_is_not_timed() -> None:
    now = [0.0]

    def pass_time(seconds: float) -> None:
        now[0] += seconds

    times = measure_runs([2], lambda size: pass_time(0.25), lambda: now[0], repeats=2, before=lambda: pass_time(9.0))
    assert times == {2: [250.0, 250.0]}


def test_a_turn_is_a_burst_of_runs_of_one_size() -> None:
    ran: list[int] = []
    times = measure_runs([1, 8], ran.append, lambda: 0.0, repeats=2, warm_up=2, burst=3)
    assert ran == ([1] * 5 + [8] * 5) * 2
    assert {size: len(found) for size, found in times.items()} == {1: 6, 8: 6}


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
