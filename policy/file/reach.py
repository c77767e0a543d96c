"""Rules that no request ever comes to, since one above takes all that they would. Pure, over conditions as written."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from policy.names import Names

When = Mapping[str, Any]
"""The fields of a rule's ``when``: names as tuples, ranges as mappings of min and max."""

MOST_COMPARED = 100
"""Earlier rules that a rule is compared with at most. Those with names are found by these, so that a policy with a rule
for each of thousands of tenants stays below."""

_NAMES = ("class", "tenant", "model")
_RANGES: dict[str, tuple[float, float]] = {
    "prompt_tokens": (0, float("inf")),
    "temperature": (0, 2),
    "load": (0, float("inf")),
}
"""What a request can have at all."""


def unreachable(rules: Sequence[When], classes: Collection[str]) -> Iterator[tuple[int, int]]:
    """(index of a rule, index of one above it that takes all its requests). ``classes``: all that there are.

    Rules are compared in pairs: several that only together take all are not found.
    """
    anywhere: list[int] = []
    by_name: dict[tuple[str, str], list[int]] = {}
    asked: list[dict[str, Any]] = []
    for index, when in enumerate(rules):
        conditions = _conditions(when, classes)
        asked.append(conditions)
        candidates = anywhere[:MOST_COMPARED]
        for kind in _NAMES:
            if kind in conditions:
                # One that takes all of these names takes the first of them.
                candidates += by_name.get((kind, conditions[kind][0]), [])[:MOST_COMPARED]
        above = min((each for each in candidates if _takes_all(asked[each], conditions)), default=None)
        if above is not None:
            yield index, above
            continue
        plain = next((kind for kind in _NAMES if kind in conditions and not _has_pattern(conditions[kind])), None)
        if plain is None:
            anywhere.append(index)
        else:
            for name in conditions[plain]:
                by_name.setdefault((plain, name), []).append(index)


def _conditions(when: When, classes: Collection[str]) -> dict[str, Any]:
    """Those that some request does not meet."""
    found: dict[str, Any] = {}
    for kind, value in when.items():
        if kind in _RANGES:
            low, high = _RANGES[kind]
            interval = max(value.get("min", low), low), min(value.get("max", high), high)
            if interval != (low, high):
                found[kind] = interval
        elif kind == "class":
            if not frozenset(classes) <= frozenset(value):
                found[kind] = value
        elif kind == "turn" or not any(set(name) == {"*"} for name in value):
            found[kind] = value
    return found


def _takes_all(above: Mapping[str, Any], below: Mapping[str, Any]) -> bool:
    return all(kind in below and _implied(kind, value, below[kind]) for kind, value in above.items())


def _implied(kind: str, wide: Any, narrow: Any) -> bool:
    if kind in _RANGES:
        return wide[0] <= narrow[0] and narrow[1] <= wide[1]
    if kind == "turn":
        return wide == narrow
    # A star in a narrow pattern is met by a star of the wide one only, as if it were a letter.
    names = Names.of(wide)
    return all(names.holds(name) for name in narrow)


def _has_pattern(names: Sequence[str]) -> bool:
    return any("*" in name for name in names)
