"""Prompts that are read side by side: a short one does not wait for a long one, and a long one is not left behind."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from backends.engine.prefill_share import share_rows
from backends.types import DecodingPlan
from tests.support.engine_helpers import decode, make_core, one_thread, random_prompt, request  # noqa: F401

LEFT = st.lists(st.integers(1, 9000), max_size=12)


@given(LEFT, st.integers(0, 300))
def test_rows_are_used_up_and_never_more(left: list[int], rows: int) -> None:
    shares = share_rows(left, rows)
    assert sum(shares) == min(rows, sum(left))
    assert all(0 <= share <= wanted for share, wanted in zip(shares, left, strict=True))


@given(LEFT.filter(bool), st.integers(1, 300))
def test_the_oldest_always_gets_half_and_the_shortest_comes_first_with_the_rest(left: list[int], rows: int) -> None:
    shares = share_rows(left, rows)
    assert shares[0] >= min(left[0], -(-rows // 2))
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
