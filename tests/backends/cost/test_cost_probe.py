"""A start measures within a budget, however slow the machine is, and says what it does."""

from __future__ import annotations

import logging
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.cost.persistence import CostKeeping
from backends.cost.probe import MEASURE_S, ROWS, SEQUENCES, CostProbe
from backends.cost.record import CHECKED_ROWS, CostRecord, key_of
from backends.cost.step_cost import StepCost
from backends.engine.start_stages import StartStages
from backends.runners.base import ProposalRequest, Proposals
from backends.runners.batch import StepBatch
from backends.types import START_LOG

FACTS = {"device": "slow"}
NOW = 1_800_000_000.0


class SlowRunner:
    """A model and its heads on a machine whose clock goes on only while they run."""

    num_pages, max_rows, max_context, hidden_size, num_heads = 64, 128, 512, 4, 4
    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self, step_s: float, row_s: float, heads_s: float = 0.0, noise: Any = lambda: 1.0) -> None:
        self.now, self.rows = 0.0, list[int]()
        self._step_s, self._row_s, self._heads_s, self._noise = step_s, row_s, heads_s, noise

    def clock(self) -> float:
        return self.now

    def seconds(self, rows: int) -> float:
        return self._step_s + self._row_s * rows

    def forward(self, batch: StepBatch) -> torch.Tensor:
        self.rows.append(batch.rows)
        self.now += self.seconds(batch.rows) * self._noise()
        return torch.zeros(1, 4)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def propose(self, request: ProposalRequest) -> list[Proposals]:
        self.now += self._heads_s * len(request.contexts) * self._noise()
        return [Proposals(np.zeros((4, 2), np.int32), np.zeros((4, 2), np.float32))] * len(request.contexts)

    def probe(self, heads: bool = True) -> CostProbe:
        runner: Any = self
        return CostProbe(runner, runner if heads else None, clock=self.clock)


def settled_late(runner: SlowRunner, most: int) -> set[int]:
    """Sizes that ran less than twice, or were not to be run; never that of one row."""
    return {size for size in ROWS[1:] if runner.rows.count(size) < 2 or size > most}


@settings(max_examples=60)
@given(st.floats(1e-4, 20.0), st.floats(0.0, 1.0), st.floats(0.0, 0.5), st.booleans())
def test_measuring_ends_in_time_on_any_machine(step_s: float, row_s: float, heads_s: float, heads: bool) -> None:
    runner = SlowRunner(step_s, row_s, heads_s)
    measured = runner.probe(heads).measure()
    unavoidable = 2 * runner.seconds(1) + heads_s
    assert runner.now <= MEASURE_S + unavoidable
    assert [size for size, _ in measured.cost.rows] == sorted(ROWS)
    assert [size for size, _ in measured.cost.heads] == (list(SEQUENCES) if heads else [])
    times = [measured.cost.forward_ms(rows) for rows in range(1, 200)]
    assert times == sorted(times) and times[0] == pytest.approx(runner.seconds(1) * 1e3)
    assert set(measured.cost.guessed) == settled_late(runner, max(ROWS))
    assert measured.worth_keeping == (not {1, 2, 4, 8, 3, 6, 5, 7} & set(measured.cost.guessed))


@settings(max_examples=30)
@given(st.floats(1e-3, 2.0), st.floats(1e-3, 0.1), st.randoms(use_true_random=False))
def test_a_busy_machine_gets_little_more(step_s: float, row_s: float, rng: Any) -> None:
    """Runs take up to four times what the one before did: at most that one is misjudged."""
    runner = SlowRunner(step_s, row_s, 0.001, noise=lambda: rng.uniform(1.0, 4.0))
    runner.probe().measure()
    assert runner.now <= 4 * (MEASURE_S + 2 * runner.seconds(1))


def test_a_fast_machine_measures_all_and_keeps_it() -> None:
    runner = SlowRunner(0.004, 0.0005, 0.0001)
    measured = runner.probe().measure()
    assert measured.worth_keeping and runner.now <= MEASURE_S
    for rows in (1, 6, 16, 128):
        assert measured.cost.forward_ms(rows) == pytest.approx(runner.seconds(rows) * 1e3)
    assert measured.cost.heads_ms(4) == pytest.approx(0.4)


def test_few_rows_come_first_and_what_is_left_out_is_dear() -> None:
    runner = SlowRunner(0.2, 0.1)
    measured = runner.probe().measure()
    assert not measured.usable
    assert {1, 2, 4, 8} <= set(runner.rows) and 128 not in runner.rows
    assert measured.cost.forward_ms(3) == pytest.approx(500.0)
    assert measured.cost.forward_ms(128) >= runner.seconds(128) * 1e3


