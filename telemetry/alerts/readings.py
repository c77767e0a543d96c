"""What an alert rule looks at, out of the figures that are exported as metrics. Pure but for counting fallbacks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from policy.alerts import (
    FALLBACK_WINDOW_S,
    LATENCY_BOUNDS,
    PER_TOKEN_BOUNDS,
    RATE_WINDOW_S,
    SAVINGS_WINDOW_S,
    AlertRule,
)
from policy.statistics.aggregate import Statistics
from policy.statistics.counters import JUDGED
from telemetry import catalog
from telemetry.catalog import WINDOW_S, Metric
from telemetry.request_counts import RequestWindow, Totals, quantile, slower_than
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
    "medusa_redis_latency_seconds": catalog.REDIS_LATENCY,
    "medusa_backend_up": catalog.BACKEND_UP,
    "medusa_backend_breaker_state": catalog.BREAKER_STATE,
    "medusa_policy_rejected": catalog.POLICY_REJECTED,
    "medusa_keys_rejected": catalog.KEYS_REJECTED,
    "medusa_file_hangs": catalog.FILE_HANGS,
}
_SHARES: Mapping[str, tuple[Metric, Metric]] = {
    "medusa_kv_usage": (catalog.KV_PAGES_USED, catalog.KV_PAGES_LIMIT),
    "medusa_places_usage": (catalog.PLACES_USED, catalog.PLACES_LIMIT),
}
MIN_REQUESTS = 20
"""Shares and quantiles of requests must rest on this many of their window; fewer are no evidence."""
MIN_SAVINGS_S = 10.0
"""Engine time of vanilla decoding that a share of it must rest on."""
_RESTS_ON: Mapping[str, Callable[[StepsLately], float]] = {
    "speculative_speedup_factor": lambda steps: steps.policy,
    "speculative_acceptance_rate": lambda steps: steps.policy,
    "medusa_head_accuracy": lambda steps: steps.policy,
    "medusa_head_accuracy_ratio": lambda steps: steps.policy,
    "speculative_control_prediction_ratio": lambda steps: steps.vanilla,
}


def readings(
    rule: AlertRule,
    figures: Figures,
    steps: Mapping[Subject, StepsLately],
    fallbacks: Mapping[Subject, float],
    requests: RequestWindow | None = None,
    now: float = 0.0,
    engine_times: Mapping[Subject, float] | None = None,
) -> dict[Subject, float]:
    """The rule's figure for every model and class that the rule covers; what there is no evidence of is left out.

    ``steps``: what the last minute had of each; ``fallbacks``: how many within :data:`FALLBACK_WINDOW_S`; ``requests``:
    how those of this replica went; ``engine_times``: over vanilla's, within :data:`SAVINGS_WINDOW_S`.
    """
    if rule.metric == "medusa_engine_time_ratio":
        return {subject: value for subject, value in (engine_times or {}).items() if rule.covers(*subject)}
    if rule.metric in _OF_REQUESTS:
        return {} if requests is None else _of_requests(rule, requests, now)
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
    if rule.metric in _SHARES:
        of_used, of_limits = _SHARES[rule.metric]
        used, limits = figures.get(of_used.name, {}), figures.get(of_limits.name, {})
        usage = {labels: used.get(labels, 0.0) / limit for labels, limit in limits.items() if limit > 0}
        return _worst(rule, of_used, usage)
    accuracy = _first_guesses(rule, figures, catalog.HEAD_ACCURACY)
    if rule.metric == "medusa_head_accuracy":
        return accuracy
    assert rule.metric == "medusa_head_accuracy_ratio", rule.metric
    prior = _first_guesses(rule, figures, catalog.HEAD_ACCURACY_PRIOR)
    return {subject: value / prior[subject] for subject, value in accuracy.items() if prior.get(subject, 0.0) > 0}


def _failed(totals: Totals, rule: AlertRule) -> float | None:
    return totals.outcomes["server_error"] / totals.judged if totals.judged >= MIN_REQUESTS else None


def _slow(counts: Sequence[int], bounds: Sequence[float], rule: AlertRule) -> float | None:
    assert rule.within_s is not None
    total = sum(counts)
    return slower_than(rule.within_s, counts, bounds) / total if total >= MIN_REQUESTS else None


def _p99(counts: Sequence[int], bounds: Sequence[float]) -> float | None:
    return quantile(0.99, counts, bounds) if sum(counts) >= MIN_REQUESTS else None


_OF_REQUESTS: Mapping[str, Callable[[Totals, AlertRule], float | None]] = {
    "medusa_error_ratio": _failed,
    "medusa_error_burn_rate": _failed,
    "medusa_ttft_p99_seconds": lambda totals, rule: _p99(totals.first_token, LATENCY_BOUNDS),
    "medusa_tpot_p99_seconds": lambda totals, rule: _p99(totals.per_token, PER_TOKEN_BOUNDS),
    "medusa_ttft_burn_rate": lambda totals, rule: _slow(totals.first_token, LATENCY_BOUNDS, rule),
    "medusa_tpot_burn_rate": lambda totals, rule: _slow(totals.per_token, PER_TOKEN_BOUNDS, rule),
    "medusa_unauthorized_rate": lambda totals, rule: totals.outcomes["unauthorized"] / RATE_WINDOW_S,
    "medusa_limited_rate": lambda totals, rule: totals.outcomes["limited"] / RATE_WINDOW_S,
}
"""The figure, of the totals of a window; of a burn rate, what is then measured by the objective."""


def _of_requests(rule: AlertRule, requests: RequestWindow, now: float) -> dict[Subject, float]:
    figure, measure = rule.figure, _OF_REQUESTS[rule.metric]
    windows = (rule.window_s, rule.short_window_s) if figure.burn else (RATE_WINDOW_S,)
    found: dict[Subject, float] = {}
    for subject in [("", "")] if figure.scope == "fleet" else requests.subjects:
        if not rule.covers(*subject):
            continue
        values = [measure(requests.lately(subject, window, now), rule) for window in windows]
        known = [value for value in values if value is not None]
        if len(known) == len(windows):
            # Past its limit over each of them: the least says whether.
            found[subject] = min(known) / ((1 - rule.objective) if figure.burn else 1.0)
    return found


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
        judged = sum(tally.steps for arm, tally in arms.items() if arm in JUDGED)
        lately[name] = StepsLately(judged, sum(tally.get("control_steps") for tally in arms.values()))
    return lately


class SavingsHistory:
    """What the engines' time and vanilla's were. Times must not go back."""

    def __init__(self) -> None:
        self._then: dict[Subject, deque[tuple[float, float, float]]] = {}

    def lately(self, figures: Figures, now: float) -> dict[Subject, float]:
        """Engine time over that of vanilla decoding, within :data:`SAVINGS_WINDOW_S` of now, by model and class; less
        than :data:`MIN_SAVINGS_S` of the latter is no evidence."""
        found: dict[Subject, float] = {}
        spent = figures.get(catalog.DECODE_TIME.name, {})
        for labels, vanilla in figures.get(catalog.VANILLA_TIME.name, {}).items():
            subject = _subject(dict(zip(catalog.VANILLA_TIME.labels, labels, strict=True)))
            latest = (now, vanilla, spent.get(labels, 0.0))
            then = self._then.setdefault(subject, deque([latest]))
            if latest[1] < then[-1][1]:
                then.clear()  # counted from the start again
            # The last one is replaced until it is old enough, so that an hour keeps a few dozen.
            if len(then) > 1 and now - then[-2][0] < SAVINGS_WINDOW_S / 60:
                then.pop()
            then.append(latest)
            while len(then) > 2 and now - then[1][0] >= SAVINGS_WINDOW_S:
                then.popleft()
            vanilla_s, spent_s = vanilla - then[0][1], latest[2] - then[0][2]
            if vanilla_s >= MIN_SAVINGS_S:
                found[subject] = spent_s / vanilla_s
        return found


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
