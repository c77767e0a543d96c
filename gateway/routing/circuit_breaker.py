"""A circuit breaker (Nygard, "Release It!"): after failures in a row a backend is left alone, then tried carefully.

Pure: a breaker is a value, each event makes the next one, and time comes in as an argument.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

BreakerState = Literal["closed", "open", "half_open"]

_MOST_DOUBLINGS = 5


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    """Opens after ``failures`` in a row, for ``open_s`` (doubled with every probe that fails, up to 32 times); then
    ``probes`` requests at a time may try."""

    failures: int = 5
    open_s: float = 10.0
    probes: int = 1


@dataclass(frozen=True, slots=True)
class Permit:
    """What a request holds from :func:`started` to its end. ``term``: which state gave it."""

    term: int


@dataclass(frozen=True, slots=True)
class Breaker:
    """``term`` counts changes of state: what a request of an earlier state learns is no news any more.

    ``reopened``: how often in a row a probe has failed. ``probing``: permits out in the half-open state.
    """

    settings: BreakerSettings = BreakerSettings()
    tripped: bool = False
    term: int = 0
    failures: int = 0
    opened_at: float = 0.0
    reopened: int = 0
    probing: int = 0

    @property
    def opens_for_s(self) -> float:
        return self.settings.open_s * 2 ** min(self.reopened, _MOST_DOUBLINGS)

    def state(self, now: float) -> BreakerState:
        if not self.tripped:
            return "closed"
        return "half_open" if now - self.opened_at >= self.opens_for_s else "open"

    def retry_after_s(self, now: float) -> float:
        """Seconds until it may be tried again; 0 when it may be now."""
        return max(self.opened_at + self.opens_for_s - now, 0.0) if self.tripped else 0.0

    def allows(self, now: float) -> bool:
        state = self.state(now)
        return state == "closed" or (state == "half_open" and self.probing < self.settings.probes)


def started(breaker: Breaker, now: float) -> tuple[Breaker, Permit]:
    """A request goes out. Only when :meth:`Breaker.allows`."""
    assert breaker.allows(now), "asked in spite of an open breaker"
    if breaker.tripped:
        breaker = replace(breaker, probing=breaker.probing + 1)
    return breaker, Permit(breaker.term)


def answering(breaker: Breaker, permit: Permit) -> Breaker:
    """The first byte came. A probe need not finish before others may go, but the next failure opens again."""
    if permit.term != breaker.term or not breaker.tripped:
        return breaker
    return Breaker(
        breaker.settings,
        term=breaker.term + 1,
        failures=breaker.settings.failures - 1,
        # Kept until an answer is complete: one that always breaks half way is not well.
        reopened=breaker.reopened,
    )


def completed(breaker: Breaker, permit: Permit) -> Breaker:
    """The whole answer came. Also that of a probe, whose own first byte began the present term."""
    if breaker.tripped or breaker.term not in (permit.term, permit.term + 1):
        return breaker
    return replace(breaker, failures=0, reopened=0)


def failed(breaker: Breaker, permit: Permit, now: float) -> Breaker:
    """No answer, or half of one, by the upstream's fault."""
    if breaker.tripped:
        if permit.term != breaker.term:
            return breaker
        return _tripped(breaker, now, breaker.reopened + 1)
    if breaker.term not in (permit.term, permit.term + 1):
        return breaker
    failures = breaker.failures + 1
    if failures < breaker.settings.failures:
        return replace(breaker, failures=failures)
    on_trial = breaker.reopened > 0 or permit.term + 1 == breaker.term
    return _tripped(breaker, now, breaker.reopened + 1 if on_trial else 0)


def abandoned(breaker: Breaker, permit: Permit) -> Breaker:
    """The request ended for a reason that says nothing about the upstream, before its first byte."""
    if permit.term != breaker.term or not breaker.tripped:
        return breaker
    return replace(breaker, probing=breaker.probing - 1)


def _tripped(breaker: Breaker, now: float, reopened: int) -> Breaker:
    return Breaker(breaker.settings, tripped=True, term=breaker.term + 1, opened_at=now, reopened=reopened)
