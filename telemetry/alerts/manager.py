"""The alerts of one replica in its fleet: evaluated, agreed on, delivered, shown. Run about once a second."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

from policy.alerts import AlertRule
from policy.shared.shared_text import SharedText
from policy.spec import PolicySpec
from telemetry.alerts.delivery import Deliverer, HttpPoster
from telemetry.alerts.fleet import (
    Alarm,
    Board,
    Mute,
    due,
    mute_of,
    orphans,
    owned_by,
    report,
    with_mute,
    with_told,
    without_mute,
)
from telemetry.alerts.local_states import AlertBook, Happening, describe
from telemetry.alerts.payloads import WITHDRAWN
from telemetry.alerts.readings import FallbackHistory, SavingsHistory, StepsLately, Subject, readings
from telemetry.alerts.sharing import Edit, SharedBoard
from telemetry.request_counts import RequestWindow
from telemetry.snapshot import Figures, Labels

logger = logging.getLogger("telemetry.alerts")

_LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "critical": logging.ERROR}
_STATES = {"inactive": 0.0, "pending": 1.0, "firing": 2.0}

Listen = Callable[[Happening, str], None]
"""Called with what happened, and with a line that tells it."""


class Alerting:
    """Used from one event loop. ``on_event`` hears of alerts whose rule has the action "event"."""

    def __init__(
        self,
        board: SharedBoard,
        deliverer: Deliverer,
        replica: str,
        clock: Callable[[], float],
        on_event: Listen = lambda happening, line: None,
    ) -> None:
        self.board = board
        self.deliverer = deliverer
        self.book = AlertBook()
        self._replica = replica
        self._clock = clock
        self._on_event = on_event
        self._fallbacks = FallbackHistory()
        self._savings = SavingsHistory()

    def evaluate(
        self,
        rules: Sequence[AlertRule],
        figures: Figures,
        steps: Mapping[Subject, StepsLately],
        requests: RequestWindow | None = None,
    ) -> None:
        """Advance this replica's alerts. Nothing waits here."""
        now = self._clock()
        fallbacks = self._fallbacks.lately(figures, now)
        engine_times = self._savings.lately(figures, now)

        def read(rule: AlertRule) -> dict[Subject, float]:
            return readings(rule, figures, steps, fallbacks, requests, now, engine_times)

        for happening in self.book.evaluate(rules, read, now):
            self._tell(happening)

    async def share(self, spec: PolicySpec) -> None:
        """Bring the fleet's board up to date, and start to tell receivers what they don't know yet."""
        episode = uuid.uuid4().hex[:12]

        def change(board: Board, now: float) -> Board:
            for alarm in orphans(board, now).values():
                self.book.adopt(alarm, spec.alerts, self._clock())
            return report(board, self._replica, self._alarms(spec), episode, now)

        await self._edit(change)
        repeats = {name: receiver.repeat_s for name, receiver in spec.receivers.items()}
        rules = {rule.name for rule in spec.alerts}
        messages = due(self.board.board, self._replica, repeats, self.board.now)
        told = [replace(each, withdrawn=each.entry.alarm.rule not in rules) for each in messages]
        self.deliverer.start(told, spec.receivers)

    async def _edit(self, change: Edit) -> None:
        """Change the board, and write on it what receivers have taken meanwhile."""
        confirmed = self.deliverer.take_confirmed()
        try:
            await self.board.edit(lambda board, now: change(with_told(board, confirmed, now), now))
        except BaseException:
            # Not written, or not known to be: without it a receiver would be told the same again.
            self.deliverer.confirm(confirmed)
            raise

    def held(self, names: Sequence[Subject]) -> dict[Subject, str]:
        """Of these models and classes, those that a firing alert keeps in fallback, and why."""
        found: dict[Subject, str] = {}
        for each in self.book.firing():
            if "fall_back" not in each.rule.actions:
                continue
            for name in names:
                model, class_name = each.subject
                if model == name[0] and class_name in ("", name[1]) and each.rule.covers(model, class_name):
                    found[name] = f"alert '{each.rule.name}' fires: {describe(each.rule, each.subject)}"
        return found

    async def mute(
        self,
        kind: Literal["silence", "acknowledge"],
        *,
        rule: str,
        model: str,
        class_name: str,
        seconds: float,
        by: str,
        comment: str,
    ) -> Mute:
        """Silence or acknowledge for the whole fleet. Raises :class:`telemetry.alerts.sharing.BoardUnavailable`."""
        now = self.board.now
        mute = Mute(
            id=uuid.uuid4().hex[:12],
            kind=kind,
            rule=rule,
            model=model,
            class_name=class_name,
            by=by,
            comment=comment,
            created_at=now,
            until=now + seconds,
        )
        await self.board.edit_shared(lambda board, _: with_mute(board, mute))
        return mute

    async def unmute(self, mute_id: str) -> bool:
        """End a silence or an acknowledgement; False if there is none of this id."""
        if not any(mute.id == mute_id for mute in self.board.board.mutes):
            return False
        await self.board.edit_shared(lambda board, _: without_mute(board, mute_id))
        return True

    async def stop(self, patience_s: float) -> None:
        """Let what is on its way arrive. What fires stays so for the fleet until this replica's lease runs out."""
        await self.deliverer.stop(patience_s)
        # What arrived meanwhile is not to be told again after a restart.
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self._edit(lambda board, _: board)

    def exported(self) -> dict[Labels, float]:
        """The values of ``medusa_alert_state``."""
        return {
            (each.rule.name, each.rule.severity, *each.subject): _STATES[each.state.phase]
            for each in self.book.tracked.values()
        }

    def status(self, spec: PolicySpec) -> dict[str, Any]:
        """For people: this replica's alerts, the fleet's, and how receivers are."""
        now, wall_now, board = self._clock(), self.board.now, self.board.board
        owned = {entry.episode for entry in owned_by(board, self._replica, wall_now)}
        return {
            "replica": self._replica,
            "shared": self.board.shared,
            "alerts": [
                {
                    "alert": each.rule.name,
                    "model": each.subject[0] or None,
                    "class": each.subject[1] or None,
                    "severity": each.rule.severity,
                    "state": each.state.phase,
                    "for_s": round(now - each.state.since, 3),
                    "metric": each.rule.metric,
                    "value": each.state.value,
                    "below": each.rule.below,
                    "above": each.rule.above,
                    "summary": describe(each.rule, each.subject),
                }
                for each in sorted(self.book.tracked.values(), key=lambda each: each.key)
            ],
            "fleet": [
                {
                    "alert": entry.alarm.rule,
                    "model": entry.alarm.model or None,
                    "class": entry.alarm.class_name or None,
                    "severity": entry.alarm.severity,
                    "state": "firing" if entry.firing else "resolved",
                    "started_at": entry.started_at,
                    "ended_at": entry.ended_at,
                    "replicas": sorted(entry.members),
                    "owner": entry.owner,
                    "owned_here": entry.episode in owned,
                    "silenced": mute_of(board, "silence", entry, wall_now) is not None,
                    "acknowledged": mute_of(board, "acknowledge", entry, wall_now) is not None,
                    "told": {name: {"status": status, "at": at} for name, (status, at) in entry.told.items()},
                }
                for _, entry in sorted(board.entries.items())
            ],
            "silences": [shown(mute) for mute in board.mutes if mute.kind == "silence"],
            "acknowledgements": [shown(mute) for mute in board.mutes if mute.kind == "acknowledge"],
            "receivers": {
                name: {
                    "kind": receiver.kind,
                    "delivered": health.delivered if health else 0,
                    "failures": health.failures if health else 0,
                    "error": health.error if health else None,
                }
                for name, receiver in spec.receivers.items()
                for health in [self.deliverer.health.get(name)]
            },
        }

    def _alarms(self, spec: PolicySpec) -> dict[str, Alarm]:
        alarms: dict[str, Alarm] = {}
        for each in self.book.firing():
            told = (each.rule.notify or tuple(spec.receivers)) if "webhook" in each.rule.actions else ()
            alarms[each.key] = each.alarm(told)
        return alarms

    def _tell(self, happening: Happening) -> None:
        rule, line = happening.rule, _line(happening)
        if "log" in rule.actions:
            level = _LEVELS[rule.severity] if happening.change == "firing" else logging.INFO
            logger.log(logging.WARNING if happening.change == "resolved" else level, "%s", line)
        if "event" in rule.actions:
            self._on_event(happening, line)


