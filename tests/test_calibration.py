"""The cost table against the clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.calibration import Calibration


def served(calibration: Calibration, *, drafting: bool, ratio: float, steps: int = 200, sequences: int = 4) -> None:
    for _ in range(steps):
        calibration.observe(sequences, drafting=drafting, predicted_ms=10.0, measured_ms=10.0 * ratio)


def test_without_both_kinds_of_steps_the_table_is_believed() -> None:
    calibration = Calibration()
    assert calibration.factor(4) == 1.0
    served(calibration, drafting=True, ratio=1.4)
    assert calibration.factor(4) == 1.0


def test_only_what_drafting_costs_more_counts() -> None:
    calibration = Calibration()
    for slower in (1.0, 3.0):  # a busy machine slows both kinds alike
        served(calibration, drafting=False, ratio=slower)
        served(calibration, drafting=True, ratio=1.2 * slower)
        assert calibration.factor(4) == pytest.approx(1.2, rel=0.02)


def test_vanilla_steps_of_another_size_stand_in() -> None:
    calibration = Calibration()
    served(calibration, drafting=False, ratio=1.1, sequences=1)
    served(calibration, drafting=True, ratio=1.32, sequences=16)
    assert calibration.factor(16) == pytest.approx(1.2)


def test_a_stalled_step_and_a_standing_clock_move_little() -> None:
    calibration = Calibration()
    served(calibration, drafting=False, ratio=1.0)
    served(calibration, drafting=True, ratio=1.0)
    calibration.observe(4, drafting=True, predicted_ms=10.0, measured_ms=60_000.0)
    calibration.observe(4, drafting=True, predicted_ms=10.0, measured_ms=0.0)
    assert calibration.factor(4) < 1.05


@given(st.lists(st.tuples(st.integers(1, 64), st.booleans(), st.floats(0, 1e4), st.floats(0, 1e6)), max_size=50))
def test_always_a_sane_factor(steps: list[tuple[int, bool, float, float]]) -> None:
    calibration = Calibration()
    for sequences, drafting, predicted, measured in steps:
        calibration.observe(sequences, drafting=drafting, predicted_ms=predicted, measured_ms=measured)
    assert all(0.8 <= calibration.factor(n) <= 2.0 for n in range(1, 65)), calibration
