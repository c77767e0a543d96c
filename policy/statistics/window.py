"""The last minutes of counters by the second, for questions such as "what was the speedup in the last five seconds"."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from backends.types import DecodeCounters
from policy.statistics.counters import StatsKey, Tally

SPAN_S = 600.0
_MOST_TICKS = 4096
"""Per class. At a tick a second the span is reached long before this."""


class Window:
    """Counters by (model, class) and arm, in the order in which they came. Times must not go back."""

    def __init__(self) -> None:
        self._ticks: dict[tuple[str, str], deque[tuple[float, str, Tally]]] = {}

    def add(self, key: StatsKey, counters: DecodeCounters, now: float) -> None:
        ticks = self._ticks.setdefault((key.model, key.class_name), deque(maxlen=_MOST_TICKS))
        ticks.append((now, key.arm, Tally.of(counters)))
        while ticks and ticks[0][0] < now - SPAN_S:
            ticks.popleft()

    @property
    def names(self) -> list[tuple[str, str]]:
        """Every (model, class) that was counted."""
        return list(self._ticks)

    def trailing(
        self,
        name: tuple[str, str],
        arms: str | Collection[str],
        now: float,
        *,
        least_s: float,
        least_steps: float,
        most_s: float,
    ) -> Tally:
        """The newest counters of an arm, or of several: those of ``least_s`` seconds, and older ones until
        ``least_steps`` is reached, but none that is ``most_s`` old."""
        total, arms = Tally(), (arms,) if isinstance(arms, str) else arms
        for at, of_arm, tally in reversed(self._ticks.get(name, ())):
            age = now - at
            if age >= most_s or (age >= least_s and total.steps >= least_steps):
                break
            if of_arm in arms:
                total = total.plus(tally)
        return total

    def all_arms(self, name: tuple[str, str], now: float, seconds: float) -> dict[str, Tally]:
        """The counters of the last ``seconds``, by arm."""
        found: dict[str, Tally] = {}
        for at, arm, tally in reversed(self._ticks.get(name, ())):
            if now - at >= seconds:
                break
            found[arm] = found.get(arm, Tally()).plus(tally)
        return found
