"""Hours and money that speculation saved: from the engine's counterfactuals, by class and tenant."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.engine.counters import CounterBook, RequestCounts, SequenceStep, StepTimes
from gateway.serving.controller import Controller
from policy.config.problems import PolicyError
from policy.file.format import parse_policy
from policy.runtime import PolicyRuntime
from policy.savings import OTHER_TENANTS, TenantSavings
from policy.spec import Cost
from tests.support.access_helpers import CHAT, bearer, chat, entry, keyed_gateway, new_key, write_keys

STEPS = st.lists(
    st.tuples(st.integers(1, 6), st.floats(0.1, 50), st.floats(0, 5), st.integers(1, 16)), min_size=1, max_size=20
)


@given(STEPS)
def test_a_requests_share_is_what_its_class_is_told(steps: list[tuple[int, float, float, int]]) -> None:
    """The sums by tenant and those by class are of the same times, up to the rounding of counters."""
    book, request = CounterBook(), RequestCounts()
    for tokens, vanilla_ms, drafting_ms, sequences in steps:
        step = SequenceStep([0] * tokens, tokens - 1, 0, {}, None, drafting_ms)
        times = StepTimes(vanilla_ms, vanilla_ms + drafting_ms, vanilla_ms, sequences)
        book.add_step("key", step, times, control=False)
        request.add(step, times)
    counters = book.take()["key"]
    assert request.saved_ms == pytest.approx((counters.vanilla_us - counters.spent_us) / 1e3, abs=len(steps) * 1e-3)


def test_what_the_price_says() -> None:
    spec = parse_policy(b"version: 1\ncost: {per_gpu_hour: 2.5, currency: EUR}\n", "p")
    assert spec.cost is not None
    assert spec.cost == Cost(2.5, "EUR")
    assert spec.cost.of(1800) == 1.25
    assert parse_policy(b"version: 1\n", "p").cost is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("cost: {currency: USD}", "per_gpu_hour"),
        ("cost: {per_gpu_hour: -1}", "cost.per_gpu_hour"),
        ("cost: {per_gpu_hour: 1, currency: '$'}", "a currency of letters"),
        ("cost: 3", "cost"),
    ],
)
def test_broken_prices_are_refused_by_name(text: str, says: str) -> None:
    with pytest.raises(PolicyError, match=says.replace("$", r"\$")):
        parse_policy(f"version: 1\n{text}\n".encode(), "p")


def test_tenants_are_bounded() -> None:
    savings = TenantSavings(most=2)
    for tenant in "abcab":
        savings.add("code", tenant, 1.0)
    assert list(savings.items()) == [
        (("code", OTHER_TENANTS), 1.0),
        (("code", "a"), 2.0),
        (("code", "b"), 2.0),
    ]


def test_the_gateway_tells_hours_and_money(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alice, root = new_key(), new_key()
    path = tmp_path / "keys.yaml"
    write_keys(path, entry("alice", alice), entry("root", root, scopes=["admin"]))
    text = b"version: 1\ncost: {per_gpu_hour: 3600, currency: USD}\n"
    monkeypatch.setattr("tests.support.access_helpers.POLICY", text)
    with keyed_gateway(path) as live:
        answer = live.http.post(CHAT, json=chat(), headers=bearer(alice)).json()
        live.in_loop(live.state.controller.background.count())
        savings = live.http.get("/admin/stats", headers=bearer(root)).json()["savings"]
    assert (savings["per_gpu_hour"], savings["currency"]) == (3600, "USD")
    [by_class], [by_tenant] = savings["by_class"], savings["by_tenant"]
    tokens, steps = answer["usage"]["completion_tokens"], answer["decoding"]["steps"]
    # The fake takes 10 ms a step, and vanilla would take as much for each token.
    assert by_class["saved_cost"] == pytest.approx(0.01 * (tokens - steps), abs=0.011)
    assert by_class["saved_hours"] == pytest.approx(by_class["vanilla_hours"] - by_class["decode_hours"])
    assert by_tenant["tenant"] == "alice"
    assert by_tenant["saved_cost"] == pytest.approx(0.01 * (tokens - steps), abs=0.011)


def test_without_a_price_there_are_hours_only() -> None:
    controller = Controller(PolicyRuntime.from_text(b"version: 1\n"))
    assert controller.policy.spec.cost is None
