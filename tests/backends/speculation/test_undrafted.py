"""An answer without drafts says why there were none."""

from __future__ import annotations

from typing import Any

import pytest

from backends.cost.step_cost import StepCost
from backends.speculation.batch_gate import DraftGate
from backends.speculation.undrafted import Undrafted, Why
from backends.tree import CandidateTree
from backends.types import DecodingPlan, TokenChunk
from tests.support.engine_helpers import FLAT_COST, ScriptedHeads, make_core, one_thread, request  # noqa: F401

PROMPT = (40, 50, 60, 70)
STEEP = StepCost(rows=((1, 1.0), (64, 64.0)), heads=((1, 0.01),))
"""A row more costs as much as a step."""
DEAR_HEADS = StepCost(rows=((1, 1.0), (64, 1.5)), heads=((1, 0.9),))
AUTO = DecodingPlan(num_heads=4, max_nodes=8, lookup=False, reason="as planned")


def told(core: Any, plan: DecodingPlan = AUTO, max_tokens: int = 12, **more: Any) -> str:
    core.add(request("r", PROMPT, plan, max_tokens=max_tokens, ignore_eos=True, **more))
    chunks: list[TokenChunk] = []
    while core.has_work:
        chunks += [chunk for _, chunk in core.step()]
    assert chunks[-1].stats is not None
    return chunks[-1].stats.reason


def gated(cost: StepCost, hit: float) -> Any:
    return make_core(heads=ScriptedHeads({}), cost=cost, gate=DraftGate(cost, ((hit,), (hit,))))


def test_rows_that_are_too_dear() -> None:
    reason = told(make_core(heads=ScriptedHeads({}), cost=STEEP))
    assert reason.startswith("as planned; no candidates in all 11 steps, mostly because one more row costs as much as ")
    assert "as much as 1.00 tokens here, and the best candidate brought 0." in reason


def test_heads_that_do_not_pay_in_this_batch() -> None:
    assert "all 11 steps, mostly because the heads do not pay in a batch of this size (speedup 0.5" in told(
        gated(DEAR_HEADS, 0.01)
    )


def test_no_heads_and_a_text_that_does_not_repeat_itself() -> None:
    assert "no heads to ask" in told(make_core())


def test_a_plan_without_nodes() -> None:
    plan = DecodingPlan(num_heads=4, max_nodes=0, lookup=False)
    assert "the plan allows no candidates" in told(make_core(heads=ScriptedHeads({})), plan)


def test_pauses_after_drafts_that_did_not_pay() -> None:
    """Gate open, heads dear and always wrong: six steps with drafts, then a pause."""
    assert "went vanilla 1 time(s)" in told(gated(DEAR_HEADS, 0.95), max_tokens=16)


@pytest.mark.parametrize("plan", [DecodingPlan(method="vanilla", reason="asked for"), AUTO])
def test_nothing_is_said_where_nothing_was_to_be_drafted_or_most_steps_did(plan: DecodingPlan) -> None:
    tree = CandidateTree.parse("2x1")
    drafting = DecodingPlan(num_heads=4, tree=tree, reason="asked for") if plan is AUTO else plan
    assert told(make_core(heads=ScriptedHeads({}), cost=FLAT_COST), drafting) == "asked for"


def test_the_commonest_reason_is_told_with_its_averages() -> None:
    record = Undrafted()
    assert record.reason(50) is None
    for chance in (0.1, 0.3):
        record.note(Why.PRICE, price=0.5, chance=chance)
    record.note(Why.LAST)
    assert record.reason(7) is None, "most steps had candidates"
    assert record.reason(4) == (
        "no candidates in 3 of 4 steps, mostly because one more row costs as much as 0.50 tokens here, "
        "and the best candidate brought 0.20"
    )
