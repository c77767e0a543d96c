"""The policy's alerts as Prometheus rules, for fleets that are watched by a Prometheus: same names, same labels.

Not covered: flap damping beyond ``keep``, and the 50 steps that the gateway wants as evidence.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from policy.alerts import FALLBACK_WINDOW_S, AlertRule
from telemetry import catalog
from telemetry.alerts.local_states import describe
from telemetry.alerts.slo_rules import SLO_EXPRESSIONS, WHERE
from telemetry.catalog import Metric

GROUP = "medusa-gateway"


_BY_CLASS = (catalog.MODEL, catalog.CLASS)


@dataclass(frozen=True, slots=True)
class _Expression:
    """``series`` of one replica or backend, with {filters} still to be filled in. ``worst``: the fleet's figure is that
    of the one that is worst off; else the mean, since every replica measures the whole fleet."""

    series: str
    metrics: tuple[Metric, ...]
    by: tuple[str, ...]
    worst: bool = False
    by_head: bool = False


def _plain(metric: Metric, *, worst: bool) -> _Expression:
    by = tuple(label for label in _BY_CLASS if label in metric.labels)
    return _Expression(metric.prometheus + "{filters}", (metric,), by, worst)


def _share(used: Metric, limit: Metric) -> _Expression:
    series = f"{used.prometheus}{{filters}} / {limit.prometheus}{{filters}}"
    return _Expression(series, (used, limit), (catalog.MODEL,), worst=True)


EXPRESSIONS: Mapping[str, _Expression] = {
    "speculative_speedup_factor": _plain(catalog.SPEEDUP_FACTOR, worst=False),
    "speculative_acceptance_rate": _plain(catalog.ACCEPTANCE_RATE, worst=False),
    "speculative_control_prediction_ratio": _plain(catalog.CONTROL_DISAGREEMENT, worst=False),
    "speculative_fallback_active": _plain(catalog.FALLBACK_ACTIVE, worst=True),
    "speculative_fallback_count": _Expression(
        f"increase({catalog.FALLBACK_COUNT.prometheus}{{filters}}[{FALLBACK_WINDOW_S:.0f}s])",
        (catalog.FALLBACK_COUNT,),
        _BY_CLASS,
        worst=True,
    ),
    "medusa_head_accuracy": _Expression(
        catalog.HEAD_ACCURACY.prometheus + "{filters}", (catalog.HEAD_ACCURACY,), _BY_CLASS, by_head=True
    ),
    "medusa_head_accuracy_ratio": _Expression(
        f"{catalog.HEAD_ACCURACY.prometheus}{{filters}} / {catalog.HEAD_ACCURACY_PRIOR.prometheus}{{filters}}",
        (catalog.HEAD_ACCURACY, catalog.HEAD_ACCURACY_PRIOR),
        _BY_CLASS,
        by_head=True,
    ),
    "medusa_verification_step_ratio": _plain(catalog.VERIFICATION_RATIO, worst=True),
    "medusa_queue_oldest_age_seconds": _plain(catalog.QUEUE_OLDEST_AGE, worst=True),
    "medusa_kv_usage": _share(catalog.KV_PAGES_USED, catalog.KV_PAGES_LIMIT),
    "medusa_places_usage": _share(catalog.PLACES_USED, catalog.PLACES_LIMIT),
    "medusa_engine_up": _plain(catalog.ENGINE_UP, worst=True),
    "medusa_heads_stale": _plain(catalog.HEADS_STALE, worst=True),
    "medusa_redis_up": _plain(catalog.REDIS_UP, worst=True),
    "medusa_redis_latency_seconds": _plain(catalog.REDIS_LATENCY, worst=True),
    "medusa_backend_up": _plain(catalog.BACKEND_UP, worst=True),
    "medusa_backend_breaker_state": _plain(catalog.BREAKER_STATE, worst=True),
    "medusa_policy_rejected": _plain(catalog.POLICY_REJECTED, worst=True),
    "medusa_keys_rejected": _plain(catalog.KEYS_REJECTED, worst=True),
    "medusa_file_hangs": _plain(catalog.FILE_HANGS, worst=True),
}
"""By what ``metric`` may name in a policy; those of requests are in :data:`SLO_EXPRESSIONS`."""
ABSENT = "medusa-gateway-absent"
"""An alert that only a Prometheus can raise: nobody of an installation is left to say so."""


def expression(rule: AlertRule) -> str:
    """The condition in PromQL."""
    filters = {
        catalog.CLASS: _any_of([re.escape(name) for name in rule.classes]),
        catalog.MODEL: _any_of([".*".join(map(re.escape, name.split("*"))) for name in rule.models]),
    }
    matchers = [f"{label}=~{_quoted(pattern)}" for label, pattern in filters.items() if pattern]
    if rule.metric in SLO_EXPRESSIONS:
        return SLO_EXPRESSIONS[rule.metric](rule, matchers)
    of = EXPRESSIONS[rule.metric]
    if of.by_head:
        matchers += [f'head="{rule.head}"', 'rank="1"']
    series = of.series.replace("{filters}", f"{{{', '.join(matchers)}}}" if matchers else "")
    how = ("min" if rule.below is not None else "max") if of.worst else "avg"
    return (
        f"{how} by ({', '.join((*WHERE, *of.by))}) ({series}) {'<' if rule.below is not None else '>'} {rule.limit:g}"
    )


def rule_file(
    rules: Sequence[AlertRule], labels: Mapping[str, str] | None = None, runbooks: str | None = None
) -> dict[str, Any]:
    """What Prometheus reads as a rule file. ``labels`` are added to every alert. ``runbooks``: where runbooks are, with
    {alert} for the name, for the alert that only Prometheus has."""
    made = [_rule(rule, labels or {}) for rule in rules]
    return {"groups": [{"name": GROUP, "rules": [*made, _absent(labels or {}, runbooks)]}]}


def prometheus_rule(
    rules: Sequence[AlertRule],
    *,
    name: str,
    namespace: str | None = None,
    metadata_labels: Mapping[str, str] | None = None,
    labels: Mapping[str, str] | None = None,
    runbooks: str | None = None,
) -> dict[str, Any]:
    """The object that Prometheus Operator takes."""
    metadata: dict[str, Any] = {"name": name}
    if namespace is not None:
        metadata["namespace"] = namespace
    if metadata_labels:
        metadata["labels"] = dict(metadata_labels)
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": metadata,
        "spec": rule_file(rules, labels, runbooks),
    }


def _rule(rule: AlertRule, labels: Mapping[str, str]) -> dict[str, Any]:
    scopes = {"class": _BY_CLASS, "model": (catalog.MODEL,), "fleet": ()}
    names = scopes[rule.figure.scope]
    about = "/".join(f"{{{{ $labels.{name} }}}}" for name in names)
    made: dict[str, Any] = {"alert": rule.name, "expr": expression(rule), "for": _duration(rule.for_s)}
    if rule.keep_s > 0:
        made["keep_firing_for"] = _duration(rule.keep_s)
    made["labels"] = {"severity": rule.severity, **{name: _literal(text) for name, text in rule.labels}, **labels}
    made["annotations"] = {
        **{name: _literal(text) for name, text in rule.annotations},
        "summary": _literal(rule.summary) or describe(rule, (about, "") if about else ("", "")),
        "value": "{{ $value }}",
    }
    return made


def _absent(labels: Mapping[str, str], runbooks: str | None) -> dict[str, Any]:
    annotations = {"summary": "No replica of the gateway is scraped any more: all are gone, or Prometheus lost them."}
    if runbooks is not None:
        annotations["runbook_url"] = runbooks.replace("{alert}", ABSENT)
    return {
        "alert": ABSENT,
        # The chart adds its namespace; elsewhere, add what tells one installation from another.
        "expr": f"absent({catalog.BUILD_INFO.prometheus})",
        "for": "2m",
        "labels": {"severity": "critical", **labels},
        "annotations": annotations,
    }


def _any_of(patterns: Sequence[str]) -> str:
    return "|".join(patterns)


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _literal(text: str) -> str:
    """Words of an operator are no template."""
    return text.replace("{{", '{{ "{{" }}')


def _duration(seconds: float) -> str:
    """Whole milliseconds, in the largest unit that is exact."""
    ms = round(seconds * 1000)
    for unit, size in (("h", 3_600_000), ("m", 60_000), ("s", 1000)):
        if ms % size == 0:
            return f"{ms // size}{unit}"
    return f"{ms}ms"
