"""The shell around the policy: what keeps it current in the background, and the one call a request makes of it.

A request reads two things that are replaced as a whole, the policy and the statistics; it waits for nothing and nobody.
Counting, the policy file and the store each have a loop of their own, so that a store that hangs delays neither.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from platformdirs import user_state_dir

from backends.types import CostKeeper, Decoder
from policy.background import PatientCall, cancel_and_wait, pause
from policy.config.watched_file import FileWatch
from policy.decision import Decision, decide
from policy.fallback import Transition
from policy.records import DecisionLog, DecisionRecord, Event, EventKind, new_event_log
from policy.runtime import PolicyRuntime
from policy.shared.embedded_valkey import EmbeddedServer, EmbeddedUnavailable
from policy.shared.redis_client import RedisTarget, parse_redis_url
from policy.spec import BUILT_IN_CLASSES, RequestFacts
from policy.stabiliser import Held, HeldKey, stabilise
from policy.statistics.aggregate import Statistics
from policy.statistics.counters import StatsKey
from policy.statistics.store import EmbeddedStore, MemoryStore, RedisStore, StatsStore
from policy.statistics.syncing import StoreSync
from telemetry.alerts.local_states import Happening
from telemetry.alerts.manager import Alerting, open_alerting
from telemetry.alerts.readings import steps_lately
from telemetry.alerts.state_machine import Change
from telemetry.snapshot import Figures

logger = logging.getLogger("gateway.serving.controller")

COUNT_EVERY_S = 1.0
POLL_EVERY_S = 1.0
SYNC_EVERY_S = 1.0
SHARE_ALERTS_EVERY_S = 1.0
KEEP_COST_EVERY_S = 300.0
KEEP_COST_PATIENCE_S = 60.0
FLUSH_PATIENCE_S = 3.0
ALERTS_PATIENCE_S = 1.0
PROBE_EVERY_S = 5.0
"""A class in fallback is probed at least this often, if there is any traffic, however small its share of probes."""
MOST_HELD = 4096
MOST_SKEW_S = 10.0

Classify = Callable[[Sequence[Mapping[str, Any]] | str], str]
OpenStore = Callable[[], Awaitable[StatsStore]]


async def memory_store() -> StatsStore:
    return MemoryStore()


def store_opener(url: str | None, folder: Path | None = None) -> OpenStore:
    """What opens the store that an operator named: a Redis URL, "memory", or None for an embedded server.

    Raises ValueError for a URL that can't be used. ``folder`` is where the embedded server keeps its data.
    """
    if url == "memory":
        return memory_store
    if url is not None:
        target = parse_redis_url(url)

        async def redis_store() -> StatsStore:
            return RedisStore(target)

        return redis_store

    async def embedded_store() -> StatsStore:
        server = EmbeddedServer(folder or Path(user_state_dir("medusa-gateway")) / "valkey")
        try:
            # In a thread: it waits for a process to start, or for a stale one to end.
            target = await asyncio.to_thread(server.start)
        except EmbeddedUnavailable as error:
            logger.warning("statistics are kept in memory only: %s", error)
            return MemoryStore(because=str(error))
        return EmbeddedStore(server, target)

    return embedded_store


class Controller:
    """Used from one event loop only. ``classify`` names the class of a prompt; without it, prompts are unclassified.

    ``listeners`` are called with every event, from the loop that found it; they must not block.
    """

    def __init__(
        self,
        policy: PolicyRuntime,
        *,
        classify: Classify | None = None,
        open_store: OpenStore = memory_store,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        replica: str | None = None,
    ) -> None:
        self.policy = policy
        self.clock = clock
        self.wall_clock = wall_clock
        # Never the same twice: a replica's registers in the store are its own for ever.
        self.statistics = Statistics(replica or uuid.uuid4().hex)
        self.decisions = DecisionLog()
        self.events = new_event_log()
        self.listeners: list[Callable[[Event], None]] = []
        self.fallback_count = 0
        self.fallbacks: Counter[tuple[str, str]] = Counter()
        """How many there were of each (model, class)."""
        self.sync: StoreSync | None = None
        self.alerting: Alerting | None = None
        self._file = FileWatch(policy, clock, wall_clock)
        self._keep_costs = PatientCall(self._keep_costs_once, clock=clock, patience_s=KEEP_COST_PATIENCE_S)
        self._classify = classify
        self._open_store = open_store
        self._store: StatsStore | None = None
        self._held: dict[HeldKey, Held] = {}
        self._probed_at: dict[tuple[str, str], float] = {}
        self._running: list[asyncio.Task[None]] = []
        self._decoders: Mapping[str, Decoder] = {}

    @classmethod
    def plain(cls) -> Controller:
        """The shortest policy: everything on its default, no control group, statistics in memory."""
        return cls(PolicyRuntime.from_text(b"version: 1\n"))

    # What a request asks.

    def class_of(self, prompt: Sequence[Mapping[str, Any]] | str | None) -> str:
        """The class of chat messages or of a text; token ids (None) can't be classified."""
        if prompt is None or self._classify is None:
            return "unclassified"
        return self._classify(prompt)

    @property
    def known_classes(self) -> list[str]:
        return sorted({*BUILT_IN_CLASSES, *self.policy.spec.classes})

    def decide(self, facts: RequestFacts, *, dry: bool = False) -> Decision:
        """The stabilised decision. ``dry``: only asked, so nothing is remembered of it."""
        now, name = self.clock(), (facts.model, facts.class_name)
        spec, stats = self.policy.spec, self.statistics.live
        state = stats.fallbacks.get(name)
        in_fallback = state is not None and state.mode == "fallback"
        due = (
            in_fallback
            and spec.of_class(facts.class_name).fallback.probe > 0
            and now - self._probed_at.get(name, float("-inf")) >= PROBE_EVERY_S
        )
        decision = decide(spec, stats, facts, now, probe_due=due)
        key = facts.model, facts.class_name, decision.bucket, decision.rule
        held, decision = stabilise(decision, self._held.get(key), now)
        if not dry:
            if held is not None:
                # Last again, so that what has not been asked for longest makes room.
                self._held.pop(key, None)
                self._held[key] = held
                if len(self._held) > MOST_HELD:
                    del self._held[next(iter(self._held))]
            if in_fallback and decision.method == "medusa" and decision.arm == "policy":
                self._probed_at[name] = now
        return decision

    def stats_key(self, facts: RequestFacts, bucket: str, arm: str) -> str:
        return StatsKey(facts.model, facts.class_name, bucket, arm).encode()

    @property
    def store_target(self) -> RedisTarget | None:
        """The Redis that was opened by :meth:`start`; None: statistics are in memory."""
        return None if self._store is None else self._store.target

    def record(self, record: DecisionRecord, http_request_id: str | None = None) -> None:
        self.decisions.add(record, http_request_id)

    def note(self, kind: EventKind, message: str, model: str, values: dict[str, Any]) -> None:
        """Keep an event that something else found, and tell the listeners."""
        self._emit(kind, message, model, values=values)

    # What goes on in the background.

    async def start(self, decoders: Mapping[str, Decoder]) -> None:
        """Open the store and begin to count, to watch and to sync."""
        self._decoders = decoders
        self._store = await self._open_store()
        self.sync = StoreSync(self.statistics, self._store)
        self.alerting = open_alerting(
            self._store.shared_text("alerts"), self.statistics.replica, self.clock, self.wall_clock, self._on_alert
        )
        loops = (
            (self.count, COUNT_EVERY_S),
            (self.poll_policy, POLL_EVERY_S),
            (self.sync_once, SYNC_EVERY_S),
            (self.share_alerts, SHARE_ALERTS_EVERY_S),
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
        """Take the engines' counters in and see what follows from them."""
        now, wall_time = self.clock(), self.wall_clock()
        for decoder in self._decoders.values():
            self.statistics.add_own(decoder.take_counters(), now, wall_time)
        source = "fleet" if self.sync is not None and self.sync.health.ok else "local"
        held = self.alerting.held(self.statistics.window.names) if self.alerting is not None else {}
        for name, transition in self.statistics.refresh(self.policy.spec, now, source, held):
            self._note_transition(name, transition)

    def evaluate_alerts(self, figures: Figures) -> None:
        """Look at figures that were just taken; what follows is shared and delivered by the loop for that."""
        if self.alerting is not None:
            lately = steps_lately(self.statistics, self.clock())
            self.alerting.evaluate(self.policy.spec.alerts, figures, lately)

    async def share_alerts(self) -> None:
        assert self.alerting is not None
        await self.alerting.share(self.policy.spec)

    async def poll_policy(self) -> None:
        outcome = await self._file.poll()
        status = self.policy.status
        if outcome == "accepted":
            # Held shapes belong to a version of the policy, and to rules of it.
            self._held.clear()
            logger.warning("policy %s is in force, from %s", status.version, status.file)
            self._emit("policy_accepted", f"policy {status.version} is in force")
        elif outcome == "rejected" and status.rejection is not None:
            problems = status.rejection.problems
            logger.error("policy refused, %s stays in force:\n%s", status.version, "\n".join(problems))
            self._emit("policy_rejected", problems[0], values={"problems": list(problems)})

    async def sync_once(self) -> None:
        assert self.sync is not None
        was = self.sync.health.ok
        ok = await self.sync.sync(self.clock(), self.wall_clock())
        if ok and was is False:
            logger.warning("the statistics store answers again: %s", self.sync.health.store)
            self._emit("store_up", f"{self.sync.health.store} answers again")
        elif not ok and was is not False:
            error = self.sync.health.error
            logger.error("the statistics store is unavailable, decisions are from local statistics: %s", error)
            self._emit("store_down", f"{self.sync.health.store}: {error}")

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

    # What people ask.

    def health(self) -> dict[str, Any]:
        """Whether decisions are made from what they should be made from. Never a reason to restart a gateway."""
        status = self.policy.status
        sync = self.sync
        store = None if sync is None else sync.health
        return {
            "status": "ok" if store is not None and store.ok and not self.problems() else "degraded",
            "policy": "rejected edit" if status.rejection is not None else "ok",
            "store": None
            if store is None
            else {
                "name": store.store,
                "ok": store.ok,
                "durable": store.durable,
                "for_s": round(self.clock() - store.since, 3),
                "failures": store.failures,
                "error": store.error,
            },
            "heads_stale": self.stale_heads,
            "classifier": self._classify is not None,
            "replica": self.statistics.replica,
        }

    def _on_alert(self, happening: Happening, line: str) -> None:
        model, class_name = happening.subject
        values = {"alert": happening.rule.name, "severity": happening.rule.severity, "value": happening.value}
        kinds: dict[Change, EventKind] = {
            "pending": "alert_pending",
            "cancelled": "alert_cancelled",
            "firing": "alert_firing",
            "resolved": "alert_resolved",
        }
        self._emit(kinds[happening.change], line, model or None, class_name or None, values)

    @property
    def stale_heads(self) -> list[str]:
        """The models of this process whose heads were trained for another backbone."""
        return sorted({each.info.name for each in self._decoders.values() if each.info.heads_stale})

    def problems(self) -> list[str]:
        """What of :meth:`health` is not as it should be, in words that anybody may read: no files, no addresses."""
        found = []
        if self.policy.status.rejection is not None:
            found.append("the policy file's last edit was refused; the policy before it is in force")
        if (problem := self._file.problem("the policy file")) is not None:
            found.append(problem)
        if self.sync is not None and self.sync.health.ok is False:
            found.append("the statistics store is unavailable; decisions are from this replica's own statistics")
        if self.alerting is not None and self.sync is not None and self.sync.health.remote:
            ahead_s = self.alerting.board.ahead_s
            if abs(ahead_s) >= MOST_SKEW_S:
                way = "behind" if ahead_s > 0 else "ahead of"
                found.append(
                    f"this machine's clock is {abs(ahead_s):.0f} s {way} that of the statistics store; replicas whose "
                    "clocks differ don't see each other's statistics"
                )
        found += [f"the heads of {name} were trained for another backbone" for name in self.stale_heads]
        return found

    def _note_transition(self, name: tuple[str, str], transition: Transition) -> None:
        model, class_name = name
        speedup = None if transition.speedup is None else round(transition.speedup, 4)
        values = {"speedup": speedup, "steps": round(transition.steps)}
        if transition.to == "fallback":
            self.fallback_count += 1
            self.fallbacks[name] += 1
            logger.warning("%s/%s falls back to vanilla: %s", model, class_name, transition.reason)
            self._emit("fallback", transition.reason, model, class_name, values)
            return
        logger.warning("%s/%s speculates again: %s", model, class_name, transition.reason)
        self._emit("resumed", transition.reason, model, class_name, values)

    def _emit(
        self,
        kind: EventKind,
        message: str,
        model: str | None = None,
        class_name: str | None = None,
        values: dict[str, Any] | None = None,
    ) -> None:
        event = Event(kind, self.wall_clock(), message, model, class_name, values or {})
        self.events.append(event)
        for listener in self.listeners:
            listener(event)
