"""When a class of a model gives speculation up, and when it takes it up again. Pure: state and time come in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from policy.spec import FallbackSettings

MIN_STEPS = 100.0
"""Fewer steps are no evidence against speculation."""
MIN_PROBE_STEPS = 50.0
"""Fewer steps of probes are no evidence for it."""
RESUME_MARGIN = 0.02
"""Coming back asks for this much more than staying, so that a class at the limit doesn't go back and forth."""

USEFUL_ACCURACY = 0.1
HOLDS_BACK = 0.03
"""In a full batch the engine stops drafting by itself, and asks the heads now and then whether that is still right. The
speedup then lies just under 1, which says nothing against heads that are right as often as :data:`USEFUL_ACCURACY`:
when the load goes, they pay again at once, which a fallback would not. Nor does it against heads that were hardly asked
yet."""

RECENT_ATTEMPTS = 12.0
"""With so many in the window, the first head's accuracy there counts rather than what is remembered of it: heads of any
use are not wrong that often in a row."""

Mode = Literal["speculating", "fallback"]


class Evidence(Protocol):
    """What was counted over a span of time; :class:`policy.statistics.counters.Tally` is one."""

    @property
    def steps(self) -> float: ...

    @property
    def speedup(self) -> float | None: ...

    @property
    def attempts(self) -> Sequence[float]:
        """By head: how often its guesses could be checked."""
        ...

    @property
    def hits(self) -> Sequence[Sequence[float]]:
        """By head and rank: how often they were right."""
        ...


@dataclass(frozen=True, slots=True)
class FallbackState:
    """``since``: when the mode began. ``speedup``: what was last measured on requests that speculate. ``held``: why the
    class is in fallback whatever its speedup is, if it is."""

    mode: Mode = "speculating"
    since: float = 0.0
    speedup: float | None = None
    steps: float = 0.0
    count: int = 0
    held: str | None = None


@dataclass(frozen=True, slots=True)
class Transition:
    """A change of mode, for the event and the alert record."""

    to: Mode
    speedup: float | None
    steps: float
    reason: str


def evidence_span(state: FallbackState, settings: FallbackSettings, now: float) -> tuple[float, float, float]:
    """(least seconds, least steps, most seconds) of the trailing window that :func:`advance` wants.

    What was measured in the mode before does not count.
    """
    in_mode = max(now - state.since, 0.0)
    if state.mode == "speculating":
        return min(settings.window_s, in_mode), MIN_STEPS, min(10 * settings.window_s, in_mode)
    return min(settings.window_s, in_mode), MIN_PROBE_STEPS, min(max(settings.window_s, settings.hold_s), in_mode)


def advance(
    state: FallbackState,
    settings: FallbackSettings,
    evidence: Evidence,
    now: float,
    accuracy: float | None = None,
    held: str | None = None,
) -> tuple[FallbackState, Transition | None]:
    """``evidence``: counters of the requests that speculate by the policy, over :func:`evidence_span`.

    ``accuracy``: how often any guess of the first head is right; None as long as it was hardly asked. ``held``: why the
    class must be in fallback whatever its speedup is, None if it need not.
    """
    speedup, steps = evidence.speedup, evidence.steps
    state = replace(state, speedup=state.speedup if speedup is None else speedup, steps=steps, held=held)
    if held is not None:
        if state.mode == "fallback":
            return state, None
        return replace(state, mode="fallback", since=now, count=state.count + 1), Transition(
            "fallback", state.speedup, steps, held
        )
    if speedup is None:
        return state, None
    in_mode = now - state.since
    if state.mode == "speculating":
        if in_mode < settings.window_s or steps < MIN_STEPS or speedup >= settings.min_speedup:
            return state, None
        if evidence.attempts and evidence.attempts[0] >= RECENT_ATTEMPTS:
            accuracy = sum(evidence.hits[0]) / evidence.attempts[0]
        useless = accuracy is not None and accuracy < USEFUL_ACCURACY
        if not useless and settings.min_speedup <= 1.0 and speedup >= settings.min_speedup - HOLDS_BACK:
            return state, None
        reason = f"measured speedup {speedup:.3f} is under min_speedup {settings.min_speedup:g} over {steps:.0f} steps"
        to: Mode = "fallback"
    else:
        wanted = settings.min_speedup + RESUME_MARGIN
        if in_mode < settings.hold_s or steps < MIN_PROBE_STEPS or speedup < wanted:
            return state, None
        reason = f"probes measure a speedup of {speedup:.3f}, at least {wanted:g}, over {steps:.0f} steps"
        to = "speculating"
    changed = FallbackState(to, now, speedup, steps, state.count + (to == "fallback"))
    return changed, Transition(to, speedup, steps, reason)
