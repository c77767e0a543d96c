"""A start with a cost table that was kept, and keeping the one in use for the next start."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from backends.cost.probe import Measured
from backends.cost.record import CostRecord, UnusableRecord, judge, key_of, neighbourhood, read_record
from backends.cost.step_cost import StepCost, refined
from backends.cost.stores import CostStore

log = logging.getLogger(__name__)

_NEWS = 0.02


class Probe(Protocol):
    """See :class:`backends.cost.probe.CostProbe`."""

    def measure(self) -> Measured: ...

    def check(self) -> list[tuple[int, float]]: ...


@dataclass(slots=True)
class CostKeeping:
    """The cost table of one engine. ``stores`` are asked in this order; what one is missing it is given.

    ``measure_anew``: whatever is kept is not looked at, and replaced.
    """

    facts: Mapping[str, str]
    stores: Sequence[CostStore]
    wall_clock: Callable[[], float]
    measure_anew: bool = False
    _kept: CostRecord | None = None
    _better: StepCost | None = None

    def open(self, probe: Probe) -> CostRecord:
        """The table to start with: the newest that is kept for this device and holds on it, else one measured now.

        A busy machine says little: what was kept is then better than what is measured.
        """
        kept = None if self.measure_anew else self._find(self.facts)
        if kept is not None:
            verdict = judge(kept.cost, probe.check())
            if verdict.trusted:
                hours = max(self.wall_clock() - kept.measured_at, 0.0) / 3600
                log.info("cost table of %.1f h ago taken over: %s", hours, verdict.reason)
                self._save(kept)
                return kept
            log.warning("the cost table that was kept does not hold, it is measured again: %s", verdict.reason)
        measured = probe.measure()
        record = CostRecord(self.facts, self.wall_clock(), self._guessed_by_neighbour(measured.cost))
        if measured.worth_keeping:
            log.info("cost table measured")
            self._save(record)
            return record
        if kept is not None and measured.restless:
            log.warning("the cost table was measured in a busy moment; the kept one is used after all")
            return kept
        log.warning(
            "the cost table was measured in a busy moment, or in too small a part for want of time; it is used, but "
            "not kept for the next start"
        )
        if not measured.restless:
            self._kept = record
        return record

    def improve(self, cost: StepCost) -> None:
        """What was guessed at the start is measured: :meth:`refine` will keep it. Safe from any thread."""
        self._better = cost

    def refine(self, factors: Mapping[int, float]) -> bool:
        """Keep what serving has taught, if it is news; whether it was. Blocks as long as the stores do."""
        kept, better = self._kept, self._better
        if kept is None:
            return False
        if better is not None:
            self._better = None
            self._save(replace(kept, cost=better, factors={**kept.factors, **factors}))
            return True
        if not any(_is_news(kept.factors.get(size, 1.0), factor) for size, factor in factors.items()):
            return False
        self._save(replace(kept, factors={**kept.factors, **factors}))
        return True

    def _guessed_by_neighbour(self, cost: StepCost) -> StepCost:
        """What was not measured rises as it does in a table of this machine and model in other circumstances."""
        near = self._find(neighbourhood(self.facts), only_these=True) if cost.guessed else None
        return cost if near is None else refined(cost, {}, like=near.cost)

    def _find(self, facts: Mapping[str, str], *, only_these: bool = False) -> CostRecord | None:
        found: list[CostRecord] = []
        for store in self.stores:
            try:
                text = store.load(key_of(facts))
                if text is not None:
                    found.append(read_record(text, facts, self.wall_clock(), only_these=only_these))
            except OSError as error:
                log.warning("no cost table from %s: %s", store, error)
            except UnusableRecord as error:
                log.warning("the cost table in %s is ignored: %s", store, error)
        return max(found, key=lambda record: record.measured_at, default=None)

    def _save(self, record: CostRecord) -> None:
        self._kept = record
        for store in self.stores:
            try:
                store.save(key_of(self.facts), record.text())
                store.save(key_of(neighbourhood(self.facts)), record.text())
            except OSError as error:
                log.warning("the cost table is not kept in %s: %s", store, error)


def _is_news(known: float, factor: float) -> bool:
    return abs(math.log(factor / known)) > _NEWS
