"""What was decided and what happened, kept for whoever asks: bounded, newest last, in memory."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

from policy.decision import Decision
from policy.spec import RequestFacts

KEPT_DECISIONS = 4096
KEPT_EVENTS = 512

EventKind = Literal[
    "fallback",
    "resumed",
    "policy_accepted",
    "policy_rejected",
    "store_down",
    "store_up",
    "backend_down",
    "backend_up",
    "alert_pending",
    "alert_cancelled",
    "alert_firing",
    "alert_resolved",
]


@dataclass(slots=True)
class DecisionRecord:
    """``outcome``: the decoding report of the answer, once there is one. ``deadline``: seconds, and who set it."""

    request_id: str
    facts: RequestFacts
    decision: Decision
    at: float
    plan: dict[str, Any]
    outcome: Any = None
    backend: str = ""
    deadline: dict[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        facts = {name: getattr(self.facts, name) for name in RequestFacts.__slots__ if name != "request_id"}
        return {
            "request_id": self.request_id,
            "at": self.at,
            "facts": facts,
            "decision": self.decision.as_dict(),
            "backend": self.backend,
            "plan": self.plan,
            "deadline": self.deadline,
            "outcome": self.outcome,
        }

    def summary(self) -> dict[str, Any]:
        """A line of a list: what was asked of whom, and what came of it; the whole is :meth:`as_dict`."""
        return {
            "request_id": self.request_id,
            "at": self.at,
            "model": self.facts.model,
            "class": self.facts.class_name,
            "tenant": self.facts.tenant,
            "prompt_tokens": self.facts.prompt_tokens,
            "backend": self.backend,
            "method": self.decision.method,
            "arm": self.decision.arm,
            "rule": self.plan.get("rule", self.decision.rule),
            "policy_version": self.decision.policy_version,
            "outcome": self.outcome,
        }


class DecisionLog:
    """The last decisions, by response id and by the ``x-request-id`` of the HTTP request."""

    def __init__(self, most: int = KEPT_DECISIONS) -> None:
        self._records: OrderedDict[str, DecisionRecord] = OrderedDict()
        self._aliases: OrderedDict[str, str] = OrderedDict()
        self._most = most

    def add(self, record: DecisionRecord, alias: str | None = None) -> None:
        self._records[record.request_id] = record
        if alias is not None:
            self._aliases[alias] = record.request_id
            self._aliases.move_to_end(alias)
        while len(self._records) > self._most:
            self._records.popitem(last=False)
        while len(self._aliases) > self._most:
            self._aliases.popitem(last=False)

    def finish(self, request_id: str, outcome: Any) -> None:
        if (record := self._records.get(request_id)) is not None:
            record.outcome = outcome

    def latest(self, most: int) -> list[DecisionRecord]:
        """The last ones, newest first."""
        return list(islice(reversed(self._records.values()), most))

    def find(self, name: str) -> DecisionRecord | None:
        return self._records.get(name) or self._records.get(self._aliases.get(name, ""))


@dataclass(frozen=True, slots=True)
class Event:
    """``at``: wall clock. ``values``: the numbers behind it."""

    kind: EventKind
    at: float
    message: str
    model: str | None = None
    class_name: str | None = None
    values: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in Event.__slots__}


def new_event_log() -> deque[Event]:
    return deque(maxlen=KEPT_EVENTS)
