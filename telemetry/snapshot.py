"""The present value of every gauge and running count, from what the gateway knows anyway.

One source for the metrics that are exported and for the alerts that are evaluated. Made about once a second, never for
a request.
"""

from __future__ import annotations

import platform
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from backends.types import DecodeCounters, Decoder, OnDevice, OptionalFailures, StepSample
from policy.config.watched_file import FileStatus
from policy.spec import Cost
from policy.statistics.aggregate import Statistics
from policy.statistics.counters import JUDGED, StatsKey, Tally, add_counters, sum_tallies
from policy.statistics.syncing import StoreHealth
from telemetry import catalog
from telemetry.catalog import MOST_CLASSES, MOST_HEADS, MOST_RANKS, OTHER, WINDOW_S, Metric

Labels = tuple[str, ...]
"""Values in the order of the metric's ``labels``."""
Figures = Mapping[str, Mapping[Labels, float]]
"""By the metric's name. What has no evidence has no entry: unknown is not zero."""


@dataclass(frozen=True, slots=True)
class BackendState:
    """A backend as it stands. ``breaker`` None: it has none. ``outcomes``: of the requests that went to it, where that
    is counted."""

    model: str
    backend: str
    up: bool
    places_used: int
    places_limit: int
    breaker: Literal["closed", "half_open", "open"] | None = None
    outcomes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Standing:
    """How the process itself stands. ``hangs``: files by whether reading them hangs. ``keys`` None: there are none.

    ``redis_latency_s``: by use. ``decided_locally`` None: limits are not shared. ``build``: version and replica.
    """

    backends: Sequence[BackendState] = ()
    keys: FileStatus | None = None
    hangs: Mapping[str, bool] = field(default_factory=dict)
    redis_latency_s: Mapping[str, float] = field(default_factory=dict)
    decided_locally: int | None = None
    build: tuple[str, str] | None = None
    draining: bool = False
    drain_aborted: int = 0


@dataclass(frozen=True, slots=True)
class Sources:
    """What figures are made of. ``decoders``: the engines of this process by the names of their backends.

    ``fallbacks``: how many there were by (model, class), since the start. ``store`` None: there is no store.
    ``alerts``: state by labels of ``medusa_alert_state``. ``standing`` None: not asked for.
    ``cost``: the operator's price of an hour. ``saved_s``: by class and tenant, since the start.
    """

    statistics: Statistics
    decoders: Mapping[str, Decoder]
    models: Sequence[str]
    classes: Sequence[str]
    policy: FileStatus
    fallbacks: Mapping[tuple[str, str], int] = field(default_factory=dict)
    store: StoreHealth | None = None
    alerts: Mapping[Labels, float] = field(default_factory=dict)
    standing: Standing | None = None
    cost: Cost | None = None
    saved_s: Iterable[tuple[tuple[str, str], float]] = ()


class ClosedLabels:
    """The models and classes that have series of their own; the rest share :data:`OTHER`."""

    def __init__(self, models: Iterable[str], classes: Iterable[str]) -> None:
        self.models = frozenset(models)
        self.classes = frozenset([*sorted(classes)[:MOST_CLASSES], "unclassified"])

    def of(self, model: str, class_name: str) -> tuple[str, str]:
        return self.model(model), class_name if class_name in self.classes else OTHER

    def model(self, name: str) -> str:
        return name if name in self.models else OTHER


@dataclass(slots=True)
class _StepSums:
    """Sums over the steps of one engine; the vanilla ones of all steps, the others of those with candidates only."""

    steps: int = 0
    vanilla_s: float = 0.0
    verified_s: float = 0.0
    verified_vanilla_s: float = 0.0


class StepWindow:
    """What steps of the last minute cost, by backend, in sums by the second. Times must not go back."""

    def __init__(self) -> None:
        self._ticks: dict[str, deque[tuple[float, _StepSums]]] = {}

    def add(self, backend: str, samples: Iterable[StepSample], now: float) -> None:
        sums = _StepSums()
        for sample in samples:
            if sample.kind == "prefill":  # its rows are prompts: nothing to compare with vanilla decoding
                continue
            sums.steps += 1
            sums.vanilla_s += sample.vanilla_s
            if sample.kind == "verification":
                sums.verified_s += sample.seconds
                sums.verified_vanilla_s += sample.vanilla_s
        ticks = self._ticks.setdefault(backend, deque())
        if sums.steps:
            ticks.append((now, sums))
        while ticks and ticks[0][0] <= now - WINDOW_S:
            ticks.popleft()

    def vanilla_step_s(self, backend: str) -> float | None:
        """Mean seconds that the cost table gives a step without candidates; None without steps."""
        ticks = self._ticks.get(backend, ())
        steps = sum(sums.steps for _, sums in ticks)
        return sum(sums.vanilla_s for _, sums in ticks) / steps if steps else None

    def verification_ratio(self, backend: str) -> float | None:
        """Measured time of steps with candidates over the table's for the same batches without; None without such."""
        ticks = self._ticks.get(backend, ())
        vanilla = sum(sums.verified_vanilla_s for _, sums in ticks)
        return sum(sums.verified_s for _, sums in ticks) / vanilla if vanilla > 0 else None


