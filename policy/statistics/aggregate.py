"""What this replica believes: its own counts and the others', the window, the estimates, the fallbacks.

No input or output here. Own counts come straight from the engine and never by way of the store, others' only from the
store, so nothing is counted twice whatever the store does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backends.types import DecodeCounters
from policy.fallback import FallbackState, Transition, advance, evidence_span
from policy.spec import PolicySpec
from policy.statistics.arm_book import ArmBook, as_evidence, figures_of
from policy.statistics.counters import JUDGED, StatsKey, Tally, added_since
from policy.statistics.epoch_book import EpochBook
from policy.statistics.estimate import Estimate
from policy.statistics.snapshot import LiveStats, live_stats
from policy.statistics.store import Prior, Register
from policy.statistics.window import Window

SPAN_OF_REPORT_S = 60.0


class Statistics:
    """Used from one thread only. ``live`` is what decisions read; it is replaced as a whole by :meth:`refresh`."""

    def __init__(self, replica: str) -> None:
        self.replica = replica
        self.book = EpochBook()
        self.window = Window()
        self.live = LiveStats()
        self.arms = ArmBook()
        self.unknown_keys = 0
        self._estimates: dict[StatsKey, Estimate] = {}
        self._fallbacks: dict[tuple[str, str], FallbackState] = {}
        self._seen: dict[Register, DecodeCounters] = {}
        self._has_prior = False
        self._prior: Prior = Prior()

    def add_own(self, counters: Mapping[str, DecodeCounters], now: float, wall_time: float) -> None:
        """What an engine has counted since it was last asked."""
        for text, value in counters.items():
            key = StatsKey.decode(text)
            if key is None:
                self.unknown_keys += 1
                continue
            self.book.add(text, value, wall_time)
            self._learn(key, value, now)
            self._add_to_window(key, value, now)

    def add_fleet(self, registers: Mapping[Register, DecodeCounters], prior: Prior, now: float) -> None:
        """What the store holds of other replicas; only what is new in it counts."""
        first = not self._has_prior
        self._prior = prior
        if first:
            self._take_prior(prior, now)
        for register, value in registers.items():
            if register.replica == self.replica:
                continue
            key = StatsKey.decode(register.key)
            delta = added_since(value, self._seen.get(register))
            if key is None or delta.steps == 0:
                continue
            self._seen[register] = value
            if first and register.epoch <= prior.epoch:
                continue
            self._learn(key, delta, now)
            if not first:  # what was there at the start may be minutes old
                self._add_to_window(key, delta, now)

    def forget_before(self, epoch: int) -> None:
        """Registers of epochs that are no longer read."""
        for register in [each for each in self._seen if each.epoch < epoch]:
            del self._seen[register]

    def refresh(
        self, spec: PolicySpec, now: float, source: str, held: Mapping[tuple[str, str], str] | None = None
    ) -> list[tuple[tuple[str, str], Transition]]:
        """A new ``live``, and the fallbacks that began or ended. ``held``: classes to keep in fallback, and why."""
        transitions: list[tuple[tuple[str, str], Transition]] = []
        for name in self.window.names:
            settings = spec.of_class(name[1])
            if settings.method != "auto":
                self._fallbacks.pop(name, None)
                continue
            state = self._fallbacks.get(name) or FallbackState(since=now)
            least_s, least_steps, most_s = evidence_span(state, settings.fallback, now)
            evidence = self.window.trailing(name, JUDGED, now, least_s=least_s, least_steps=least_steps, most_s=most_s)
            known = self.live.by_class.get(name)
            accuracy = None if known is None else known.first_accuracy
            self._fallbacks[name], transition = advance(
                state, settings.fallback, evidence, now, accuracy, (held or {}).get(name)
            )
            if transition is not None:
                transitions.append((name, transition))
                if transition.to == "speculating":
                    # Probes were too few to outweigh what is remembered of the slow days.
                    self.arms.doubt(*name)
        self.live = live_stats(self._estimates, self._fallbacks, now=now, source=source, previous=self.live)
        return transitions

    def long_memory(self) -> dict[tuple[str, str], Tally]:
        """What the store remembers of each (model, class) over hours, as last read; sums to compare the present with.

        The estimates are no good for that: they follow a sudden change at once.
        """
        found: dict[tuple[str, str], Tally] = {}
        for text, tally in self._prior.tallies.items():
            key = StatsKey.decode(text)
            if key is not None:
                name = key.model, key.class_name
                found[name] = found.get(name, Tally()).plus(tally)
        return found

    def report(self, now: float) -> dict[str, Any]:
        """For people: what is measured by class, and how the predictions hold against the control group."""
        return {
            "taken_s_ago": round(now - self.live.taken_at, 3),
            "source": self.live.source,
            "arms": self.arm_report(now),
            "classes": [
                {
                    "model": name[0],
                    "class": name[1],
                    **stats.as_dict(now),
                    "fallback": _fallback_report(self.live.fallbacks.get(name), now),
                    "last_minute": _minute_report(self.window.all_arms(name, now, SPAN_OF_REPORT_S)),
                    "temperatures": {
                        bucket: each.as_dict(now)
                        for (model, class_name, bucket), each in self.live.by_key.items()
                        if (model, class_name) == name
                    },
                }
                for name, stats in sorted(self.live.by_class.items())
            ],
        }

    def arm_report(self, now: float) -> list[dict[str, Any]]:
        """What was measured of upstreams, by model, class, temperature bucket, variant and load bucket."""
        return [
            {
                "model": key.model,
                "class": key.class_name,
                "temperature": key.bucket,
                "arm": variant[0],
                **as_evidence(figures),
                "fallback": _fallback_report(self.live.fallbacks.get((key.model, key.class_name)), now),
            }
            for key, cell in sorted(self.arms.cells(), key=lambda item: item[0])
            if (variant := key.variant) is not None and (figures := figures_of(cell, variant[1], now)) is not None
        ]

    def _add_to_window(self, key: StatsKey, counters: DecodeCounters, now: float) -> None:
        if key.variant is None:
            self.window.add(key, counters, now)

    def _learn(self, key: StatsKey, counters: DecodeCounters, now: float) -> None:
        if key.variant is not None:
            self.arms.learn(key, counters, now)
            return
        estimate = self._estimates.get(key) or Estimate()
        self._estimates[key] = estimate.updated(Tally.of(counters), now)

    def _take_prior(self, prior: Prior, now: float) -> None:
        self._has_prior = True
        for text, tally in prior.tallies.items():
            key = StatsKey.decode(text)
            if key is None or tally.steps <= 0:
                continue
            if key.variant is not None:
                self.arms.take_past(key, tally, now)
                continue
            past, present = Estimate.from_past(tally, now), self._estimates.get(key)
            # Counted before the store answered: both are kept, and the shift test tells if they don't agree.
            self._estimates[key] = past if present is None else Estimate(
                present.fast, past.slow.plus(present.slow), present.updated_at, present.shifts
            )  # fmt: skip


def fold(prior: Prior, registers: Mapping[Register, DecodeCounters], until: int, decay: float, most: float) -> Prior:
    """The prior with the epochs after its last, up to ``until``, folded in. Pure.

    ``decay`` is what remains of the old sums; ``most`` bounds the steps that a key remembers.
    """
    tallies = {key: tally.scaled(decay) for key, tally in prior.tallies.items()}
    for register, counters in registers.items():
        if prior.epoch < register.epoch <= until:
            tallies[register.key] = tallies.get(register.key, Tally()).plus(Tally.of(counters))
    for key, tally in tallies.items():
        if tally.steps > most:
            tallies[key] = tally.scaled(most / tally.steps)
    return Prior(until, {key: tally for key, tally in tallies.items() if tally.steps >= 1.0})


def _fallback_report(state: FallbackState | None, now: float) -> dict[str, Any] | None:
    if state is None:
        return None
    return {
        "mode": state.mode,
        "for_s": round(now - state.since, 3),
        "speedup": None if state.speedup is None else round(state.speedup, 4),
        "count": state.count,
    }


def _minute_report(arms: Mapping[str, Tally]) -> dict[str, Any]:
    """``prediction_error``: measured over predicted time of vanilla requests, less 1; what the cost table is off by."""
    every = Tally()
    for tally in arms.values():
        every = every.plus(tally)
    ratio = every.control_ratio
    return {
        "steps": {arm: round(tally.steps) for arm, tally in arms.items()},
        "speedup": {arm: round(tally.speedup, 4) for arm, tally in arms.items() if tally.speedup is not None},
        "control_measured_over_predicted": None if ratio is None else round(ratio, 4),
        "prediction_error": None if ratio is None else round(ratio - 1.0, 4),
    }
