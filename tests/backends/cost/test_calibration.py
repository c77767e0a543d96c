"""The cost table against the clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.cost.calibration import Calibration


def served(calibration: Calibration, *ratios: tuple[bool, float], sequences: int = 4) -> None:
    """Steps as (drafting, measured over predicted)."""
    for drafting, ratio in ratios:
        calibration.observe(sequences, drafting=drafting, predicted_ms=10.0, measured_ms=10.0 * ratio)


def cycle(drafting: float, vanilla: float, steps: int = 20) -> list[tuple[bool, float]]:
    """What an open gate lets happen: drafting steps, then one without."""
    return [(True, drafting)] * steps + [(False, vanilla)]


def test_without_both_kinds_of_steps_the_table_is_believed() -> None:
    calibration = Calibration()
    assert calibration.factor(4) == 1.0
    served(calibration, *[(True, 1.4)] * 300)
    assert calibration.factor(4) == 1.0


def test_only_what_drafting_costs_more_counts() -> None:
    calibration = Calibration()
    for slower in (1.0, 3.0):  # a busy machine slows both kinds alike
        served(calibration, *cycle(1.2 * slower, slower) * 20)
        assert calibration.factor(4) == pytest.approx(1.2)
    assert calibration.factor(1) == 1.0, "another size"


def test_a_mood_between_two_looks_is_not_taken_for_the_cost_of_drafting() -> None:
    """Drafting steps of a slow minute are compared with vanilla steps of that minute, not with those of the last."""
    calibration = Calibration()
    served(calibration, *cycle(1.0, 1.0) * 10)
    served(calibration, *[(True, 1.8)] * 500)
    assert calibration.factor(4) == pytest.approx(1.0)


def test_probes_of_a_closed_gate_count_as_well() -> None:
    calibration = Calibration()
    served(calibration, *([(False, 1.0)] * 63 + [(True, 1.3)]) * 5)
    assert calibration.factor(4) == pytest.approx(1.3)


def test_a_stalled_step_and_a_standing_clock_move_nothing() -> None:
    calibration = Calibration()
    served(calibration, (True, 6_000.0), *cycle(1.0, 1.0) * 5)
    assert calibration.factor(4) == pytest.approx(1.0), "not the first step either, which pays for cold caches"
    served(calibration, *cycle(1.0, 1.0, steps=19), (True, 500.0), (True, 0.0), (False, 700.0), *cycle(1.0, 1.0))
    assert calibration.factor(4) == pytest.approx(1.0)


def test_rows_cost_what_makes_up_for_the_steps_they_are_in() -> None:
    calibration = Calibration()
    assert calibration.row_cost_factor(4) == 1.0
    for _ in range(20):
        for drafting in [True] * 9 + [False]:
            calibration.observe(
                4,
                drafting=drafting,
                predicted_ms=12.0 if drafting else 10.0,
                measured_ms=14.0 if drafting else 10.0,
                vanilla_ms=10.0,
            )
    assert calibration.row_cost_factor(4) == pytest.approx(2.0), "four milliseconds where the table has two"


def test_the_price_of_a_row_is_told_by_steps_with_more_and_with_fewer() -> None:
    """Without any vanilla step, and whatever the machine's mood does to all of them."""
    calibration = Calibration()
    for step in range(60):
        nodes = step * 7 % 5
        mood = 10.0 if step < 30 else 14.0
        measured = 400.0 if step == 40 else mood + 0.6 * nodes
        calibration.observe(4, drafting=True, predicted_ms=11.0 + 0.3 * nodes, measured_ms=measured, vanilla_ms=10.0)
    assert calibration.row_cost_factor(4) == pytest.approx(2.0, abs=0.4)


@given(st.lists(st.tuples(st.integers(1, 64), st.booleans(), st.floats(0, 1e4), st.floats(0, 1e6)), max_size=50))
def test_always_a_sane_factor(steps: list[tuple[int, bool, float, float]]) -> None:
    calibration = Calibration()
    for sequences, drafting, predicted, measured in steps:
        calibration.observe(sequences, drafting=drafting, predicted_ms=predicted, measured_ms=measured)
    assert all(0.8 <= calibration.factor(n) <= 2.0 for n in range(1, 65)), calibration