@pytest.mark.parametrize(("step_s", "row_s"), [(0.004, 0.0005), (0.05, 0.027), (0.4, 0.2)])
def test_a_kept_table_that_does_not_hold_is_measured_again_within_the_same_time(step_s: float, row_s: float) -> None:
    runner = SlowRunner(step_s, row_s)
    kept = CostRecord(FACTS, NOW, StepCost(rows=tuple((n, 1e-3 * n) for n in CHECKED_ROWS)))
    saved: dict[str, str] = {}

    class Shelf:
        def load(self, key: str) -> str | None:
            return kept.text() if key == key_of(FACTS) else None

        def save(self, key: str, text: str) -> None:
            saved[key] = text

    probe = runner.probe(heads=False)
    record = CostKeeping(FACTS, [Shelf()], lambda: NOW).open(probe)
    assert runner.now <= MEASURE_S + 2 * runner.seconds(1)
    assert record.cost.forward_ms(1) == pytest.approx(runner.seconds(1) * 1e3)
    assert bool(saved) == (step_s == 0.004), "what was cut short is not for others"


def test_the_first_touch_of_memory_is_not_taken_for_what_a_step_takes() -> None:
    """It was, and every start measured a table anew that it could have taken over."""
    runner = SlowRunner(0.004, 0.0005)
    slow_once = iter([0.3])
    forward = runner.forward

    def first_touch(batch: StepBatch) -> torch.Tensor:
        runner.now += next(slow_once, 0.0)
        return forward(batch)

    runner.forward = first_touch  # type: ignore[method-assign]
    found = runner.probe(heads=False).check()
    assert found == [(rows, pytest.approx(runner.seconds(rows) * 1e3)) for rows in CHECKED_ROWS]


@settings(max_examples=100)
@given(st.dictionaries(st.sampled_from(ROWS), st.floats(1e-5, 30.0)), st.floats(1e-4, 2.0), st.booleans())
def test_any_cost_of_rows_is_measured_in_time_and_guessed_rising(
    stalls: dict[int, float], step_s: float, early: bool
) -> None:
    """Whatever a size takes: its first run may be the last, for a longer one there is no telling before."""
    runner: Any = SlowRunner(step_s, 0.0)
    runner.seconds = lambda rows: step_s + stalls.get(rows, 0.0)
    most = 32 if early else max(ROWS)
    measured = CostProbe(runner, None, clock=runner.clock, most_rows=most).measure()
    assert runner.now <= MEASURE_S + max(runner.seconds(rows) for rows in ROWS) + 2 * runner.seconds(1)
    assert [size for size, _ in measured.cost.rows] == sorted(ROWS)
    times = [ms for _, ms in measured.cost.rows]
    assert times == sorted(times)
    assert set(measured.cost.guessed) == settled_late(runner, most)


def test_a_start_says_what_it_does(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    from backends.engine import loading
    from backends.models.tiny import TINY_MODEL_NAME

    def hurried(runner: Any, heads: Any, most_rows: int) -> CostProbe:
        return CostProbe(runner, heads, budget_s=0.05, most_rows=most_rows)

    caplog.set_level(logging.INFO, START_LOG)
    monkeypatch.setattr(loading, "CostProbe", hurried)
    opened = loading.open_engine(loading.EngineOptions(model=TINY_MODEL_NAME, threads=1, max_running=2))
    opened.decoder.close()
    said = [record.getMessage() for record in caplog.records if record.name == START_LOG]
    assert said[0] == f"measuring what steps of {TINY_MODEL_NAME} cost (at most 5 s)"
    assert re.fullmatch(
        rf"{TINY_MODEL_NAME} \(\w+\) is ready after [\d.]+ s: loading [\d.]+, measuring [\d.]+"
        "; what steps of \\d+ sizes cost is guessed until there is an idle moment",
        said[1],
    )


def test_stages_inside_each_other_are_not_counted_twice() -> None:
    ticks = iter([0.0, 0.0, 1.0, 4.0, 6.0, 6.5])  # opened; outer begins, inner begins and ends, outer ends; told
    stages = StartStages(lambda: next(ticks))
    with stages.stage("loading"), stages.stage("demo model"):
        pass
    assert stages.told() == "6.5 s: loading 3.0, demo model 3.0"
