"""The draft gate: starts from measured accuracies, follows what steps gain, and keeps looking when it is closed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from backends.cost.step_cost import StepCost
from backends.speculation.batch_gate import DraftGate

# Memory-bound up to eight rows, then every row costs.
COST = StepCost(rows=((1, 10.0), (8, 11.0), (16, 20.0), (64, 80.0)), heads=((1, 1.0), (16, 4.0)))
GOOD = [[0.6, 0.15], [0.4, 0.1], [0.3, 0.1]]


def test_open_where_candidates_are_nearly_free_and_closed_where_they_are_not() -> None:
    gate = DraftGate(COST, GOOD)
    assert gate.speedup(1) > 1.4
    assert gate.allows(1)
    assert gate.speedup(32) < 1.0
    assert not gate.allows(32)


def test_heads_that_miss_close_it_and_a_closed_gate_probes() -> None:
    gate = DraftGate(COST, GOOD)
    steps = 0
    while gate.speedup(1) >= 1.0:
        gate.allows(1)
        gate.observe(1, accepted=0, vanilla_ms=10.0, step_ms=12.0)
        steps += 1
        assert steps < 200
    allowed = [gate.allows(1) for _ in range(640)]
    assert 1 <= sum(allowed) <= 20


def test_it_opens_again_when_probes_gain() -> None:
    gate = DraftGate(COST, [[0.01]])
    assert not gate.allows(4)
    steps = 0
    while not (gate.allows(4) and gate.allows(4)):
        steps += 1
        assert steps < 2000
        gate.observe(4, accepted=4, vanilla_ms=10.0, step_ms=12.0)


def test_open_it_leaves_a_vanilla_step_now_and_then_for_comparison() -> None:
    gate = DraftGate(COST, GOOD)
    allowed = [gate.allows(1) for _ in range(2000)]
    without = [step for step, allows in enumerate(allowed) if not allows]
    assert without[:2] == [16, 17], "two in a row: only the second neither drafts nor runs the heads"
    assert 0 < len(without) <= 0.03 * len(allowed)
    assert all(step + 1 in without or step - 1 in without for step in without)


def test_batches_of_another_size_are_not_judged_by_it() -> None:
    gate = DraftGate(COST, GOOD)
    for _ in range(300):
        gate.observe(1, accepted=0, vanilla_ms=10.0, step_ms=12.0)
    assert not gate.allows(1)
    assert gate.allows(2)


def test_without_accuracies_it_starts_open() -> None:
    assert all(DraftGate(COST).allows(size) for size in (1, 4, 32))


@given(
    st.lists(st.tuples(st.integers(1, 64), st.integers(0, 100), st.floats(0.5, 50), st.floats(0.5, 50)), max_size=50)
)
def test_estimates_stay_finite_and_positive(steps: list[tuple[int, int, float, float]]) -> None:
    gate = DraftGate(COST, GOOD)
    for size, accepted, vanilla_ms, step_ms in steps:
        gate.observe(size, accepted=accepted, vanilla_ms=vanilla_ms, step_ms=step_ms)
        assert 0 < gate.speedup(size) < 1e5
