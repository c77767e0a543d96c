"""What decides how requests are decoded. A request reads two things that are replaced as a whole, the policy and the
statistics; it waits for nothing and nobody. What keeps them current is :class:`gateway.serving.background.Background`.
"""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gateway.serving.arms import ArmControl
from gateway.serving.background import Background
from gateway.serving.events import EventBook
from gateway.serving.statistics_store import OpenStore, memory_store
from gateway.version import package_version
from policy.decision import Decision, decide
from policy.records import DecisionLog, DecisionRecord
from policy.runtime import PolicyRuntime
from policy.savings import TenantSavings
from policy.spec import BUILT_IN_CLASSES, RequestFacts
from policy.stabiliser import Held, HeldKey, stabilise
from policy.statistics.aggregate import Statistics

PROBE_EVERY_S = 5.0
"""A class in fallback is probed at least this often, if there is any traffic, however small its share of probes."""
MOST_HELD = 4096

_system_random = random.SystemRandom()

Classify = Callable[[Sequence[Mapping[str, Any]] | str], str]


class Controller:
    """Used from one event loop only. ``classify`` names the class of a prompt; without it, prompts are unclassified.

    ``arms``: the choice among upstreams that decode differently. ``events``: what happened. ``background``: what goes
    on beside requests.
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
        draw: Callable[[], float] = _system_random.random,
    ) -> None:
        self.policy = policy
        self.clock = clock
        # Never the same twice: a replica's registers in the store are its own for ever.
        self.statistics = Statistics(replica or uuid.uuid4().hex)
        self.decisions = DecisionLog()
        self.savings = TenantSavings()
        self.events = EventBook(wall_clock)
        self.background = Background(
            policy, self.statistics, self.events, self._forget_shapes, self.decision_on, open_store, clock, wall_clock
        )
        self.arms = ArmControl(policy, self.statistics, clock, wall_clock, draw)
        self._classify = classify
        self._held: dict[HeldKey, Held] = {}
        self._probed_at: dict[tuple[str, str], float] = {}

    @classmethod
    def plain(cls) -> Controller:
        """The shortest policy: everything on its default, no control group, statistics in memory."""
        return cls(PolicyRuntime.from_text(b"version: 1\n"))

    @property
    def classifies(self) -> bool:
        return self._classify is not None

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

    def record(self, record: DecisionRecord, http_request_id: str | None = None) -> None:
        self.decisions.add(record, http_request_id)

    def decision_on(self, request_id: str) -> dict[str, Any] | None:
        """What this replica remembers of a request, by the id of its answer or its x-request-id; None: nothing."""
        record = self.decisions.find(request_id)
        if record is None:
            return None
        return {"replica": self.statistics.replica, "version": package_version(), **record.as_dict()}

    def finish(self, answer_id: str, facts: RequestFacts, report: Any, saved_s: float) -> None:
        """What a request's answer came to, and the engine time that speculation saved in it."""
        self.decisions.finish(answer_id, report)
        if saved_s:
            self.savings.add(facts.class_name, facts.tenant, saved_s)

    def _forget_shapes(self) -> None:
        """Held shapes belong to a version of the policy, and to rules of it."""
        self._held.clear()
