"""Which known name a client meant: only for true misspellings, since a wrong hint is worse than none. Pure."""

from __future__ import annotations

from collections.abc import Iterable

_SHORTEST = 4
"""Shorter names are one letter from too many others."""
_LONGEST = 64


def misspelt(name: str, known: Iterable[str]) -> str | None:
    """The one of ``known`` that ``name`` is a slip away from: another way to join the words, or one letter too many,
    too few, wrong or swapped; two in names of eight letters or more."""
    plain = _plain(name[: _LONGEST + 1])
    if not _SHORTEST <= len(plain) <= _LONGEST:
        return None
    allowed = 2 if len(plain) >= 8 else 1
    best = min(known, key=lambda each: (slips(plain, _plain(each)), each), default=None)
    return best if best is not None and slips(plain, _plain(best)) <= allowed else None


def slips(one: str, other: str) -> int:
    """How many letters to add, drop, change or swap with their neighbour (each letter once) to get from one to the
    other."""
    before: list[int] = []
    last = list(range(len(other) + 1))
    for i, letter in enumerate(one, 1):
        row = [i]
        for j, wanted in enumerate(other, 1):
            cost = min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (letter != wanted))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == wanted:
                cost = min(cost, before[j - 2] + 1)
            row.append(cost)
        before, last = last, row
    return last[-1]


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")
