"""Prompts that are read side by side: a short one does not wait for a long one, and a long one is not left behind."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from backends.cost.step_cost import StepCost
from backends.engine.prefill_share import LEAST_ROWS, PATIENCE_STEPS, budget_rows, share_rows
from backends.types import DecodingPlan, PrefillBudget
from tests.support.engine_helpers import FLAT_COST, decode, make_core, one_thread, random_prompt, request  # noqa: F401

LEFT = st.lists(st.integers(1, 9000), max_size=12)


@given(LEFT, st.integers(0, 300))
def test_rows_are_used_up_and_never_more(left: list[int], rows: int) -> None:
    shares = share_rows(left, rows)
    assert sum(shares) == min(rows, sum(left))
    assert all(0 <= share <= wanted for share, wanted in zip(shares, left, strict=True))


@given(LEFT.filter(bool), st.integers(1, 300))
def test_a_patient_oldest_gets_half_and_the_shortest_comes_first_with_the_rest(left: list[int], rows: int) -> None:
    shares = share_rows(left, rows, PATIENCE_STEPS)
    assert shares[0] >= min(left[0], -(-rows // 2))
    assert share_rows(left, rows, PATIENCE_STEPS + 9) == shares
    fresh = share_rows(left, rows, 0)
    assert all(a <= b for a, b in zip(fresh[:1], shares[:1], strict=True))
    for one, other in [(i, j) for i in range(len(left)) for j in range(len(left)) if left[i] < left[j]]:
        assert fresh[one] == left[one] or fresh[other] == 0
    for one, other in [(i, j) for i in range(1, len(left)) for j in range(1, len(left)) if left[i] < left[j]]:
        assert shares[one] == left[one] or shares[other] == 0


@given(st.lists(st.integers(1000, 8000), min_size=1, max_size=5), st.integers(64, 256), st.integers(0, 20))
def test_a_short_prompt_beside_long_ones_is_read_within_two_steps(longs: list[int], rows: int, before: int) -> None:
    left = list(longs)
    for _ in range(before):
        left = [tokens - share for tokens, share in zip(left, share_rows(left, rows), strict=True) if tokens > share]
    left.append(30)
    for _ in range(2):
        left = [tokens - share for tokens, share in zip(left, share_rows(left, rows), strict=True)]
    assert left[-1] == 0


@settings(max_examples=25)
@given(st.integers(200, 2000), st.integers(8, 64), st.randoms(use_true_random=False))
def test_a_long_prompt_ends_though_short_ones_never_cease_to_come(long: int, rows: int, rng: random.Random) -> None:
    left, steps = [long], 0
    while left and left[0]:
        left += [rng.randint(1, 20) for _ in range(5)]
        shares = share_rows(left, rows)
        oldest, *others = (tokens - share for tokens, share in zip(left, shares, strict=True))
        left = [oldest, *(tokens for tokens in others if tokens)][:40]
        steps += 1
    assert steps <= -(-2 * long // rows) + 1


def test_in_the_engine_the_short_one_answers_first_and_both_answer_as_alone() -> None:
    rng = random.Random(3)
    long = request("long", random_prompt(rng, 150, 150), max_tokens=4, ignore_eos=True)
    short = request("short", random_prompt(rng, 9, 9), max_tokens=4, ignore_eos=True)
    core = make_core(prefill_rows=20, max_rows=32)
    core.add(long)
    core.step()
    core.add(short)
    first: dict[str, int] = {}
    tokens: dict[str, list[int]] = {"long": [], "short": []}
    for step in range(40):
        for name, chunk in core.step():
            first.setdefault(name, step)
            tokens[name] += chunk.token_ids
    assert first["short"] == 0 and first["long"] > 3
    for each in (long, short):
        assert (
            tokens[each.request_id]
            == decode([replace(each, plan=DecodingPlan(method="vanilla"))])[each.request_id].tokens
        )


COSTS = st.lists(st.floats(1, 50), min_size=4, max_size=4).map(
    lambda ms: StepCost.from_measurements(list(zip((1, 8, 32, 128), ms, strict=True)))
)


@given(COSTS, st.integers(1, 64), st.integers(8, 224), st.floats(1.0, 4.0))
def test_a_budget_of_auto_is_the_most_that_the_factor_allows(
    cost: StepCost, decoding: int, most: int, factor: float
) -> None:
    rows = budget_rows(PrefillBudget(factor=factor), cost, decoding, most)
    bound = cost.forward_ms(decoding) * factor
    assert LEAST_ROWS <= rows <= most
    assert rows == LEAST_ROWS or cost.forward_ms(decoding + rows) <= bound
    assert rows == most or cost.forward_ms(decoding + rows + 1) > bound


@given(st.integers(1, 4096), st.integers(8, 224))
def test_a_budget_that_is_given_is_kept(rows: int, most: int) -> None:
    assert budget_rows(PrefillBudget(rows=rows), FLAT_COST, 4, most) == min(rows, most)


def test_a_short_prompt_is_read_at_once_beside_a_long_one_and_a_stream() -> None:
    """Its first token comes with the step that it arrives for; the stream gets one in every step."""
    rng = random.Random(4)
    core = make_core(prefill_rows=64, max_rows=96)
    core.scheduler.prefill = PrefillBudget(rows=12)
    core.add(request("stream", random_prompt(rng, 5, 5), max_tokens=60, ignore_eos=True))
    core.step()
    core.add(request("long", random_prompt(rng, 150, 150), max_tokens=4, ignore_eos=True))
    core.step()
    core.add(request("short", random_prompt(rng, 12, 12), max_tokens=4, ignore_eos=True))
    assert {name for name, _ in core.step()} == {"stream", "short"}
    while core.has_work:
        core.step()
    core.check_integrity()
