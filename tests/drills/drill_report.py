"""What became of a drill's streams, by fault and by what had happened of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Stream:
    """One request. ``problem`` None: it came to its end."""

    started: float
    first: float | None = None
    ended: float = 0.0
    server: str = ""
    problem: str | None = None
    duplicated: int = 0
    lost: int = 0


@dataclass(slots=True)
class Fault:
    name: str
    victim: str
    began: float = 0.0
    struck: float = 0.0
    healed: float = 0.0
    over: float = 0.0
    notes: list[str] = field(default_factory=list)

    def phase_of(self, stream: Stream) -> str | None:
        """A stream that was under way when the fault struck belongs to it."""
        if not self.began <= stream.started < self.over:
            return None
        if stream.ended < self.struck:
            return "before"
        return "during" if stream.started < self.healed else "after"


def report(
    streams: Sequence[Stream],
    faults: Sequence[Fault],
    counted: Mapping[str, Mapping[str, int]],
    broken: Sequence[str],
) -> dict[str, Any]:
    """``counted``: steps by replica, as it counted them and as Redis has them; ``broken``: promises. Pure."""
    rows = []
    for fault in faults:
        for phase in ("before", "during", "after"):
            mine = [each for each in streams if fault.phase_of(each) == phase]
            waits = sorted((each.first - each.started) * 1000 for each in mine if each.first is not None)
            rows.append(
                {
                    "fault": fault.name,
                    "victim": fault.victim,
                    "phase": phase,
                    "requests": len(mine),
                    "failed": sum(each.problem is not None for each in mine),
                    "duplicated": sum(each.duplicated for each in mine),
                    "lost": sum(each.lost for each in mine),
                    "ttft_p50_ms": _quantile(waits, 0.5),
                    "ttft_p99_ms": _quantile(waits, 0.99),
                }
            )
    failures = sorted({each.problem for each in streams if each.problem is not None})
    notes = {fault.name: fault.notes for fault in faults}
    return {
        "rows": rows,
        "counters": counted,
        "failures": failures,
        "notes": notes,
        "broken_promises": sorted(set(broken)),
    }


def _quantile(values: list[float], share: float) -> float | None:
    return round(values[min(int(len(values) * share), len(values) - 1)], 1) if values else None


def show(report: dict[str, Any]) -> None:
    columns = list(report["rows"][0])
    table = [columns, *([str(row[name]) for name in columns] for row in report["rows"])]
    widths = [max(len(row[i]) for row in table) for i in range(len(columns))]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for name, lines in report["notes"].items():
        print(f"{name}: {', '.join(lines)}" if lines else f"{name}: -")
    for name, steps in report["counters"].items():
        print(f"steps of {name}: {steps['own']} counted, {steps['redis']} in Redis")
    for each in report["failures"]:
        print(f"what clients saw of failed streams: {each}")
    for each in report["broken_promises"]:
        print(f"BROKEN: {each}")
    if not report["broken_promises"]:
        print("every promise was kept")
