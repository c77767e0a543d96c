"""A request that falls behind its deadline: when it is, what follows, and that its tokens stay the same."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.cost.step_cost import StepCost
from backends.engine.deadline import CLEAR_GAIN, LEAST_TOKENS, Behind, Pace, behind
from backends.speculation.batch_gate import DraftGate
from backends.tree import CandidateTree
from backends.types import DecodingPlan, GenerationStats
from tests.support.engine_helpers import Recorder, ScriptedHeads, decode, make_core, one_thread, random_prompt, request

__all__ = ["one_thread"]  # a fixture

PROMPT = random_prompt(random.Random(7), 12, 12)
STEP_S = 0.01
# 10 tokens in 1 s, 50 to come, 3 s left.
LATE = Pace(elapsed_s=1.0, tokens=10, to_come=50, left_s=3.0, speedup=0.9)


@pytest.mark.parametrize(
    ("pace", "expected"),
    [
        (LATE, True),
        (replace(LATE, left_s=5.0), None),  # just in time
        (replace(LATE, to_come=30), None),
        (replace(LATE, tokens=LEAST_TOKENS - 1), None),  # no pace yet
        (replace(LATE, tokens=0, elapsed_s=0.0), None),
        (replace(LATE, speedup=1.0), True),  # nothing drafted so far
        (replace(LATE, speedup=CLEAR_GAIN), False),
        (replace(LATE, left_s=-1.0), True),
    ],
)
def test_what_is_behind_and_what_follows(pace: Pace, expected: bool | None) -> None:
    found = behind(pace)
    assert (None if found is None else found.vanilla) is expected
    if found is not None:
        assert "up to 50 tokens to come at 100.0 ms each" in found.reason
        assert "-" not in found.reason, "time left is never told as less than none"


@given(
    st.builds(
        Pace,
        elapsed_s=st.floats(0, 1e4),
        tokens=st.integers(0, 10**5),
        to_come=st.integers(0, 10**5),
        left_s=st.floats(-10, 1e4),
        speedup=st.floats(0, 10),
    ),
    st.floats(0, 100),
)
def test_more_time_never_puts_a_request_behind(pace: Pace, more: float) -> None:
    later = behind(replace(pace, left_s=pace.left_s + more))
    assert later is None or isinstance(behind(pace), Behind)


DEAR = StepCost(rows=((1, 1.0), (64, 1.5)), heads=((1, 0.5),))


def run(
    plan: DecodingPlan, answers: dict[tuple[int, ...], Sequence[int]], deadline_s: float | None
) -> tuple[Recorder, ScriptedHeads]:
    """One request of 60 tokens whose every step takes 10 ms, with dear heads that are right about ``answers`` only."""
    now = [0.0]
    heads, recorder = ScriptedHeads(answers, hit_rate=1.0), Recorder()
    gate = DraftGate(DEAR, ((0.9,), (0.8,), (0.7,)))
    core = make_core(heads=heads, cost=DEAR, clock=lambda: now[0], observer=recorder.observe, gate=gate)
    core.add(request("r", PROMPT, plan, deadline_s=deadline_s, max_tokens=60, ignore_eos=True))
    while core.has_work:
        recorder.take(core.step())
        core.check_integrity()
        now[0] += STEP_S
    return recorder, heads


def stats_of(recorder: Recorder) -> GenerationStats:
    stats = recorder["r"].last.stats
    assert stats is not None
    return stats


MEDUSA = DecodingPlan(num_heads=4, lookup=False)


def truth() -> list[int]:
    return decode([request("r", PROMPT, max_tokens=60, ignore_eos=True)])["r"].tokens


@pytest.mark.parametrize("plan", [MEDUSA, DecodingPlan(num_heads=2, tree=CandidateTree.parse("2x1"))])
def test_useless_drafts_end_at_once_when_the_deadline_is_out_of_reach(plan: DecodingPlan) -> None:
    recorder, heads = run(plan, {}, deadline_s=40 * STEP_S)
    stats = stats_of(recorder)
    assert recorder["r"].last.finish_reason == "deadline"
    assert stats.behind_at is not None
    # The ninth token is a pace: no later step drafts.
    assert stats.behind_at == pytest.approx((LEAST_TOKENS + 1) * STEP_S, abs=1.5 * STEP_S)
    assert len(heads.calls) <= LEAST_TOKENS + 1
    assert "behind its deadline" in stats.reason and "vanilla from there on" in stats.reason
    assert recorder["r"].tokens == truth()[: len(recorder["r"].tokens)]


def test_without_a_deadline_or_with_time_enough_nothing_ends() -> None:
    for deadline_s in (None, 100.0):
        recorder, _ = run(MEDUSA, {}, deadline_s)
        stats = stats_of(recorder)
        assert stats.behind_at is None and "deadline" not in stats.reason
        assert recorder["r"].tokens == truth()


def test_drafts_that_make_it_faster_go_on() -> None:
    # Four heads that are always right: five tokens a step for 1.5 steps' cost, and still too late.
    recorder, heads = run(MEDUSA, {PROMPT: truth()}, deadline_s=8 * STEP_S)
    stats = stats_of(recorder)
    assert recorder["r"].last.finish_reason == "deadline"
    assert stats.behind_at is None
    assert "drafts go on" in stats.reason
    assert len(heads.calls) == stats.steps
    assert recorder["r"].tokens == truth()[: len(recorder["r"].tokens)]


def test_a_vanilla_plan_is_never_told_to_go_vanilla() -> None:
    recorder, _ = run(DecodingPlan(method="vanilla", num_heads=0), {}, deadline_s=20 * STEP_S)
    assert stats_of(recorder).behind_at is None
    assert "behind" not in stats_of(recorder).reason
