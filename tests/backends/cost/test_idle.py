"""What a start has guessed is measured in idle moments, in runs so short that nobody waits for them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.cost.idle import SHORT_S, IdleMeasuring
from backends.cost.probe import EARLY_ROWS, MEASURE_S, ROWS, CostProbe
from backends.cost.step_cost import StepCost
from tests.backends.cost.test_cost_probe import SlowRunner


def begun(runner: SlowRunner) -> IdleMeasuring:
    """After a start."""
    device: Any = runner
    probe = CostProbe(device, None, clock=runner.clock, most_rows=EARLY_ROWS)
    return IdleMeasuring(probe, probe.measure().cost)


def longest_run_s(runner: SlowRunner, idle: IdleMeasuring) -> float:
    """Until nothing is left to do."""
    longest = 0.0
    for _ in range(1000):
        began = runner.now
        if not idle.step():
            return longest
        longest = max(longest, runner.now - began)
    raise AssertionError("it does not end")


def test_a_fast_machine_ends_with_a_table_without_guesses() -> None:
    runner = SlowRunner(0.004, 0.0002)
    idle = begun(runner)
    assert idle.cost.guessed == (48, 64, 96, 128)
    assert longest_run_s(runner, idle) == pytest.approx(runner.seconds(128))
    assert idle.cost.guessed == ()
    for rows in ROWS:
        assert idle.cost.forward_ms(rows) == pytest.approx(runner.seconds(rows) * 1e3)
    assert not idle.step()


def test_another_mood_of_the_machine_does_not_bend_the_table() -> None:
    runner = SlowRunner(0.002, 0.0001)
    idle = begun(runner)
    runner._noise = lambda: 1.7
    longest_run_s(runner, idle)
    assert idle.cost.forward_ms(128) == pytest.approx(runner.seconds(128) * 1e3)


def test_what_takes_long_stays_guessed_and_dear() -> None:
    runner = SlowRunner(0.01, 0.0015)
    idle = begun(runner)
    assert longest_run_s(runner, idle) <= SHORT_S
    assert idle.cost.guessed == (64, 96, 128)
    assert idle.cost.forward_ms(48) == pytest.approx(runner.seconds(48) * 1e3)
    for rows in idle.cost.guessed:
        assert idle.cost.forward_ms(rows) >= runner.seconds(rows) * 1e3


@settings(max_examples=60)
@given(st.floats(1e-4, 3.0), st.lists(st.floats(0.0, 2.0), min_size=4, max_size=4))
def test_on_any_machine_runs_are_short_and_the_table_rises(step_s: float, more_s: list[float]) -> None:
    """A step takes longer with more rows, in any way but one: each row takes at most what the average before it did,
    as on every device (work is shared)."""
    runner: Any = SlowRunner(0.0, 0.0)
    growth = list(itertools.accumulate(more_s))
    runner.seconds = lambda rows: step_s * min(1 + growth[min(rows.bit_length() // 2, 3)], rows)
    idle = begun(runner)
    assert runner.now <= MEASURE_S + 2 * runner.seconds(1)
    before = idle.cost
    assert longest_run_s(runner, idle) <= 8 * SHORT_S, "where the shape surprises; in proportion, SHORT_S"
    assert set(idle.cost.guessed) <= set(before.guessed)
    times = [ms for _, ms in idle.cost.rows]
    assert times == sorted(times)


def test_nothing_is_begun_that_could_be_long() -> None:
    runner = SlowRunner(0.3, 0.1)
    idle = begun(runner)
    assert not idle.step()


def test_a_better_table_forgets_only_conclusions_from_the_last() -> None:
    from backends.speculation.batch_gate import DraftGate

    dear, cheap = StepCost(((1, 1.0), (64, 64.0)), ((1, 0.5),)), StepCost(((1, 1.0), (64, 1.5)), ((1, 0.01),))
    gate = DraftGate(dear, [[0.6, 0.2]] * 3)
    observe: Callable[..., None] = gate.observe
    assert not gate.is_open(1) and not gate.is_open(8)
    observe(8, accepted=0, vanilla_ms=1.0, step_ms=1.2)
    seen = gate.speedup(8)
    gate.use_cost(cheap)
    assert gate.is_open(1) and gate.speedup(8) == seen
