"""What an alert rule looks at, out of the figures that are exported as metrics. Pure but for counting fallbacks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

from policy.alerts import FALLBACK_WINDOW_S, AlertRule
from policy.statistics.aggregate import Statistics
from telemetry import catalog
from telemetry.catalog import WINDOW_S, Metric
from telemetry.snapshot import Figures, Labels

Subject = tuple[str, str]
"""Model and class, "" where the figure has none."""


class StepsLately(NamedTuple):
    """Decode steps of the last minute: those that speculated by the policy, and vanilla ones whosever plan it was."""

    policy: float = 0.0
    vanilla: float = 0.0


MIN_STEPS = 50.0
"""What is measured by class must rest on this many steps of the last minute; fewer are no evidence."""

_PLAIN: Mapping[str, Metric] = {
    "speculative_speedup_factor": catalog.SPEEDUP_FACTOR,
    "speculative_acceptance_rate": catalog.ACCEPTANCE_RATE,
    "speculative_control_prediction_ratio": catalog.CONTROL_DISAGREEMENT,
    "speculative_fallback_active": catalog.FALLBACK_ACTIVE,
    "medusa_verification_step_ratio": catalog.VERIFICATION_RATIO,
    "medusa_queue_oldest_age_seconds": catalog.QUEUE_OLDEST_AGE,
    "medusa_engine_up": catalog.ENGINE_UP,
    "medusa_heads_stale": catalog.HEADS_STALE,
    "medusa_redis_up": catalog.REDIS_UP,
}
_RESTS_ON: Mapping[str, Callable[[StepsLately], float]] = {
    "speculative_speedup_factor": lambda steps: steps.policy,
    "speculative_acceptance_rate": lambda steps: steps.policy,
    "medusa_head_accuracy": lambda steps: steps.policy,
    "medusa_head_accuracy_ratio": lambda steps: steps.policy,
    "speculative_control_prediction_ratio": lambda steps: steps.vanilla,
}


def readings(
    rule: AlertRule, figures: Figures, steps: Mapping[Subject, StepsLately], fallbacks: Mapping[Subject, float]
) -> dict[Subject, float]:
    """The rule's figure for every model and class that the rule covers; what there is no evidence of is left out.

    ``steps``: what the last minute had of each; ``fallbacks``: how many within :data:`FALLBACK_WINDOW_S`.
    """
    rests_on = _RESTS_ON.get(rule.metric)
    return {
        subject: value
        for subject, value in _values(rule, figures, fallbacks).items()
        if rule.covers(*subject) and (rests_on is None or rests_on(steps.get(subject, StepsLately())) >= MIN_STEPS)
    }


def _values(rule: AlertRule, figures: Figures, fallbacks: Mapping[Subject, float]) -> Mapping[Subject, float]:
    if rule.metric in _PLAIN:
        metric = _PLAIN[rule.metric]
        return _worst(rule, metric, figures.get(metric.name, {}))
    if rule.metric == "speculative_fallback_count":
        return fallbacks
    if rule.metric == "medusa_kv_usage":
        used, limits = figures.get(catalog.KV_PAGES_USED.name, {}), figures.get(catalog.KV_PAGES_LIMIT.name, {})
        usage = {labels: used.get(labels, 0.0) / limit for labels, limit in limits.items() if limit > 0}
        return _worst(rule, catalog.KV_PAGES_USED, usage)
    accuracy = _first_guesses(rule, figures, catalog.HEAD_ACCURACY)
    if rule.metric == "medusa_head_accuracy":
        return accuracy
    assert rule.metric == "medusa_head_accuracy_ratio", rule.metric
    prior = _first_guesses(rule, figures, catalog.HEAD_ACCURACY_PRIOR)
    return {subject: value / prior[subject] for subject, value in accuracy.items() if prior.get(subject, 0.0) > 0}


def _first_guesses(rule: AlertRule, figures: Figures, metric: Metric) -> dict[Subject, float]:
    found = figures.get(metric.name, {})
    return _worst(
        rule, metric, {labels: value for labels, value in found.items() if labels[2:] == (str(rule.head), "1")}
    )


def _worst(rule: AlertRule, metric: Metric, values: Mapping[Labels, float]) -> dict[Subject, float]:
    """By model and class. Of several backends of a model, the one that is nearest to breaking the rule."""
    pick, found = min if rule.below is not None else max, {}
    for labels, value in values.items():
        subject = _subject(dict(zip(metric.labels, labels, strict=True)))
        found[subject] = pick(found.get(subject, value), value)
    return found


def _subject(labels: Mapping[str, str]) -> Subject:
    return labels.get(catalog.MODEL, ""), labels.get(catalog.CLASS, "")


def steps_lately(statistics: Statistics, now: float) -> dict[Subject, StepsLately]:
    """What the figures of the last minute rest on."""
    lately: dict[Subject, StepsLately] = {}
    for name in statistics.window.names:
        arms = statistics.window.all_arms(name, now, WINDOW_S)
        policy = arms["policy"].steps if "policy" in arms else 0.0
        lately[name] = StepsLately(policy, sum(tally.get("control_steps") for tally in arms.values()))
    return lately


class FallbackHistory:
    """When fallbacks were counted. Times must not go back."""

    def __init__(self) -> None:
        self._known: dict[Subject, float] = {}
        self._times: dict[Subject, deque[float]] = {}

    def lately(self, figures: Figures, now: float) -> dict[Subject, float]:
        """Fallbacks within :data:`FALLBACK_WINDOW_S` of now, by model and class."""
        for labels, count in figures.get(catalog.FALLBACK_COUNT.name, {}).items():
            subject = _subject(dict(zip(catalog.FALLBACK_COUNT.labels, labels, strict=True)))
            times = self._times.setdefault(subject, deque(maxlen=1000))
            times.extend([now] * int(count - self._known.get(subject, 0.0)))
            self._known[subject] = count
            while times and now - times[0] >= FALLBACK_WINDOW_S:
                times.popleft()
        return {subject: float(len(times)) for subject, times in self._times.items()}
