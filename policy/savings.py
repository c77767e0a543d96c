"""What speculation has saved: engine time against vanilla decoding of the same tokens, and money by a price an hour.

Both times are by the engine's cost table as the clock corrects it (``backends.cost``): of each step, what it took with
its drafts, and what vanilla steps in the same batch would have taken for as many tokens. A step's time is shared evenly
by its sequences, so shares add up to the engine's time, not to what clients waited. Where drafts did not pay, the
difference is negative, and is counted so. Requests of the control group save nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from backends.types import DecodeCounters
from policy.spec import Cost
from policy.statistics.counters import StatsKey, add_counters

MOST_TENANTS = 4_096
"""Tenants with sums of their own; keys are a closed set, but edits may bring new names for ever."""
OTHER_TENANTS = ""


class TenantSavings:
    """Seconds saved since the start, by class and tenant. Used from one event loop."""

    def __init__(self, most: int = MOST_TENANTS) -> None:
        self._most = most
        self._seconds: dict[tuple[str, str], float] = {}

    def add(self, class_name: str, tenant: str, seconds: float) -> None:
        key = class_name, tenant
        if key not in self._seconds and len(self._seconds) >= self._most:
            key = class_name, OTHER_TENANTS
        self._seconds[key] = self._seconds.get(key, 0.0) + seconds

    def items(self) -> Iterable[tuple[tuple[str, str], float]]:
        return sorted(self._seconds.items())


def by_class(counters: Mapping[str, DecodeCounters]) -> dict[tuple[str, str], DecodeCounters]:
    """Counters by (model, class), whosever plan it was, of those by statistics key. Pure."""
    totals: dict[tuple[str, str], DecodeCounters] = {}
    for text, each in counters.items():
        key = StatsKey.decode(text)
        if key is not None and key.of_engine:
            add_counters(totals.setdefault((key.model, key.class_name), DecodeCounters()), each)
    return totals


def report(counters: Mapping[str, DecodeCounters], tenants: TenantSavings, cost: Cost | None) -> dict[str, Any]:
    """For operators: this replica's, since its start. Money only where there is a price."""

    def saved(seconds: float) -> dict[str, Any]:
        money = {} if cost is None else {"saved_cost": round(cost.of(seconds), 6)}
        return {"saved_hours": round(seconds / 3600, 9), **money}

    return {
        "per_gpu_hour": None if cost is None else cost.per_gpu_hour,
        "currency": None if cost is None else cost.currency,
        "by_class": [
            {
                "model": model,
                "class": class_name,
                "vanilla_hours": round(each.vanilla_us / 3.6e9, 9),
                "decode_hours": round(each.spent_us / 3.6e9, 9),
                **saved((each.vanilla_us - each.spent_us) / 1e6),
            }
            for (model, class_name), each in sorted(by_class(counters).items())
        ],
        "by_tenant": [
            {"class": class_name, "tenant": tenant, **saved(seconds)}
            for (class_name, tenant), seconds in tenants.items()
        ],
    }
