"""What an API key may use, as arithmetic: token buckets in integers, and what a refused request is told. Pure.

A bucket holds one minute's worth and refills evenly, so in any ``t`` seconds at most ``limit * (1 + t / 60)`` is used.
A request takes all that it might use when it is admitted, and gets back what it didn't use when it ends. One that used
more than it took (its client named no limit) leaves the bucket in debt.

Limits are edited while requests run. What a request took under one limit is not given back to the bucket of another,
which never held it: from an edit on, a limit is what the new one says.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from policy.limits.budgets import Budgets, Spent, Window, exceeded, renews_in_ms, shown, spend

UNIT = 60_000
"""Levels are counted in this part of a request or token: a bucket of N a minute then gains N a millisecond, exactly."""
MOST_PER_MINUTE = 1_000_000_000
"""Keeps levels within the integers that a double, and so a Lua script, can hold."""
STANDING_HEADERS = tuple(
    f"x-ratelimit-{what}-{kind}"
    for kind in ("requests", "tokens", "tokens-per-day", "tokens-per-month")
    for what in ("limit", "remaining", "reset")
)
STREAM_RETRY_S = 1.0
"""When a stream will end is not known; clients may ask again after this long."""

_UNUSED = Budgets()

Dimension = Literal["requests", "tokens", "streams", "day", "month"]


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """None: no limit of this kind."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_streams: int | None = None
    tokens_per_day: int | None = None
    tokens_per_month: int | None = None

    @property
    def has_budgets(self) -> bool:
        return self.tokens_per_day is not None or self.tokens_per_month is not None

    @property
    def counts_tokens(self) -> bool:
        return self.tokens_per_minute is not None or self.has_budgets

    @property
    def any(self) -> bool:
        return self != _UNLIMITED


_UNLIMITED = KeyLimits()
Since = tuple[int, int]
"""Of requests and of tokens: a mark that changes with every edit of the limit. (The moment of it, in ms.)"""


@dataclass(frozen=True, slots=True)
class Buckets:
    """Levels in :data:`UNIT`, None where there never was a limit. ``at_ms``: the moment for which they hold.

    ``limits``: those that they were last counted by. One that was taken away stays here, for it may come back.
    """

    requests: int | None
    tokens: int | None
    at_ms: int
    limits: KeyLimits = _UNLIMITED
    since: Since = (0, 0)


@dataclass(frozen=True, slots=True)
class Standing:
    """How a request for admission went, and what is left after it. ``streams``: those that run, itself included.

    ``since``, and the windows of ``budgets``, are for giving back what was taken.
    """

    granted: bool
    requests: int | None
    tokens: int | None
    streams: int
    since: Since = (0, 0)
    budgets: Budgets = _UNUSED


@dataclass(frozen=True, slots=True)
class Refusal:
    """``limit``: the first of the limits that are in the way; ``wait_s``: when none should be any more."""

    limit: Dimension
    wait_s: float


def refilled(before: Buckets | None, limits: KeyLimits, now_ms: int) -> Buckets:
    """The buckets at ``now_ms``, which ``limits`` count from then on.

    Full ones for a key (or a limit) that is new; a clock that goes back adds nothing.
    """
    if before is None:
        before = Buckets(None, None, now_ms)
    elapsed, at_ms = max(now_ms - before.at_ms, 0), max(before.at_ms, now_ms)

    def of(level: int | None, was: int | None, now: int | None, since: int) -> tuple[int | None, int | None, int]:
        limit = was if now is None else now
        # Until now the old one was in force.
        level = _level(_level(level, was, elapsed), limit, 0)
        return level, limit, since if limit == was else max(at_ms, since + 1)

    old, (requests_since, tokens_since) = before.limits, before.since
    requests, rpm, requests_since = of(
        before.requests, old.requests_per_minute, limits.requests_per_minute, requests_since
    )
    tokens, tpm, tokens_since = of(before.tokens, old.tokens_per_minute, limits.tokens_per_minute, tokens_since)
    return Buckets(requests, tokens, at_ms, KeyLimits(rpm, tpm), (requests_since, tokens_since))


def admit(
    buckets: Buckets, limits: KeyLimits, tokens: int, streams: int, budgets: Budgets = _UNUSED
) -> tuple[Buckets, Standing]:
    """Take one request and ``tokens`` if all limits allow it, else nothing. ``streams``: those that run already.

    What is used of the budgets then is in the standing; both it and ``budgets`` are of now.
    """
    by_requests, by_tokens = limits.requests_per_minute is not None, limits.tokens_per_minute is not None
    fits = (
        (limits.concurrent_streams is None or streams < limits.concurrent_streams)
        and (not by_requests or buckets.requests is None or buckets.requests >= UNIT)
        and (not by_tokens or buckets.tokens is None or buckets.tokens >= tokens * UNIT)
        and not exceeded(budgets, limits, tokens)
    )
    if fits:
        budgets = spend(budgets, limits, tokens)
        buckets = _changed(buckets, -1 if by_requests else 0, -tokens if by_tokens else 0)
    return buckets, Standing(
        fits,
        buckets.requests if by_requests else None,
        buckets.tokens if by_tokens else None,
        streams + fits,
        buckets.since,
        shown(budgets, limits),
    )


