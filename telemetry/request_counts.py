"""What finished requests come to: running counts that are exported, and the last hours of them for alerts.

Both are added to when a request is over and read once a second. Labels are closed, so both are bounded.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from policy.alerts import LATENCY_BOUNDS, PER_TOKEN_BOUNDS
from telemetry import catalog
from telemetry.catalog import MOST_TENANTS, OTHER
from telemetry.request import RequestRecord
from telemetry.snapshot import ClosedLabels, Labels

SNAPSHOT_EVERY_S = 30.0
FROM_ZERO = ("ok", "server_error", "limited")
"""Outcomes that are counted from 0, so that the first one is an increase and not a new series."""
LONGEST_WINDOW_S = 6 * 3600.0
"""Of what alerts may look back on."""


class RequestCounts:
    """Counts since the start, as figures. ``by_tenant``: API keys' names become labels."""

    def __init__(self, *, by_tenant: bool = False) -> None:
        self._by_tenant = by_tenant
        self._tenants: set[str] = set()
        self._requests: Counter[Labels] = Counter()
        self._prompt_tokens: Counter[Labels] = Counter()
        self._cached_tokens: Counter[Labels] = Counter()
        self._completion_tokens: Counter[Labels] = Counter()
        self._deadline_cuts: Counter[Labels] = Counter()

    def add(self, record: RequestRecord, labels: ClosedLabels) -> None:
        by_class = labels.of(record.model, record.class_name)
        # A backend's name is the operator's; one that a refused request never came to is empty.
        whose = (*by_class, record.backend, self.tenant(record.tenant))
        for outcome in FROM_ZERO:
            self._requests[*whose, outcome] += 0
        self._requests[*whose, record.outcome] += 1
        if record.prompt_tokens and record.submitted_at is not None:
            self._prompt_tokens[whose] += record.prompt_tokens
            self._cached_tokens[whose] += record.cached_tokens
            self._completion_tokens[whose] += record.output_tokens
        if record.deadline_cut:
            self._deadline_cuts[by_class] += 1

    def figures(self) -> Mapping[str, Mapping[Labels, float]]:
        """By the metric's name."""
        counted = {
            catalog.REQUESTS: self._requests,
            catalog.PROMPT_TOKENS: self._prompt_tokens,
            catalog.CACHED_TOKENS: self._cached_tokens,
            catalog.COMPLETION_TOKENS: self._completion_tokens,
            catalog.DEADLINE_CUTS: self._deadline_cuts,
        }
        return {metric.name: dict(counts) for metric, counts in counted.items() if counts}

    def by_tenant(self, sums: Iterable[tuple[tuple[str, str], float]], labels: ClosedLabels) -> dict[Labels, float]:
        """Sums by (class, tenant), with the values of labels that other figures have; none where tenants have none."""
        found: dict[Labels, float] = {}
        for (class_name, tenant), value in sums if self._by_tenant else ():
            whose = labels.of("", class_name)[1], self.tenant(tenant)
            found[whose] = found.get(whose, 0.0) + value
        return found

    def tenant(self, name: str) -> str:
        """The value of ``tenant`` for a key's name."""
        if not self._by_tenant or not name:
            return ""
        if name in self._tenants or len(self._tenants) < MOST_TENANTS:
            self._tenants.add(name)
            return name
        return OTHER


@dataclass(slots=True)
class Totals:
    """Sums over finished requests. ``first_token``, ``per_token``: how many values lay in each bucket of
    :data:`LATENCY_BOUNDS` and :data:`PER_TOKEN_BOUNDS`, the last above all of them."""

    outcomes: Counter[str] = field(default_factory=Counter)
    first_token: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BOUNDS) + 1))
    per_token: list[int] = field(default_factory=lambda: [0] * (len(PER_TOKEN_BOUNDS) + 1))

    def copy(self) -> Totals:
        return Totals(Counter(self.outcomes), list(self.first_token), list(self.per_token))

    def since(self, before: Totals) -> Totals:
        return Totals(
            Counter({name: count - before.outcomes[name] for name, count in self.outcomes.items()}),
            [now - then for now, then in zip(self.first_token, before.first_token, strict=True)],
            [now - then for now, then in zip(self.per_token, before.per_token, strict=True)],
        )

    @property
    def judged(self) -> int:
        """Answers that went well, or ill by our own doing."""
        return self.outcomes["ok"] + self.outcomes["server_error"]


class RequestWindow:
    """Totals by (model, class), and of all under ("", ""), with what they were at times before.

    :meth:`tick` is called about once a second; times must not go back.
    """

    def __init__(self) -> None:
        self._now: dict[tuple[str, str], Totals] = {}
        self._before: dict[tuple[str, str], deque[tuple[float, Totals]]] = {}
        self._ticked = float("-inf")

    def add(self, record: RequestRecord, labels: ClosedLabels) -> None:
        for subject in (labels.of(record.model, record.class_name), ("", "")):
            totals = self._now.setdefault(subject, Totals())
            totals.outcomes[record.outcome] += 1
            if record.first_token_at is not None:
                totals.first_token[bisect_left(LATENCY_BOUNDS, record.first_token_at - record.arrived)] += 1
            for seconds in per_token_times(record):
                totals.per_token[bisect_left(PER_TOKEN_BOUNDS, seconds)] += 1

    def tick(self, now: float) -> None:
        """Remember how things stand, every :data:`SNAPSHOT_EVERY_S`."""
        if now - self._ticked < SNAPSHOT_EVERY_S:
            return
        for subject, totals in self._now.items():
            kept = self._before.setdefault(subject, deque([(self._ticked, Totals())]))
            kept.append((now, totals.copy()))
            # The one that is just too old is where the longest window begins.
            while len(kept) > 1 and kept[1][0] <= now - LONGEST_WINDOW_S:
                kept.popleft()
        self._ticked = now

    @property
    def subjects(self) -> list[tuple[str, str]]:
        """Models and classes that there were requests of."""
        return [subject for subject in self._now if subject != ("", "")]

    def lately(self, subject: tuple[str, str], window_s: float, now: float) -> Totals:
        """What came within about ``window_s`` of now: up to one snapshot more."""
        totals = self._now.get(subject)
        if totals is None:
            return Totals()
        before = Totals()
        for at, then in reversed(self._before.get(subject, ())):
            before = then
            if at <= now - window_s:
                break
        else:
            before = Totals()
        return totals.since(before)


def per_token_times(record: RequestRecord) -> list[float]:
    """Seconds for each token after the first, one value for each sequence that an engine here has finished."""
    return [
        (stats.finished_at - stats.first_token_at) / (stats.emitted_tokens - 1)
        for stats in record.sequences
        if stats.first_token_at is not None and stats.finished_at is not None and stats.emitted_tokens >= 2
    ]


def quantile(share: float, counts: Sequence[int], bounds: Sequence[float]) -> float | None:
    """As Prometheus' ``histogram_quantile`` has it: linear within a bucket, and the last bound for what is above all.

    None without values.
    """
    total = sum(counts)
    if total == 0:
        return None
    rank, below, low = share * total, 0, 0.0
    for count, bound in zip(counts, bounds, strict=False):
        if below + count >= rank and count:
            return low + (bound - low) * (rank - below) / count
        below, low = below + count, bound
    return bounds[-1]


def slower_than(limit: float, counts: Sequence[int], bounds: Sequence[float]) -> int:
    """How many values were above ``limit``, which is one of ``bounds``."""
    return sum(counts[bounds.index(limit) + 1 :])
