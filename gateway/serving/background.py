"""What keeps policy and statistics current beside requests.

Counting, the policy file and the store each have a loop of their own, so that a store that hangs delays neither.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress

from backends.types import CostKeeper, Decoder, PrefillBudgeted
from gateway.serving.events import EventBook
from gateway.serving.fleet_lookup import Find, FleetLookup
from gateway.serving.statistics_store import OpenStore
from policy.background import PatientCall, cancel_and_wait, pause
from policy.config.watched_file import FileWatch
from policy.runtime import PolicyRuntime
from policy.shared.redis_client import RedisTarget, StoreUnavailable
from policy.statistics.aggregate import Statistics
from policy.statistics.store import StatsStore
from policy.statistics.syncing import StoreSync
from telemetry.alerts.manager import Alerting, open_alerting
from telemetry.alerts.readings import steps_lately
from telemetry.request_counts import RequestWindow
from telemetry.snapshot import Figures

logger = logging.getLogger(__name__)

COUNT_EVERY_S = 1.0
POLL_EVERY_S = 1.0
SYNC_EVERY_S = 1.0
SHARE_ALERTS_EVERY_S = 1.0
KEEP_COST_EVERY_S = 300.0
KEEP_COST_PATIENCE_S = 60.0
FLUSH_PATIENCE_S = 3.0
ALERTS_PATIENCE_S = 1.0


class Background:
    """Used from one event loop only. ``on_new_policy`` is called when an edit of the policy file is in force.

    ``find``: the decision that this replica remembers under a name. ``sync`` and ``alerting`` are there from
    :meth:`start` on, ``fleet`` too where there may be other replicas.
    """

    def __init__(
        self,
        policy: PolicyRuntime,
        statistics: Statistics,
        events: EventBook,
        on_new_policy: Callable[[], None],
        find: Find,
        open_store: OpenStore,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        self.file = FileWatch(policy, clock, wall_clock)
        self.sync: StoreSync | None = None
        self.alerting: Alerting | None = None
        self.fleet: FleetLookup | None = None
        self._policy = policy
        self._statistics = statistics
        self._events = events
        self._on_new_policy = on_new_policy
        self._find = find
        self._open_store = open_store
        self._clock, self._wall_clock = clock, wall_clock
        self._keep_costs = PatientCall(self._keep_costs_once, clock=clock, patience_s=KEEP_COST_PATIENCE_S)
        self._store: StatsStore | None = None
        self._running: list[asyncio.Task[None]] = []
        self._decoders: Mapping[str, Decoder] = {}

    @property
    def store_target(self) -> RedisTarget | None:
        """The Redis that was opened by :meth:`start`; None: statistics are in memory."""
        return None if self._store is None else self._store.target

    @property
    def stale_heads(self) -> list[str]:
        """The models of this process whose heads were trained for another backbone."""
        return sorted({each.info.name for each in self._decoders.values() if each.info.heads_stale})

    async def start(self, decoders: Mapping[str, Decoder]) -> None:
        """Open the store and begin to count, to watch and to sync."""
        self._decoders = decoders
        self._store = await self._open_store()
        self.sync = StoreSync(self._statistics, self._store)
        self.alerting = open_alerting(
            self._store.shared_text("alerts"),
            self._statistics.replica,
            self._clock,
            self._wall_clock,
            self._events.note_alert,
        )
        if self.sync.health.remote:
            self.fleet = FleetLookup(self._store.shared_text("lookups"), self._statistics.replica, self._find)
        loops = (
            (self.count, COUNT_EVERY_S),
            (self.poll_policy, POLL_EVERY_S),
            (self.sync_once, SYNC_EVERY_S),
            (self.share_alerts, SHARE_ALERTS_EVERY_S),
            (self.answer_others, SHARE_ALERTS_EVERY_S),
            (self.keep_costs, KEEP_COST_EVERY_S),
        )
        self._running = [asyncio.create_task(self._every(seconds, work)) for work, seconds in loops]

    async def stop(self) -> None:
        """Count and write one last time, within moments. Idempotent."""
        running, self._running = self._running, []
        await cancel_and_wait(*running)
        store, self._store = self._store, None
        if store is None or self.sync is None:
            return
        await self.count()
        with suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_PATIENCE_S):
                await self.keep_costs()
        if self.alerting is not None:
            await self.alerting.stop(ALERTS_PATIENCE_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_PATIENCE_S):
                await self.sync.flush()
        await store.close()

    async def count(self) -> None:
        """Take the engines' counters in and see what follows from them; and tell them what the policy says of
        prompts."""
        now, wall_time = self._clock(), self._wall_clock()
        for decoder in self._decoders.values():
            if isinstance(decoder, PrefillBudgeted):
                decoder.use_prefill(self._policy.spec.prefill)
            self._statistics.add_own(decoder.take_counters(), now, wall_time)
        source = "fleet" if self.sync is not None and self.sync.health.ok else "local"
        held = self.alerting.held(self._statistics.window.names) if self.alerting is not None else {}
        for name, transition in self._statistics.refresh(self._policy.spec, now, source, held):
            self._events.note_transition(name, transition)

    def evaluate_alerts(self, figures: Figures, requests: RequestWindow | None = None) -> None:
        """Look at figures that were just taken, and at how ``requests`` went; what follows is shared and delivered by
        the loop for that."""
        if self.alerting is not None:
            lately = steps_lately(self._statistics, self._clock())
            self.alerting.evaluate(self._policy.spec.alerts, figures, lately, requests)

    async def share_alerts(self) -> None:
        assert self.alerting is not None
        await self.alerting.share(self._policy.spec)

    async def answer_others(self) -> None:
        if self.fleet is not None:
            # While the store is away, nobody can have asked.
            with suppress(StoreUnavailable):
                await self.fleet.answer()

    async def poll_policy(self) -> None:
        outcome = await self.file.poll()
        if outcome == "accepted":
            self._on_new_policy()
        if outcome in ("accepted", "rejected"):
            self._events.note_policy(self._policy.status)

    async def sync_once(self) -> None:
        assert self.sync is not None
        was = self.sync.health.ok
        await self.sync.sync(self._clock(), self._wall_clock())
        self._events.note_store(self.sync.health, was)

    async def keep_costs(self) -> None:
        """Have engines store what they have learnt of their steps' cost, for the next start."""
        if any(isinstance(decoder, CostKeeper) for decoder in self._decoders.values()):
            # In a thread: it waits for a file, and for Redis.
            await self._keep_costs()

    def _keep_costs_once(self) -> None:
        for decoder in self._decoders.values():
            if isinstance(decoder, CostKeeper):
                decoder.keep_cost()

    async def _every(self, seconds: float, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await work()
            except Exception:
                # One bad round must not end the loop: the next may well succeed, and requests go on meanwhile.
                logger.exception("%s failed; it is tried again", getattr(work, "__name__", "background work"))
            await pause(seconds)
