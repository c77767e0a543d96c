"""The choice among a model's backends. Pure: what is known of each of them goes in, a name and the reasons come out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Blocked = Literal["lacks", "full", "down", "arm"]

SATURATED = 1.0
"""From this load on a backend has more sequences than it runs at once: the next priority is asked first."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A backend as one request sees it.

    ``load``: sequences that it holds over those that it can run at once. ``free``: how many more it may hold.
    ``classes``: the only classes that it takes; None: all. ``down``: why it can't be asked now. ``lacks``: what the
    request asks for and it can't do. ``failed``: how it failed on this very request. ``busy``: it refused others for
    lack of room a moment ago. ``arm``: how it decodes, where that is a choice (see ``policy.arms``).
    """

    name: str
    load: float
    free: int
    priority: int = 0
    classes: frozenset[str] | None = None
    down: str | None = None
    lacks: str | None = None
    failed: str | None = None
    busy: bool = False
    arm: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of one candidate. ``blocked`` None: it could have been chosen."""

    name: str
    blocked: Blocked | None
    reason: str


@dataclass(frozen=True, slots=True)
class Choice:
    """``name`` None: no backend can take the request, and ``blocked`` is the kind of obstacle that is nearest to none:
    one that is full would do if it had room, one that is down if it were up, one that lacks something never."""

    name: str | None
    reason: str
    blocked: Blocked | None
    verdicts: tuple[Verdict, ...]

    def as_dict(self) -> dict[str, Any]:
        return {
            "backend": self.name,
            "reason": self.reason,
            "candidates": [{"backend": each.name, "reason": each.reason} for each in self.verdicts],
        }


def in_the_running(candidates: Sequence[Candidate], class_name: str, sequences: int) -> list[Candidate]:
    """Those among which only arm and load decide: able, and of the best priority that has room."""
    able = [each for each in candidates if _verdict(each, class_name, sequences).blocked is None]
    best = min(map(_tier, able), default=None)
    return [each for each in able if _tier(each) == best]


def choose(candidates: Sequence[Candidate], class_name: str, sequences: int, arm: str | None = None) -> Choice:
    """The backend for a request of ``class_name`` that needs ``sequences`` places. ``arm``: the one that was chosen.

    Of those that can take it: the lowest priority that is not saturated, there the least loaded, there the first. When
    all are saturated or busy, the least loaded of any priority.
    """
    verdicts = tuple(_verdict(each, class_name, sequences, arm) for each in candidates)
    open_to_it = [each for each, verdict in zip(candidates, verdicts, strict=True) if verdict.blocked is None]
    if not open_to_it:
        found = {verdict.blocked for verdict in verdicts}
        blocked: Blocked = "full" if "full" in found else "down" if "down" in found else "lacks"
        return Choice(None, "; ".join(f"{each.name}: {each.reason}" for each in verdicts), blocked, verdicts)
    best = min(open_to_it, key=_rank)
    return Choice(best.name, _why(best, candidates, open_to_it, verdicts), None, verdicts)


def _verdict(candidate: Candidate, class_name: str, sequences: int, arm: str | None = None) -> Verdict:
    if candidate.classes is not None and class_name not in candidate.classes:
        return Verdict(candidate.name, "lacks", f"takes only {', '.join(sorted(candidate.classes))}, not {class_name}")
    if candidate.lacks is not None:
        return Verdict(candidate.name, "lacks", candidate.lacks)
    if candidate.failed is not None:
        return Verdict(candidate.name, "down", f"failed on this request: {candidate.failed}")
    if candidate.down is not None:
        return Verdict(candidate.name, "down", candidate.down)
    if candidate.free < sequences:
        return Verdict(candidate.name, "full", f"has {max(candidate.free, 0)} places free of {sequences} needed")
    if arm is not None and candidate.arm != arm:
        return Verdict(candidate.name, "arm", f"is of arm '{candidate.arm}', load {candidate.load:.2f}")
    return Verdict(candidate.name, None, f"load {candidate.load:.2f}{', busy' if candidate.busy else ''}")


def _crowded(candidate: Candidate) -> bool:
    return candidate.busy or candidate.load >= SATURATED


def _tier(candidate: Candidate) -> tuple[bool, float]:
    """What counts before load: among crowded ones nothing does."""
    return (True, 0.0) if _crowded(candidate) else (False, candidate.priority)


def _rank(candidate: Candidate) -> tuple[bool, float, float]:
    # min() keeps the first of equals, which is the order of the operator's file.
    if _crowded(candidate):
        return True, candidate.load, candidate.priority
    return False, candidate.priority, candidate.load


def _why(
    best: Candidate, candidates: Sequence[Candidate], open_to_it: Sequence[Candidate], verdicts: Sequence[Verdict]
) -> str:
    if len(candidates) == 1:
        return "the model's only backend"
    barred = [f"{each.name} {each.reason}" for each in verdicts if each.blocked is not None]
    told = f" ({'; '.join(barred)})" if barred else ""
    if len(open_to_it) == 1:
        return f"the only one that can take it{told}"
    rivals = [each for each in open_to_it if each is not best]
    if _crowded(best):
        return f"least loaded, {best.load:.2f}, as all are saturated or busy{told}"
    if all(_crowded(each) for each in rivals):
        return f"the only one with room, load {best.load:.2f}{told}"
    if all(each.priority > best.priority or _crowded(each) for each in rivals):
        return f"priority {best.priority} comes first{told}"
    return f"least loaded of priority {best.priority}, {best.load:.2f}{told}"
