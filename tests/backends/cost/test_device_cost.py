"""Steps in buckets: a staircase that nobody smooths, whose free rows the planner fills."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from backends.bench.host import stubbed_core
from backends.cost.device_cost import StepTable, context_place, event_timer, measure_steps
from backends.cost.step_cost import Budget, StepCost
from backends.runners.base import Proposals
from backends.speculation.tree_builder import DraftRequest, plan_drafts

BUCKETS = (1, 2, 4, 8, 16, 32)


def random_table(rng: random.Random) -> StepTable:
    contexts = sorted(rng.sample(range(16, 9000), rng.randint(1, 4)))
    base = {rows: 3.0 + sum(rng.random() for _ in range(index)) for index, rows in enumerate(BUCKETS)}
    slope = rng.random() / 1000
    return StepTable({(rows, context): base[rows] + slope * context for rows in BUCKETS for context in contexts})


tables = st.integers(0, 2**32).map(random.Random).map(random_table)


@given(tables, st.integers(1, 20_000))
def test_a_staircase_rises_only_from_bucket_to_bucket(table: StepTable, context: int) -> None:
    cost = table.at(context)
    for below, bucket in itertools.pairwise((0, *BUCKETS)):
        assert {cost.forward_ms(rows) for rows in range(below + 1, bucket + 1)} == {cost.forward_ms(bucket)}
    assert [cost.forward_ms(rows) for rows in BUCKETS] == sorted(cost.forward_ms(rows) for rows in BUCKETS)
    assert cost.forward_ms(40) >= cost.forward_ms(32)


@given(tables, st.floats(1, 20_000), st.floats(1, 20_000))
def test_more_context_is_never_cheaper_and_close_contexts_share_a_table(
    table: StepTable, one: float, other: float
) -> None:
    short, long = sorted((one, other))
    for rows in BUCKETS:
        assert table.at(short).forward_ms(rows) <= table.at(long).forward_ms(rows) + 1e-9
    assert (table.at(short) is table.at(long)) == (context_place(short) == context_place(long))


def test_measured_points_are_the_table() -> None:
    table = StepTable({(rows, context): 3.0 + rows / 8 + context / 512 for rows in (1, 8) for context in (256, 1024)})
    assert table.at(256).forward_ms(8) == pytest.approx(4.5) and table.at(1024).forward_ms(5) == pytest.approx(6.0)
    with pytest.raises(ValueError, match=r"lacks the times of \(rows, context\) \[\(8, 4\)\]"):
        StepTable({(1, 4): 1.0, (8, 16): 1.0, (1, 16): 1.0})
    with pytest.raises(ValueError, match="not positive"):
        StepTable({(1, 4): 0.0})


@given(st.integers(1, 20), st.integers(0, 2**32).map(random.Random))
def test_the_planner_fills_a_bucket(sequences: int, rng: random.Random) -> None:
    """It stops at an edge, or has no more guesses: a row that is left over would have been free."""
    cost = StepCost.from_measurements(
        [(b, 4.0 + 0.4 * i * rng.random()) for i, b in enumerate(BUCKETS)], staircase=True
    )
    chances = np.array([[0.6, 0.2, 0.1], [0.4, 0.2, 0.05], [0.3, 0.1, 0.05]], np.float32) * rng.random()
    proposals = Proposals(np.arange(9, dtype=np.int32).reshape(3, 3), chances)
    requests = {key: DraftRequest(proposals, 16, 3) for key in range(sequences)}
    drafts = plan_drafts(requests, sequences=sequences, num_prefill_rows=0, node_budget=64 - sequences, cost=cost)
    nodes = [len(draft.tokens) for draft in drafts.values()]
    rows = sequences + sum(nodes)
    assert rows in BUCKETS or rows > BUCKETS[-1] or set(nodes) == {16}


class FakeEvent:
    """Events on a device whose clock is advanced by what runs."""

    def __init__(self, device: Any) -> None:
        self._device, self._at = device, 0.0

    def record(self) -> None:
        self._at = self._device.now

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: FakeEvent) -> float:
        return other._at - self._at


class FakeDevice:
    """A runner and its clock: 3 ms, 0.1 more for every bucket, and 1 for every 1,000 tokens; graphs take 500 once."""

    max_rows, max_context, num_pages = 64, 2050, 200

    def __init__(self) -> None:
        self.now, self.captured = 0.0, set[int]()

    def forward(self, batch: Any) -> torch.Tensor:
        context = int(batch.positions[0]) + 1
        self.now += 3.0 + 0.1 * BUCKETS.index(batch.rows) + context / 1000 + 500 * (batch.rows not in self.captured)
        self.captured.add(batch.rows)
        return torch.zeros(batch.outputs, 1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def timer(self) -> Any:
        cuda = SimpleNamespace(
            device=lambda device: torch.inference_mode(), Event=lambda enable_timing: FakeEvent(self)
        )
        return event_timer(torch.device("cuda:1"), cuda)


def test_steps_are_measured_by_events_without_the_capture() -> None:
    device = FakeDevice()
    table = measure_steps(device, (*BUCKETS, 128), device.timer(), Budget(60.0, lambda: 0.0), [(1, 0.2)])  # type: ignore[arg-type]
    assert table.buckets == list(BUCKETS) and table.contexts == [256, 1024, 2048]
    for (rows, context), ms in table.ms.items():
        assert ms == pytest.approx(3.0 + 0.1 * BUCKETS.index(rows) + context / 1000)
    assert table.at(1024).heads_ms(1) == 0.2


def test_what_there_was_no_time_for_is_guessed_dear() -> None:
    device, seconds = FakeDevice(), itertools.count()
    table = measure_steps(device, BUCKETS, device.timer(), Budget(4.0, lambda: float(next(seconds))))  # type: ignore[arg-type]
    measured = {pair: 3.0 + 0.1 * BUCKETS.index(pair[0]) + pair[1] / 1000 for pair in table.ms}
    assert any(ms > measured[pair] + 1 for pair, ms in table.ms.items())
    assert all(ms >= measured[pair] - 1e-9 for pair, ms in table.ms.items())


def test_the_engine_decides_by_the_context_that_it_has() -> None:
    core, _ = stubbed_core("medusa", 2, 100)
    table = StepTable({(rows, context): 4.0 + context / 100 for rows in (1, 64) for context in (16, 64, 256)})
    core._steps = table
    used = set()
    while core.has_work:
        core.step()
        used.add(core.cost)
    assert len(used) > 5 and core.drafting._cost is core.cost
