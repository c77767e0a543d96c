"""What finished requests come to: counts with closed labels, and windows that say what Prometheus would."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.types import GenerationStats
from policy.alerts import LATENCY_BOUNDS
from policy.spec import Cost
from telemetry.catalog import MOST_TENANTS, OTHER, OUTCOMES
from telemetry.request import LEFT, RequestRecord
from telemetry.request_counts import (
    LONGEST_WINDOW_S,
    SNAPSHOT_EVERY_S,
    RequestCounts,
    RequestWindow,
    quantile,
    slower_than,
)
from telemetry.snapshot import ClosedLabels, savings_figures

LABELS = ClosedLabels(["m"], ["code"])
CODE = ("m", "code")


def record(**changed: object) -> RequestRecord:
    made = RequestRecord("chat", "/v1/chat/completions", 0.0, model="m", class_name="code", backend="b")
    for name, value in changed.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ("status", "error", "outcome"),
    [
        (200, None, "ok"),
        (200, "engine_error", "server_error"),
        (503, "shutting_down", "server_error"),
        (200, LEFT, "left"),
        (499, LEFT, "left"),
        (401, "invalid_api_key", "unauthorized"),
        (403, "not_allowed", "unauthorized"),
        (429, "rate_limited", "limited"),
        (400, "invalid_type", "client_error"),
        (404, "model_not_found", "client_error"),
    ],
)
def test_whose_doing_the_end_was(status: int, error: str | None, outcome: str) -> None:
    assert record(status=status, error=error).outcome == outcome
    assert outcome in OUTCOMES


def test_tokens_and_requests_by_tenant_only_where_that_is_wanted() -> None:
    for by_tenant, name in ((False, ""), (True, "alice")):
        counts = RequestCounts(by_tenant=by_tenant)
        counts.add(
            record(tenant="alice", submitted_at=1.0, prompt_tokens=7, output_tokens=5, deadline_cut=True), LABELS
        )
        figures = counts.figures()
        whose = (*CODE, "b", name)
        assert figures["medusa_requests"] == {(*whose, "ok"): 1, (*whose, "server_error"): 0, (*whose, "limited"): 0}
        assert figures["medusa_prompt_tokens"] == {(*CODE, "b", name): 7}
        assert figures["medusa_completion_tokens"] == {(*CODE, "b", name): 5}
        assert figures["medusa_deadline_cuts"] == {CODE: 1}


def test_tenants_are_bounded() -> None:
    counts = RequestCounts(by_tenant=True)
    for number in range(MOST_TENANTS + 50):
        counts.add(record(tenant=f"key-{number}"), LABELS)
    found = counts.figures()["medusa_requests"]
    assert len({labels[3] for labels in found}) == MOST_TENANTS + 1
    assert found[*CODE, "b", OTHER, "ok"] == 50


def test_savings_by_tenant_have_the_labels_of_the_other_figures() -> None:
    sums = [(("code", "alice"), 3600.0), (("code", "bob"), -1.0), (("gone", "alice"), 2.0), (("code", ""), 4.0)]
    assert RequestCounts().by_tenant(sums, LABELS) == {}
    saved = RequestCounts(by_tenant=True).by_tenant(sums, LABELS)
    assert saved == {("code", "alice"): 3600, ("code", "bob"): -1, (OTHER, "alice"): 2, ("code", ""): 4}
    assert savings_figures(saved, None) == {"medusa_tenant_time_saved": saved}
    money = savings_figures(saved, Cost(2.5, "EUR"))["medusa_tenant_cost_saved"]
    assert money["code", "alice", "EUR"] == pytest.approx(2.5)
    assert money["code", "bob", "EUR"] < 0
    many = [(("code", f"key-{number}"), 1.0) for number in range(MOST_TENANTS + 50)]
    bounded = RequestCounts(by_tenant=True).by_tenant(many, LABELS)
    assert (len(bounded), bounded["code", OTHER], sum(bounded.values())) == (MOST_TENANTS + 1, 50, MOST_TENANTS + 50)


@given(st.lists(st.tuples(st.floats(0, 600), st.sampled_from(OUTCOMES)), max_size=60), st.sampled_from([60.0, 3600.0]))
def test_a_window_holds_what_came_in_it_give_or_take_a_snapshot(steps: list[tuple[float, str]], window: float) -> None:
    kept, now, said = RequestWindow(), 1000.0, []
    status = {"ok": 200, "server_error": 500, "limited": 429, "unauthorized": 401, "client_error": 400, "left": 499}
    for wait, outcome in steps:
        # The clock ticks every second or so, whatever comes.
        end = now + wait
        while now < end:
            now = min(now + SNAPSHOT_EVERY_S / 2, end)
            kept.tick(now)
        error = None if outcome == "ok" else LEFT if outcome == "left" else "x"
        kept.add(record(status=status[outcome], error=error), LABELS)
        said.append((now, outcome))
    found = kept.lately(CODE, window, now).outcomes
    surely = Counter(outcome for at, outcome in said if at > now - window)
    perhaps = Counter(outcome for at, outcome in said if at >= now - window - 2 * SNAPSHOT_EVERY_S)
    for outcome in OUTCOMES:
        assert surely[outcome] <= found[outcome] <= perhaps[outcome]


def test_what_is_kept_is_bounded() -> None:
    kept = RequestWindow()
    kept.add(record(), LABELS)
    for number in range(5000):
        kept.tick(number * SNAPSHOT_EVERY_S)
    assert len(kept._before[CODE]) <= LONGEST_WINDOW_S / SNAPSHOT_EVERY_S + 2


def test_times_go_into_the_buckets_that_prometheus_has() -> None:
    kept = RequestWindow()
    stats = GenerationStats("medusa", emitted_tokens=11, first_token_at=1.0, finished_at=2.0)
    kept.add(record(first_token_at=1.0, sequences=(stats,)), LABELS)
    totals = kept.lately(CODE, 60.0, 100.0)
    assert slower_than(1.0, totals.first_token, LATENCY_BOUNDS) == 0, "a bound is part of its bucket"
    assert slower_than(0.75, totals.first_token, LATENCY_BOUNDS) == 1
    assert sum(totals.per_token) == 1


def test_quantiles_are_prometheus_own() -> None:
    # histogram_quantile(0.5, ...) over buckets le=1: 2, le=2: 6, +Inf: 8 is 1.5: the middle of the second bucket.
    assert quantile(0.5, [2, 4, 2], [1.0, 2.0]) == 1.5
    assert quantile(0.99, [2, 4, 2], [1.0, 2.0]) == 2.0
    assert quantile(0.5, [0, 0, 0], [1.0, 2.0]) is None