def lower(one: Buckets, other: Buckets) -> Buckets:
    """The lower level of each kind, at the moment of ``one``."""

    def least(a: int | None, b: int | None) -> int | None:
        return b if a is None else a if b is None else min(a, b)

    return replace(one, requests=least(one.requests, other.requests), tokens=least(one.tokens, other.tokens))


def give_back(
    buckets: Buckets, limits: KeyLimits, tokens: int, requests: int = 0, since: Since | None = None
) -> Buckets:
    """Return what was taken and not used; negative for what was used and not taken. A bucket doesn't overflow.

    ``limits`` and ``since``: those of the admission (None: not known). Where the limit has been edited since then, only
    what is owed counts.
    """
    old = buckets.limits
    if limits.requests_per_minute != old.requests_per_minute or (since is not None and since[0] != buckets.since[0]):
        requests = min(requests, 0)
    if limits.tokens_per_minute != old.tokens_per_minute or (since is not None and since[1] != buckets.since[1]):
        tokens = min(tokens, 0)
    if limits.tokens_per_minute is None:  # they were taken from budgets alone
        tokens = 0
    changed = _changed(buckets, requests, tokens)
    return replace(
        changed,
        requests=_level(changed.requests, old.requests_per_minute, 0),
        tokens=_level(changed.tokens, old.tokens_per_minute, 0),
    )


def refusal(limits: KeyLimits, standing: Standing, tokens: int) -> Refusal | None:
    """Why a request for ``tokens`` was refused; None if it was not."""
    if standing.granted:
        return None
    waits: dict[Dimension, float] = {}
    if limits.requests_per_minute is not None and standing.requests is not None and standing.requests < UNIT:
        waits["requests"] = _ms_until(UNIT, standing.requests, limits.requests_per_minute) / 1000
    if limits.tokens_per_minute is not None and standing.tokens is not None and standing.tokens < tokens * UNIT:
        waits["tokens"] = _ms_until(tokens * UNIT, standing.tokens, limits.tokens_per_minute) / 1000
    if limits.concurrent_streams is not None and standing.streams >= limits.concurrent_streams:
        waits["streams"] = STREAM_RETRY_S
    budgets = exceeded(standing.budgets, limits, tokens)
    waits |= budgets
    if not waits:
        return Refusal("requests", STREAM_RETRY_S)
    # A budget says more than a limit that will be there again in a minute.
    first = max(budgets, key=budgets.__getitem__) if budgets else next(iter(waits))
    return Refusal(first, max(waits.values()))


def next_request_s(limits: KeyLimits, standing: Standing) -> float:
    """Seconds in which no request of any size can be let in, for want of one in the bucket of requests."""
    if limits.requests_per_minute is None or standing.requests is None or standing.requests >= UNIT:
        return 0.0
    return _ms_until(UNIT, standing.requests, limits.requests_per_minute) / 1000


def describe(limits: KeyLimits, standing: Standing) -> dict[str, str]:
    """The ``x-ratelimit-*`` headers, named and written as OpenAI does; "reset" is the time until a bucket is full."""
    found: dict[str, str] = {}
    for name, level, limit in (
        ("requests", standing.requests, limits.requests_per_minute),
        ("tokens", standing.tokens, limits.tokens_per_minute),
    ):
        if limit is not None and level is not None:
            found[f"x-ratelimit-limit-{name}"] = str(limit)
            found[f"x-ratelimit-remaining-{name}"] = str(max(level // UNIT, 0))
            found[f"x-ratelimit-reset-{name}"] = duration(_ms_until(limit * UNIT, level, limit))
    budgets = standing.budgets
    by_window: tuple[tuple[Window, Spent, int | None], ...] = (
        ("day", budgets.day, limits.tokens_per_day),
        ("month", budgets.month, limits.tokens_per_month),
    )
    for window, spent, limit in by_window:
        if limit is not None:
            found[f"x-ratelimit-limit-tokens-per-{window}"] = str(limit)
            found[f"x-ratelimit-remaining-tokens-per-{window}"] = str(max(limit - spent.tokens, 0))
            found[f"x-ratelimit-reset-tokens-per-{window}"] = duration(renews_in_ms(budgets, window))
    return found


def duration(ms: int) -> str:
    """As OpenAI's headers have it: ``20ms``, ``1.5s``, ``6m0s``."""
    if ms < 1000:
        return f"{ms}ms"
    minutes, rest = divmod(ms, 60_000)
    seconds = f"{rest / 1000:.3f}".rstrip("0").rstrip(".")
    return f"{minutes}m{seconds}s" if minutes else f"{seconds}s"


def _level(level: int | None, limit: int | None, elapsed_ms: int) -> int | None:
    if limit is None:
        return None
    full = limit * UNIT
    return full if level is None else min(full, level + elapsed_ms * limit)


def _changed(buckets: Buckets, requests: int, tokens: int) -> Buckets:
    return replace(
        buckets,
        requests=None if buckets.requests is None else buckets.requests + requests * UNIT,
        tokens=None if buckets.tokens is None else buckets.tokens + tokens * UNIT,
    )


def _ms_until(wanted: int, level: int, per_ms: int) -> int:
    return max(-((level - wanted) // per_ms), 0)
