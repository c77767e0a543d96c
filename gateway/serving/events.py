"""What happened on this replica, as ``/admin/stats`` lists it: kept, counted and logged."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

from policy.config.watched_file import FileStatus
from policy.fallback import Transition
from policy.records import Event, EventKind, new_event_log
from policy.statistics.syncing import StoreHealth
from telemetry.alerts.local_states import Happening
from telemetry.alerts.state_machine import Change

logger = logging.getLogger(__name__)


class EventBook:
    """``log``: the last events. ``fallbacks``: how many there were of each (model, class)."""

    def __init__(self, wall_clock: Callable[[], float]) -> None:
        self._wall_clock = wall_clock
        self.log = new_event_log()
        self.fallbacks: Counter[tuple[str, str]] = Counter()

    @property
    def fallback_count(self) -> int:
        return self.fallbacks.total()

    def note(self, kind: EventKind, message: str, model: str, values: dict[str, Any]) -> None:
        """Keep an event that something else found."""
        self._add(kind, message, model, values=values)

    def note_transition(self, name: tuple[str, str], transition: Transition) -> None:
        """(model, class) fell back to vanilla decoding, or resumed."""
        model, class_name = name
        speedup = None if transition.speedup is None else round(transition.speedup, 4)
        values = {"speedup": speedup, "steps": round(transition.steps)}
        if transition.to == "fallback":
            self.fallbacks[name] += 1
            logger.warning("%s/%s falls back to vanilla: %s", model, class_name, transition.reason)
            self._add("fallback", transition.reason, model, class_name, values)
            return
        logger.warning("%s/%s speculates again: %s", model, class_name, transition.reason)
        self._add("resumed", transition.reason, model, class_name, values)

    def note_policy(self, status: FileStatus) -> None:
        """The policy file changed: it was accepted, or refused."""
        if status.rejection is None:
            logger.warning("policy %s is in force, from %s", status.version, status.file)
            self._add("policy_accepted", f"policy {status.version} is in force")
        else:
            problems = status.rejection.problems
            logger.error("policy refused, %s stays in force:\n%s", status.version, "\n".join(problems))
            self._add("policy_rejected", problems[0], values={"problems": list(problems)})

    def note_store(self, health: StoreHealth, was: bool | None) -> None:
        """``was``: how the store did before this time."""
        if health.ok and was is False:
            logger.warning("the statistics store answers again: %s", health.store)
            self._add("store_up", f"{health.store} answers again")
        elif not health.ok and was is not False:
            logger.error("the statistics store is unavailable, decisions are from local statistics: %s", health.error)
            self._add("store_down", f"{health.store}: {health.error}")

    def note_alert(self, happening: Happening, line: str) -> None:
        model, class_name = happening.subject
        values = {"alert": happening.rule.name, "severity": happening.rule.severity, "value": happening.value}
        kinds: dict[Change, EventKind] = {
            "pending": "alert_pending",
            "cancelled": "alert_cancelled",
            "firing": "alert_firing",
            "resolved": "alert_resolved",
        }
        self._add(kinds[happening.change], line, model or None, class_name or None, values)

    def _add(
        self,
        kind: EventKind,
        message: str,
        model: str | None = None,
        class_name: str | None = None,
        values: dict[str, Any] | None = None,
    ) -> None:
        self.log.append(Event(kind, self._wall_clock(), message, model, class_name, values or {}))
