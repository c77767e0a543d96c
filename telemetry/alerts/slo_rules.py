"""What alerts ask of finished requests, in PromQL: shares, quantiles and burn rates, of the whole fleet.

A burn rate is the share of bad requests over the share that the objective allows: at 1 the budget lasts exactly its
period. It must be past its limit over the window and over a twelfth of it, so that an alert ends soon after its cause
(Google, "The Site Reliability Workbook", chapter 5).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from policy.alerts import RATE_WINDOW_S, SAVINGS_WINDOW_S, AlertRule
from telemetry import catalog
from telemetry.catalog import Metric

WHERE = ("namespace", "job")
"""What a Prometheus adds to all series of one installation: no rule may mix two of them."""
_BY_CLASS = f"({', '.join((*WHERE, catalog.MODEL, catalog.CLASS))})"
_FLEET = f"({', '.join(WHERE)})"
_OK_OR_NOT = 'outcome=~"ok|server_error"'

Filters = Sequence[str]
"""Matchers that a rule's classes and models ask for."""


def _times(metric: Metric, part: str, filters: Filters, window_s: float, *more: str) -> str:
    """The rate of a latency histogram's series, with the model's label called as everywhere else."""
    named = [
        each.replace("model=", "gen_ai_request_model=", 1) if each.startswith("model=") else each for each in filters
    ]
    rate = _rate(f"{metric.prometheus}_{part}", [*more, *named], window_s)
    return f'label_replace({rate}, "model", "$1", "gen_ai_request_model", "(.*)")'


def _rate(series: str, matchers: Filters, window_s: float) -> str:
    return f"rate({series}{{{', '.join(matchers)}}}[{window_s:.0f}s])"


def _failed(filters: Filters, window_s: float) -> str:
    """The share of answers that failed by our own doing."""
    name = catalog.REQUESTS.prometheus
    bad = _rate(name, ['outcome="server_error"', *filters], window_s)
    return f"sum by {_BY_CLASS} ({bad}) / sum by {_BY_CLASS} ({_rate(name, [_OK_OR_NOT, *filters], window_s)})"


def _slow(metric: Metric, rule: AlertRule, filters: Filters, window_s: float) -> str:
    """The share of values above ``within``."""
    assert rule.within_s is not None
    bound = f"{rule.within_s:g}"
    le = f'le="{bound}"' if "." in bound else f'le=~"{bound}([.]0)?"'
    good = _times(metric, "bucket", filters, window_s, le)
    return f"1 - sum by {_BY_CLASS} ({good}) / sum by {_BY_CLASS} ({_times(metric, 'count', filters, window_s)})"


def _burn(rule: AlertRule, share: Callable[[float], str]) -> str:
    budget = f"{1 - rule.objective:.6g}"
    parts = [f"({share(window)}) / {budget} {_side(rule)}" for window in (rule.window_s, rule.short_window_s)]
    return " and ".join(parts)


def _p99(metric: Metric, rule: AlertRule, filters: Filters) -> str:
    buckets = _times(metric, "bucket", filters, RATE_WINDOW_S)
    return f"histogram_quantile(0.99, sum by (le, {_BY_CLASS[1:]} ({buckets})) {_side(rule)}"


def _flood(rule: AlertRule, outcome: str) -> str:
    rate = _rate(catalog.REQUESTS.prometheus, [f'outcome="{outcome}"'], RATE_WINDOW_S)
    return f"sum by {_FLEET} ({rate}) {_side(rule)}"


def _engine_time(filters: Filters) -> str:
    """Engine time over that of vanilla decoding."""
    spent, vanilla = (
        _rate(metric.prometheus, filters, SAVINGS_WINDOW_S) for metric in (catalog.DECODE_TIME, catalog.VANILLA_TIME)
    )
    return f"sum by {_BY_CLASS} ({spent}) / sum by {_BY_CLASS} ({vanilla})"


def _side(rule: AlertRule) -> str:
    return f"{'<' if rule.below is not None else '>'} {rule.limit:g}"


_TTFT, _TPOT = catalog.TIME_TO_FIRST_TOKEN, catalog.TIME_PER_OUTPUT_TOKEN

SLO_EXPRESSIONS: Mapping[str, Callable[[AlertRule, Filters], str]] = {
    "medusa_engine_time_ratio": lambda rule, filters: f"{_engine_time(filters)} {_side(rule)}",
    "medusa_error_ratio": lambda rule, filters: f"{_failed(filters, RATE_WINDOW_S)} {_side(rule)}",
    "medusa_error_burn_rate": lambda rule, filters: _burn(rule, lambda window: _failed(filters, window)),
    "medusa_ttft_p99_seconds": lambda rule, filters: _p99(_TTFT, rule, filters),
    "medusa_tpot_p99_seconds": lambda rule, filters: _p99(_TPOT, rule, filters),
    "medusa_ttft_burn_rate": lambda rule, filters: _burn(rule, lambda window: _slow(_TTFT, rule, filters, window)),
    "medusa_tpot_burn_rate": lambda rule, filters: _burn(rule, lambda window: _slow(_TPOT, rule, filters, window)),
    "medusa_unauthorized_rate": lambda rule, filters: _flood(rule, "unauthorized"),
    "medusa_limited_rate": lambda rule, filters: _flood(rule, "limited"),
}
"""The condition of a rule, by what ``metric`` may name in a policy; see :mod:`telemetry.alerts.prometheus_rules`."""
