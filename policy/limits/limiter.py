"""Who may use how much, asked once per request: in Redis for the whole fleet, in this process while Redis is away.

Orders of all requests leave through one outbox, in order, as many in a round trip as have gathered; so a request's
settlement never overtakes its admission. An admission that is not answered within :data:`TIMEOUT_S` is decided here,
and so are those that follow, until Redis answers in time again. A replica then grants at most a bucket of its own; what
was used of a budget is told to Redis when it is back.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from policy.background import cancel_and_wait, cancelled
from policy.limits.arithmetic import (
    Buckets,
    KeyLimits,
    Refusal,
    Since,
    Standing,
    admit,
    give_back,
    lower,
    next_request_s,
    refilled,
    refusal,
)
from policy.limits.budgets import Budgets, Windows, higher, spend, unspend
from policy.limits.budgets import at as budgets_at
from policy.limits.redis_buckets import LEASE_MS, LimitsUnavailable, Order, RedisLimits
from policy.shared.redis_client import RedisTarget

logger = logging.getLogger("gateway.limits")

TIMEOUT_S = 0.25
RETRY_S = 1.0
RENEW_S = LEASE_MS / 1000 / 4
LOOK_EVERY_S = 60.0
FLUSH_PATIENCE_S = 2.0
_SLICES = 5
"""A timeout is waited for in slices: an event loop that is held up once doesn't take that for Redis's silence."""
_MOST_OWED = 100_000


class LocalLimits:
    """The same limits for this process alone. ``clock`` (monotonic) and ``wall_clock`` in seconds."""

    def __init__(self, clock: Callable[[], float], wall_clock: Callable[[], float] = time.time) -> None:
        self._clock, self._wall_clock = clock, wall_clock
        self._buckets: dict[str, Buckets] = {}
        self._budgets: dict[str, Budgets] = {}

    def admit(self, key: str, limits: KeyLimits, tokens: int, streams: int) -> Standing:
        buckets = refilled(self._buckets.get(key), limits, self._now())
        budgets = self._budgets_of(key, limits)
        self._buckets[key], standing = admit(buckets, limits, tokens, streams, budgets)
        self._budgets[key] = spend(budgets, limits, tokens) if standing.granted else budgets
        return standing

    def give_back(
        self, key: str, limits: KeyLimits, tokens: int, requests: int, since: Since, windows: Windows
    ) -> None:
        # By no limits: those of an old admission are not to be counted by.
        buckets = refilled(self._buckets.get(key), KeyLimits(), self._now())
        self._buckets[key] = give_back(buckets, limits, tokens, requests, since)
        self._budgets[key] = unspend(self._budgets.get(key, Budgets()), limits, tokens, windows)

    def marks(self, key: str) -> tuple[Since, Windows]:
        """For giving back what was taken just now."""
        return self._buckets[key].since, self._budgets[key].windows()

    def note(self, key: str, limits: KeyLimits, standing: Standing) -> None:
        """What Redis says is left. Kept so that no outage, nor the tenth in a row, begins with full buckets."""
        buckets = refilled(self._buckets.get(key), limits, self._now())
        self._buckets[key] = lower(buckets, Buckets(standing.requests, standing.tokens, buckets.at_ms))
        self._budgets[key] = higher(self._budgets_of(key, limits), standing.budgets)

    def _budgets_of(self, key: str, limits: KeyLimits) -> Budgets:
        return budgets_at(self._budgets.get(key, Budgets()), limits, int(self._wall_clock() * 1000))

    def _now(self) -> int:
        return int(self._clock() * 1000)


@dataclass(slots=True)
class Grant:
    """An admitted request: its standing, and what it holds until :meth:`settle`."""

    limits: KeyLimits
    standing: Standing
    _settle: Callable[[Grant, int, bool], None] = field(repr=False)
    key: str = ""
    lease: str = ""
    tokens: int = 0
    local: bool = False
    local_since: Since = (0, 0)
    local_windows: Windows = (0, 0)
    _open: bool = True

    def settle(self, used_tokens: int) -> None:
        """The request is over. Synchronous and idempotent, since it is called where nothing can be awaited."""
        self._close(used_tokens, cancelled=False)

    def cancel(self) -> None:
        """The request was not begun: it counts for nothing."""
        self._close(0, cancelled=True)

    def _close(self, used_tokens: int, *, cancelled: bool) -> None:
        if self._open:
            self._open = False
            self._settle(self, used_tokens, cancelled)


@dataclass(slots=True)
class _Letter:
    """An order on its way. ``answer`` is for those who wait for one."""

    order: Order
    answer: asyncio.Future[Standing] | None = None


@dataclass(frozen=True, slots=True)
class LimitsHealth:
    """``shared`` None: no Redis was configured. ``ok`` False: limits hold for each replica by itself."""

    shared: str | None
    ok: bool
    since: float
    error: str | None = None


class Limiter:
    """Used from one event loop only. Without :meth:`start`, limits are those of this process."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        new_id: Callable[[], str] = lambda: uuid.uuid4().hex,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._clock = clock
        self._new_id = new_id
        self._timeout_s = timeout_s
        self._local = LocalLimits(clock, wall_clock)
        self._open: dict[str, set[str]] = {}
        self._closed: dict[str, tuple[float, KeyLimits, Standing]] = {}
        """Keys out of requests: until when, by which limits, and their standing at the time."""
        self._remote: RedisLimits | None = None
        self._outbox: list[_Letter] = []
        self._wake = asyncio.Event()
        self._running: asyncio.Task[None] | None = None
        self.health = LimitsHealth(None, True, clock())
        self.decided_locally = 0
        self.last_s: float | None = None
        """How long the last round with Redis took, if it was answered."""
        self.evicts_by: str | None = None
        """By which policy the server may forget limits, if it may."""

    async def start(self, target: RedisTarget | None) -> None:
        """Share the limits through ``target``; None: there is nothing to share them through."""
        if target is not None:
            self._remote = RedisLimits(target)
            self.health = LimitsHealth(self._remote.describe, True, self._clock())
            self._running = asyncio.create_task(self._deliver())

    async def stop(self) -> None:
        """Settle what is left, within moments. Idempotent."""
        running, self._running = self._running, None
        if running is None or self._remote is None:
            return
        await cancel_and_wait(running)
        remote, self._remote = self._remote, None
        with suppress(TimeoutError, LimitsUnavailable):
            async with asyncio.timeout(FLUSH_PATIENCE_S):
                await remote.run([letter.order for letter in self._outbox if letter.answer is None])
        await remote.close()

    def refused_anyway(self, key: str, limits: KeyLimits) -> tuple[Refusal, Standing] | None:
        """Whether :meth:`admit` could only refuse, whatever the request: its key has just been out of requests. From
        memory, so that a client that keeps asking costs neither tokenising nor Redis."""
        closed = self._closed.get(key)
        if closed is None:
            return None
        until, by, standing = closed
        wait_s = until - self._clock()
        if wait_s <= 0 or by != limits:
            del self._closed[key]
            return None
        return Refusal("requests", wait_s), standing

    async def admit(self, key: str, limits: KeyLimits, tokens: int) -> Grant | tuple[Refusal, Standing]:
        """Admit one request that may use up to ``tokens``; a refused one takes nothing. ``key``: an API key's name.

        Waits for Redis once, for :data:`TIMEOUT_S` at most, and not at all for a key without limits.
        """
        if not limits.any:
            return Grant(limits, Standing(True, None, None, 0), _nothing_to_settle)
        lease = self._new_id()
        standing = await self._ask(Order("admit", key, limits, [lease], tokens, 1))
        local = standing is None
        if standing is None:
            self.decided_locally += self._remote is not None
            standing = self._local.admit(key, limits, tokens, len(self._open.get(key, ())))
        refused = refusal(limits, standing, tokens)
        if refused is not None:
            if wait_s := next_request_s(limits, standing):
                self._closed[key] = self._clock() + wait_s, limits, standing
            return refused, standing
        self._open.setdefault(key, set()).add(lease)
        return Grant(limits, standing, self._settle, key, lease, tokens, local, *self._local.marks(key))

    async def _ask(self, order: Order) -> Standing | None:
        """None: Redis can't be asked, or has not answered. In the second case the order is taken back."""
        if self._remote is None or not self.health.ok:
            return None
        answer: asyncio.Future[Standing] = asyncio.get_running_loop().create_future()
        letter = _Letter(order, answer)
        self._post(letter)
        try:
            for _ in range(_SLICES):
                if not answer.done():
                    await asyncio.wait((answer,), timeout=self._timeout_s / _SLICES)
            if not answer.done():
                raise LimitsUnavailable(f"no answer within {self._timeout_s:g} s")
            standing = answer.result()
        except LimitsUnavailable as error:
            self._take_back(letter)
            self._note_away(str(error))
            return None
        except BaseException:
            self._take_back(letter)
            raise
        self._local.note(order.key, order.limits, standing)
        return standing

    def _take_back(self, letter: _Letter) -> None:
        """Nobody waits for this admission any more. Whether Redis has granted it is not known."""
        if letter.answer is not None and not letter.answer.cancel() and not letter.answer.cancelled():
            letter.answer.exception()  # looked at, so that asyncio does not complain that nobody did
        if letter in self._outbox:
            self._outbox.remove(letter)
            return
        order = letter.order
        self._post(_Letter(Order("settle", order.key, order.limits, order.leases, order.tokens, order.requests)))

    def _settle(self, grant: Grant, used_tokens: int, cancelled: bool) -> None:
        limits = grant.limits
        tokens = grant.tokens - used_tokens if limits.counts_tokens else 0
        requests = int(cancelled)
        self._local.give_back(grant.key, limits, tokens, requests, grant.local_since, grant.local_windows)
        if grant.local:
            # Redis may know of the stream from a renewal, but not of anything that it took.
            tokens = requests = 0
            if self._remote is not None and limits.has_budgets and used_tokens > 0:
                windows = grant.local_windows
                self._post(_Letter(Order("owe", grant.key, limits, [grant.lease], -used_tokens, windows=windows)))
        if cancelled:  # there is a request in the bucket again
            self._closed.pop(grant.key, None)
        leases = self._open.get(grant.key, set())
        if grant.lease in leases:
            leases.discard(grant.lease)
            if not leases:
                del self._open[grant.key]
            if self._remote is not None:
                since, windows = grant.standing.since, grant.standing.budgets.windows()
                order = Order("settle", grant.key, limits, [grant.lease], tokens, requests, since, windows)
                self._post(_Letter(order))

    def _post(self, letter: _Letter) -> None:
        self._outbox.append(letter)
        # What waits through a long outage is bounded; the oldest settlements have lost their meaning by then.
        del self._outbox[:-_MOST_OWED]
        self._wake.set()

    async def _deliver(self) -> None:
        renewed, looked = self._clock(), float("-inf")
        while not cancelled():
            with suppress(TimeoutError):
                async with asyncio.timeout(RETRY_S):
                    await self._wake.wait()
            if not self.health.ok:
                await asyncio.sleep(RETRY_S)
            self._wake.clear()
            letters, self._outbox = self._outbox, []
            if self._clock() - renewed >= RENEW_S or not self.health.ok:
                renewed = self._clock()
                # Last, so that it does not bring back what is settled here.
                renewals = (Order("renew", key, KeyLimits(), sorted(open_)) for key, open_ in self._open.items())
                letters += [_Letter(order) for order in renewals]
            if letters or not self.health.ok:
                await self._carry(letters)
            if self.health.ok and self._clock() - looked >= LOOK_EVERY_S:
                looked = self._clock()
                await self._look()

    async def _look(self) -> None:
        assert self._remote is not None
        before, self.evicts_by = self.evicts_by, await self._remote.evicts_by()
        if self.evicts_by is not None and before is None:
            logger.warning(
                "%s may forget limits of API keys when its memory is full: its maxmemory-policy is %s; choose one "
                "that spares keys without a time to live (volatile-ttl), or noeviction",
                self.health.shared,
                self.evicts_by,
            )

    async def _carry(self, letters: list[_Letter]) -> None:
        assert self._remote is not None
        began = self._clock()
        try:
            answers = await self._remote.run([letter.order for letter in letters])
        except LimitsUnavailable as error:
            self._fail(letters, error)
            self._note_away(str(error))
        except asyncio.CancelledError:
            self._fail(letters, LimitsUnavailable("the gateway stops"))
            raise
        except Exception as error:
            # Whatever it is, the next letters must still be carried.
            logger.exception("limits could not be asked")
            self._fail(letters, LimitsUnavailable(repr(error)))
            self._note_away(repr(error))
        else:
            for letter, standing in zip(letters, answers, strict=True):
                if letter.answer is not None and standing is not None and not letter.answer.done():
                    letter.answer.set_result(standing)
            self.last_s = self._clock() - began
            if not self.health.ok and self.last_s <= self._timeout_s:
                self.health = LimitsHealth(self.health.shared, True, self._clock())
                logger.warning("limits are shared again through %s", self.health.shared)

    def _fail(self, letters: list[_Letter], error: LimitsUnavailable) -> None:
        for letter in letters:
            if letter.answer is not None and not letter.answer.done():
                letter.answer.set_exception(error)
        # A settlement may be repeated: it counts only as long as its lease is there; what is owed counts once.
        self._outbox[:0] = [letter for letter in letters if letter.order.what in ("settle", "owe")]

    def _note_away(self, error: str) -> None:
        if self.health.ok:
            logger.error("limits hold for this replica only, %s is unavailable: %s", self.health.shared, error)
            self.health = LimitsHealth(self.health.shared, False, self._clock(), error)

    def as_dict(self) -> dict[str, Any]:
        """For operators: where limits are kept, and how that is going."""
        health = self.health
        return {
            "shared": health.shared,
            "ok": health.ok,
            "for_s": round(self._clock() - health.since, 3),
            "error": health.error,
            "evicts_by": self.evicts_by,
            "decided_locally": self.decided_locally,
            "open_leases": sum(len(leases) for leases in self._open.values()),
        }


def _nothing_to_settle(grant: Grant, used_tokens: int, cancelled: bool) -> None: ...