def take_figures(sources: Sources, steps: StepWindow, now: float) -> Figures:
    """All figures at ``now`` (monotonic)."""
    found: dict[str, dict[Labels, float]] = {}

    def put(metric: Metric, value: float | None, *labels: str) -> None:
        if value is not None:
            found.setdefault(metric.name, {})[labels] = float(value)

    closed = ClosedLabels(sources.models, sources.classes)
    _classes(put, sources, closed, now)
    _counts(put, sources, closed)
    _engines(put, sources.decoders, steps)
    if sources.store is not None and sources.store.ok is not None:
        put(catalog.REDIS_UP, sources.store.ok)
    # The first is what the gateway started with.
    put(catalog.POLICY_RELOADS, max(sources.policy.accepted - 1, 0), "accepted")
    put(catalog.POLICY_RELOADS, sources.policy.rejected, "rejected")
    _file(put, sources.policy, catalog.POLICY_REJECTED, catalog.POLICY_INFO)
    if sources.standing is not None:
        _standing(put, sources.standing)
    for labels, state in sources.alerts.items():
        put(catalog.ALERT_STATE, state, *labels)
    return found


def savings_figures(saved_s: Mapping[Labels, float], cost: Cost | None) -> Figures:
    """What speculation saved, by class and tenant as series have them. Pure."""
    money = {} if cost is None else {(*whose, cost.currency): cost.of(seconds) for whose, seconds in saved_s.items()}
    found = {catalog.TENANT_TIME_SAVED.name: saved_s, catalog.TENANT_COST_SAVED.name: money}
    return {name: values for name, values in found.items() if values}


_Put = Callable[..., None]
_BREAKER = {"closed": 0, "half_open": 1, "open": 2}


def _classes(put: _Put, sources: Sources, closed: ClosedLabels, now: float) -> None:
    """What speculation has done lately. Of models served here only: other replicas report their own."""
    statistics, live = sources.statistics, sources.statistics.live
    lately: dict[tuple[str, str], list[dict[str, Tally]]] = {}
    for name in statistics.window.names:
        if name[0] in closed.models:
            lately.setdefault(closed.of(*name), []).append(statistics.window.all_arms(name, now, WINDOW_S))
    for labels, arms in lately.items():
        tally = sum_tallies(tally for each in arms for arm, tally in each.items() if arm in JUDGED)
        put(catalog.ACCEPTANCE_RATE, tally.acceptance_rate, *labels)
        put(catalog.SPEEDUP_FACTOR, tally.speedup, *labels)
        _accuracies(put, catalog.HEAD_ACCURACY, tally.accuracies, labels)
        every = sum_tallies(tally for each in arms for tally in each.values())
        put(catalog.CONTROL_DISAGREEMENT, every.control_ratio, *labels)
    memory = statistics.long_memory()
    for name, stats in live.by_class.items():
        if name[0] in closed.models and name[1] in closed.classes:
            remembered = memory.get(name)
            # Until an epoch is closed and folded in, the store has nothing to say.
            accuracies = remembered.accuracies if remembered is not None and remembered.attempts else stats.accuracies
            _accuracies(put, catalog.HEAD_ACCURACY_PRIOR, accuracies, name)
    active: dict[tuple[str, str], float] = {}
    for name, state in live.fallbacks.items():
        if name[0] in closed.models:
            labels = closed.of(*name)
            active[labels] = max(active.get(labels, 0.0), float(state.mode == "fallback"))
    for labels, value in active.items():
        put(catalog.FALLBACK_ACTIVE, value, *labels)


def _accuracies(put: _Put, metric: Metric, accuracies: Sequence[Sequence[float]], labels: tuple[str, str]) -> None:
    for head, ranks in enumerate(accuracies[:MOST_HEADS], start=1):
        for rank, rate in enumerate(ranks[:MOST_RANKS], start=1):
            put(metric, rate, *labels, str(head), str(rank))


