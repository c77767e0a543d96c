"""One alert's way from inactive over pending and firing to resolved. Pure: values and time come in."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from policy.alerts import AlertRule

FLAP_WINDOW_S = 1800.0
LONGEST_KEEP_S = 900.0
"""Flap damping: every time an alert fires again within the window, it must be clear for twice as long before it counts
as resolved, up to this."""

ADOPTED_PATIENCE_S = 120.0
"""How long a replica that takes over an alert waits for a first measurement of its own before it counts as clear."""

Phase = Literal["inactive", "pending", "firing"]
Change = Literal["pending", "cancelled", "firing", "resolved"]


@dataclass(frozen=True, slots=True)
class AlertState:
    """``since``: when the phase began. ``value``: the figure as last known. ``clear_since``: since when the condition
    of a firing alert has not held; None while it does. ``fired``: when it began to fire, each time within the flap
    window. ``unseen_until``: until when a value is waited for, of an alert that was taken over."""

    phase: Phase = "inactive"
    since: float = 0.0
    value: float | None = None
    clear_since: float | None = None
    fired: tuple[float, ...] = ()
    unseen_until: float | None = None

    def keep_s(self, rule: AlertRule) -> float:
        """For how long the condition must not hold before the alert is resolved."""
        doublings = min(max(len(self.fired) - 1, 0), 32)
        return max(min(rule.keep_s * 2.0**doublings, LONGEST_KEEP_S), rule.keep_s)


def advance(state: AlertState, rule: AlertRule, value: float | None, now: float) -> tuple[AlertState, Change | None]:
    """The state at ``now``, which must not go back, and what changed.

    No value (no traffic, say) is as if the condition did not hold: an alert is about something measured. It keeps the
    last value that was.
    """
    holds = value is not None and rule.holds(value)
    if value is not None:
        state = replace(state, value=value, unseen_until=None)
    if state.phase == "firing":
        return _while_firing(state, rule, holds, now)
    if not holds:
        if state.phase == "pending":
            return replace(state, phase="inactive", since=now), "cancelled"
        return state, None
    since = state.since if state.phase == "pending" else now
    if now - since >= rule.for_s:
        fired = (*(at for at in state.fired if now - at <= FLAP_WINDOW_S), now)
        return replace(state, phase="firing", since=now, clear_since=None, fired=fired), "firing"
    if state.phase == "pending":
        return state, None
    return replace(state, phase="pending", since=now), "pending"


def _while_firing(state: AlertState, rule: AlertRule, holds: bool, now: float) -> tuple[AlertState, Change | None]:
    if holds:
        return replace(state, clear_since=None), None
    if state.unseen_until is not None and now < state.unseen_until:
        return state, None
    clear_since = now if state.clear_since is None else state.clear_since
    if now - clear_since >= state.keep_s(rule):
        return replace(state, phase="inactive", since=now, clear_since=None), "resolved"
    return replace(state, clear_since=clear_since), None


def adopted(now: float) -> AlertState:
    """Firing, because a replica that is gone left it so: it is resolved only when this one finds it clear for long
    enough, not by the other's death."""
    return AlertState(phase="firing", since=now, fired=(now,), unseen_until=now + ADOPTED_PATIENCE_S)