def open_alerting(
    text: SharedText, replica: str, clock: Callable[[], float], wall_clock: Callable[[], float], on_event: Listen
) -> Alerting:
    """With HTTP, the process's environment and real chance."""
    poster = HttpPoster()
    deliverer = Deliverer(
        poster, environment=os.environ, clock=clock, wall_clock=wall_clock, jitter=random.SystemRandom().random
    )
    return Alerting(SharedBoard(text, replica, wall_clock), deliverer, replica, clock, on_event)


def _line(happening: Happening) -> str:
    if happening.withdrawn:
        was = "firing" if happening.change == "resolved" else "pending"
        about = describe(happening.rule, happening.subject)
        return f"alert '{happening.rule.name}' withdrawn while {was}: {WITHDRAWN} (it was: {about})"
    value = "" if happening.value is None else f" (now {happening.value:.4g})"
    description = describe(happening.rule, happening.subject)
    return f"alert '{happening.rule.name}' {happening.change}{value}: {description}"


def shown(mute: Mute) -> dict[str, Any]:
    """A silence or an acknowledgement, for people."""
    return {
        "id": mute.id,
        "kind": mute.kind,
        "alert": mute.rule or None,
        "model": mute.model or None,
        "class": mute.class_name or None,
        "by": mute.by,
        "comment": mute.comment,
        "created_at": mute.created_at,
        "until": mute.until,
    }