def _counts(put: _Put, sources: Sources, closed: ClosedLabels) -> None:
    """This replica's own counts since it started, whosever plan it was."""
    totals: dict[tuple[str, str], DecodeCounters] = {}
    for text, counters in sources.statistics.book.total().items():
        key = StatsKey.decode(text)
        if key is not None and key.of_engine:
            add_counters(totals.setdefault(closed.of(key.model, key.class_name), DecodeCounters()), counters)
    for labels, total in totals.items():
        put(catalog.STEPS, total.steps, *labels)
        put(catalog.DRAFTS, total.medusa_steps, *labels)
        put(catalog.DRAFT_TOKENS, total.drafted_tokens, *labels)
        put(catalog.ACCEPTED_TOKENS, total.accepted_tokens, *labels)
        put(catalog.EMITTED_TOKENS, total.emitted_tokens, *labels)
        put(catalog.VANILLA_TIME, total.vanilla_us / 1e6, *labels)
        put(catalog.DECODE_TIME, total.spent_us / 1e6, *labels)
        if (cost := sources.cost) is not None:
            saved_s = (total.vanilla_us - total.spent_us) / 1e6
            put(catalog.COST_SAVED, cost.of(saved_s), *labels, cost.currency)
    # From zero, so that the first fallback is an increase and not a new series.
    fallbacks = dict.fromkeys(totals, 0)
    for name, count in sources.fallbacks.items():
        labels = closed.of(*name)
        fallbacks[labels] = fallbacks.get(labels, 0) + count
    for labels, count in fallbacks.items():
        put(catalog.FALLBACK_COUNT, count, *labels)


def _engines(put: _Put, decoders: Mapping[str, Decoder], steps: StepWindow) -> None:
    for backend, decoder in decoders.items():
        load, labels = decoder.load(), (decoder.info.name, backend)
        put(catalog.QUEUE_DEPTH, load.waiting, *labels)
        put(catalog.QUEUE_OLDEST_AGE, load.oldest_wait_s, *labels)
        put(catalog.RUNNING_SEQUENCES, load.running, *labels)
        put(catalog.KV_PAGES_USED, load.kv_pages_used, *labels)
        put(catalog.KV_PAGES_LIMIT, load.kv_pages_total, *labels)
        put(catalog.KV_PAGES_CACHED, load.kv_pages_cached, *labels)
        put(catalog.CACHE_EVICTIONS, load.cache_evictions, *labels)
        put(catalog.PREEMPTIONS, load.preemptions, *labels)
        if load.kv_pages_total:
            put(catalog.KV_USE, load.kv_pages_used / load.kv_pages_total, *labels)
        put(catalog.ENGINE_UP, decoder.alive, *labels)
        put(catalog.HEADS_STALE, decoder.info.heads_stale, *labels)
        put(catalog.VANILLA_STEP, steps.vanilla_step_s(backend), *labels)
        put(catalog.VERIFICATION_RATIO, steps.verification_ratio(backend), *labels)
        if isinstance(decoder, OnDevice) and (reading := decoder.device_reading()) is not None:
            of_device = (*labels, decoder.info.device)
            put(catalog.DEVICE_MEMORY_USED, reading.memory_used, *of_device)
            put(catalog.DEVICE_MEMORY_LIMIT, reading.memory_total, *of_device)
            put(catalog.DEVICE_UTILIZATION, reading.utilization, *of_device)
            put(catalog.DEVICE_POWER, reading.power_w, *of_device)
        if isinstance(decoder, OptionalFailures):
            for part, count in decoder.optional_failures().items():
                put(catalog.OPTIONAL_FAILURES, count, *labels, part)


def _file(put: _Put, status: FileStatus, rejected: Metric, info: Metric) -> None:
    put(rejected, status.rejection is not None)
    put(info, 1, status.version)


def _standing(put: _Put, standing: Standing) -> None:
    for each in standing.backends:
        labels = each.model, each.backend
        put(catalog.BACKEND_UP, each.up, *labels)
        put(catalog.PLACES_USED, each.places_used, *labels)
        put(catalog.PLACES_LIMIT, each.places_limit, *labels)
        if each.breaker is not None:
            put(catalog.BREAKER_STATE, _BREAKER[each.breaker], *labels)
        for outcome, count in each.outcomes.items():
            put(catalog.BACKEND_REQUESTS, count, *labels, outcome)
    if standing.keys is not None:
        _file(put, standing.keys, catalog.KEYS_REJECTED, catalog.KEYS_INFO)
    for name, hangs in standing.hangs.items():
        put(catalog.FILE_HANGS, hangs, name)
    for use, seconds in standing.redis_latency_s.items():
        put(catalog.REDIS_LATENCY, seconds, use)
    put(catalog.LIMITS_DECIDED_LOCALLY, standing.decided_locally)
    if standing.build is not None:
        put(catalog.BUILD_INFO, 1, *standing.build, platform.python_version())
    put(catalog.DRAINING, standing.draining)
    put(catalog.DRAIN_ABORTED, standing.drain_aborted)
