"""Alerts about finished requests, judged by a replica itself: shares, quantiles and burn rates with evidence."""

from __future__ import annotations

import pytest

from policy.alerts import AlertRule
from telemetry.alerts.readings import MIN_REQUESTS, readings
from telemetry.request import RequestRecord
from telemetry.request_counts import RequestWindow
from telemetry.snapshot import ClosedLabels

LABELS = ClosedLabels(["m"], ["code", "chat"])
CODE = ("m", "code")


def ended(class_name: str = "code", status: int = 200, first_token_s: float | None = 0.3) -> RequestRecord:
    record = RequestRecord("chat", "/", 0.0, model="m", class_name=class_name, status=status)
    record.error = None if status == 200 else "x"
    record.first_token_at = first_token_s
    return record


def window_of(*groups: tuple[float, int, RequestRecord], until: float) -> RequestWindow:
    """``groups``: when, how many, and what; with a clock that ticks every ten seconds."""
    kept, now = RequestWindow(), 0.0
    for at, count, record in groups:
        while now < at:
            kept.tick(now)
            now += 10.0
        for _ in range(count):
            kept.add(record, LABELS)
    while now <= until:
        kept.tick(now)
        now += 10.0
    return kept


def read(rule: AlertRule, kept: RequestWindow, now: float) -> dict[tuple[str, str], float]:
    return readings(rule, {}, {}, {}, kept, now)


def test_a_burn_rate_is_past_its_limit_over_both_windows_or_not_at_all() -> None:
    rule = AlertRule("a", "medusa_error_burn_rate", above=6, objective=0.9, window_s=3600.0)
    ill = [(at, 30, ended(status=500)) for at in (100.0, 200.0, 300.0, 400.0)]
    kept = window_of(*ill, until=410.0)
    assert read(rule, kept, 410.0)[CODE] == pytest.approx(10.0)
    # Well again for ten minutes: the hour is still bad, the last five minutes are not.
    kept = window_of(*ill, *((at, 30, ended()) for at in (500.0, 600.0, 700.0, 800.0, 900.0, 1000.0)), until=1010.0)
    assert read(rule, kept, 1010.0)[CODE] == 0.0


def test_few_requests_are_no_evidence() -> None:
    rule = AlertRule("a", "medusa_error_ratio", above=0.1)
    assert read(rule, window_of((10.0, MIN_REQUESTS - 1, ended(status=500)), until=20.0), 20.0) == {}
    assert read(rule, window_of((10.0, MIN_REQUESTS, ended(status=500)), until=20.0), 20.0) == {CODE: 1.0}


def test_what_clients_did_is_no_error() -> None:
    rule = AlertRule("a", "medusa_error_ratio", above=0.1)
    kept = window_of((10.0, 90, ended(status=400)), (10.0, 50, ended(status=429)), (10.0, 30, ended()), until=20.0)
    assert read(rule, kept, 20.0) == {CODE: 0.0}


def test_late_first_tokens_and_their_percentile() -> None:
    late = AlertRule("a", "medusa_ttft_burn_rate", above=6, objective=0.95, within_s=2.5)
    p99 = AlertRule("a", "medusa_ttft_p99_seconds", above=5)
    kept = window_of((10.0, 60, ended()), (10.0, 40, ended(first_token_s=9.0)), until=20.0)
    assert read(late, kept, 20.0) == {CODE: pytest.approx(0.4 / 0.05)}
    assert 7.5 < read(p99, kept, 20.0)[CODE] <= 10.0


def test_floods_are_of_the_whole_gateway() -> None:
    rule = AlertRule("a", "medusa_limited_rate", above=0.5)
    kept = window_of((400.0, 300, ended(status=429)), (400.0, 300, ended("chat", status=429)), until=410.0)
    assert read(rule, kept, 410.0) == {("", ""): 2.0}
    assert read(rule, kept, 1000.0) == {("", ""): 2.0}, "the window ends where its last tick was"


def test_a_rule_covers_the_classes_that_it_names() -> None:
    rule = AlertRule("a", "medusa_error_ratio", above=0.1, classes=("chat",))
    kept = window_of((10.0, 30, ended(status=500)), (10.0, 30, ended("chat", status=500)), until=20.0)
    assert read(rule, kept, 20.0) == {("m", "chat"): 1.0}
