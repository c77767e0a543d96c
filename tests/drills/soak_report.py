"""What became of a soak's requests and faults, and which promises were broken."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KINDS = {"short": 6, "long": 2, "whole": 4, "cancelled": 3, "slow reader": 1, "bad input": 2, "upstream": 3}
"""What clients do, by how often."""

LEAK_S = 900.0
"""In a shorter run, what is filled once (caches, pools) looks like a leak."""
MOST_GROWTH = 1.02


@dataclass(slots=True)
class Fault:
    """``victims``: names of replicas, or of the upstream's model, whose requests it excuses while it lasts."""

    name: str
    victims: tuple[str, ...] = ()
    began: float = 0.0
    ended: float = float("inf")
    noticed: bool = False


@dataclass(slots=True)
class Outcome:
    kind: str
    replica: str
    began: float
    ended: float = 0.0
    problem: str | None = None
    wrong: int = 0


@dataclass(slots=True)
class Usage:
    """Of one process. ``memory_mb`` is what it has allocated, and what grows by a leak; ``resident_mb`` also counts
    pages of mapped files, such as weights, which the system takes and brings back as it likes."""

    memory_mb: float
    resident_mb: float
    descriptors: int
    threads: int


def usage_of(pid: int) -> Usage:
    status = dict(
        line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line
    )
    allocated, resident = (
        round(sum(int(status[name].split()[0]) for name in names) / 1024, 1)
        for names in (("RssAnon", "VmSwap"), ("VmRSS",))
    )
    return Usage(allocated, resident, len(os.listdir(f"/proc/{pid}/fd")), int(status["Threads"]))


def excused(outcome: Outcome, faults: Sequence[Fault]) -> bool:
    """Whether a fault of its replica, or of what it asked, was on while it ran."""
    return any(
        (outcome.replica in fault.victims or outcome.kind in fault.victims)
        and outcome.began <= fault.ended
        and fault.began <= outcome.ended
        for fault in faults
    )


def report(
    outcomes: Sequence[Outcome],
    faults: Sequence[Fault],
    usage: Mapping[str, Mapping[str, Usage]],
    memory: Sequence[Sequence[float]],
    noticed: Sequence[str],
    seconds: float,
) -> dict[str, Any]:
    """``usage``: by replica and moment; ``memory``: MB of one replica by thirds of the time; ``noticed``: promises that
    were seen to be broken on the way; ``seconds``: of load. Pure."""
    rows = []
    for kind in KINDS:
        mine = [each for each in outcomes if each.kind == kind]
        rows.append(
            {
                "kind": kind,
                "requests": len(mine),
                "failed": sum(each.problem is not None for each in mine),
                "excused": sum(each.problem is not None and excused(each, faults) for each in mine),
                "wrong": sum(each.wrong for each in mine),
            }
        )
    causes = Counter(
        f"{each.problem} ({'excused' if excused(each, faults) else 'NOT excused'})"
        for each in outcomes
        if each.problem is not None
    )
    broken = list(noticed)
    broken += [f"{row['wrong']} characters wrong in requests of kind '{row['kind']}'" for row in rows if row["wrong"]]
    broken += [
        f"{row['failed'] - row['excused']} requests of kind '{row['kind']}' failed for no fault"
        for row in rows
        if row["failed"] > row["excused"]
    ]
    thirds = [round(sum(each) / len(each), 1) if each else None for each in memory]
    _, second, last = thirds
    if seconds >= LEAK_S and second and last and last > MOST_GROWTH * second:
        broken.append(f"memory grew from {second} MB in the second third of the time to {last} MB in the last")
    return {
        "rows": rows,
        "causes": dict(causes.most_common()),
        "faults": [
            {"fault": each.name, "noticed": each.noticed, "seconds": round(each.ended - each.began, 1)}
            for each in faults
        ],
        "usage": {name: {when: vars_of(each) for when, each in looks.items()} for name, looks in usage.items()},
        "memory_by_thirds_mb": thirds,
        "broken_promises": broken,
    }


def vars_of(usage: Usage) -> dict[str, float]:
    return {name: getattr(usage, name) for name in Usage.__slots__}


def show(report: dict[str, Any]) -> None:
    print(f"{'requests':14}{'sent':>8}{'failed':>8}{'excused':>9}{'chars wrong':>14}")
    for row in report["rows"]:
        print(f"{row['kind']:14}{row['requests']:8}{row['failed']:8}{row['excused']:9}{row['wrong']:14}")
    for cause, count in report["causes"].items():
        print(f"failed: {count} x {cause}")
    for fault in report["faults"]:
        print(f"fault: {fault['fault']}, {'noticed' if fault['noticed'] else 'NOT NOTICED'}, {fault['seconds']} s")
    for name, looks in report["usage"].items():
        for when, each in looks.items():
            counts = f"{each['descriptors']} descriptors, {each['threads']} threads"
            print(f"{name} at {when}: {each['memory_mb']} MB ({each['resident_mb']} MB resident), {counts}")
    thirds = ", ".join("-" if each is None else f"{each} MB" for each in report["memory_by_thirds_mb"])
    print(f"mean memory of r0 in each third of the time: {thirds}")
    for each in report["broken_promises"]:
        print(f"BROKEN: {each}")
    if not report["broken_promises"]:
        print("0 tokens wrong, 0 pages leaked, every failure has its fault: every promise was kept")
