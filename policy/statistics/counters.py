"""Arithmetic on raw counters, and the names they are kept under."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

from backends.types import DecodeCounters

Arm = Literal["policy", "control", "client", "upstream"]
"""Whose plan it was: the policy's, a control's (vanilla, to check predictions), or the client's own; or, of upstreams
that speculate, what their answers took against what the plain ones would have taken.

Only the first and the last tell whether speculation pays; a client's odd tree must not switch it off for others.
"""
ARMS: tuple[Arm, ...] = ("policy", "control", "client", "upstream")
JUDGED: frozenset[str] = frozenset({"policy", "upstream"})
"""The arms whose speedup decides on fallback, and is exported."""
_UPSTREAM = "@"

SCALARS = tuple(each.name for each in fields(DecodeCounters) if each.name not in ("attempts", "hits"))


class StatsKey(NamedTuple):
    """What statistics are kept by. :meth:`encode` makes the engine's ``stats_key`` of it."""

    model: str
    class_name: str
    bucket: str
    arm: str

    def encode(self) -> str:
        # Model names are free text, so they go first and are never split: the other parts hold no bar.
        return "|".join(self)

    @classmethod
    def decode(cls, text: str) -> StatsKey | None:
        """None for a key that this gateway did not make."""
        parts = text.rsplit("|", 3)
        return cls(*parts) if len(parts) == 4 and (parts[3] in ARMS or parts[3].startswith(_UPSTREAM)) else None

    @classmethod
    def of_upstream(cls, model: str, class_name: str, bucket: str, variant: str, load: str) -> StatsKey:
        """For answers of upstreams that decode by ``variant``, at a load that the bucket ``load`` names."""
        return cls(model, class_name, bucket, f"{_UPSTREAM}{variant}/{load}")

    @property
    def variant(self) -> tuple[str, str] | None:
        """(variant, load bucket) of a key of :meth:`of_upstream`; None for others."""
        if not self.arm.startswith(_UPSTREAM):
            return None
        variant, _, load = self.arm.removeprefix(_UPSTREAM).rpartition("/")
        return variant, load

    @property
    def of_engine(self) -> bool:
        """Whether it counts steps of an engine of this gateway, and not answers of an upstream."""
        return self.arm != "upstream" and self.variant is None


def temperature_bucket(temperature: float) -> str:
    """Acceptance falls with temperature, in no more detail than this."""
    if temperature <= 0:
        return "greedy"
    if temperature <= 0.5:
        return "low"
    return "middle" if temperature <= 1.0 else "high"


def add_counters(into: DecodeCounters, more: DecodeCounters) -> None:
    """``into += more``, exactly."""
    for name in SCALARS:
        setattr(into, name, getattr(into, name) + getattr(more, name))
    _add_lists(into.attempts, more.attempts)
    while len(into.hits) < len(more.hits):
        into.hits.append([])
    for own, theirs in zip(into.hits, more.hits, strict=False):
        _add_lists(own, theirs)


def added_since(now: DecodeCounters, before: DecodeCounters | None) -> DecodeCounters:
    """``now - before`` for counters that only grow; nothing is ever taken away."""
    if before is None:
        return now
    grown = DecodeCounters()
    for name in SCALARS:
        setattr(grown, name, max(getattr(now, name) - getattr(before, name), 0))
    grown.attempts = _minus(now.attempts, before.attempts)
    old = before.hits + [[]] * (len(now.hits) - len(before.hits))
    grown.hits = [_minus(each, earlier) for each, earlier in zip(now.hits, old, strict=False)]
    return grown


def sum_counters(parts: Iterable[DecodeCounters]) -> DecodeCounters:
    total = DecodeCounters()
    for part in parts:
        add_counters(total, part)
    return total


def copy_of(counters: DecodeCounters) -> DecodeCounters:
    return sum_counters([counters])


def pack(counters: DecodeCounters) -> str:
    """As text, without what is zero. Read back by :func:`unpack`; unknown names are skipped there."""
    packed: dict[str, Any] = {name: value for name in SCALARS if (value := getattr(counters, name))}
    if counters.attempts:
        packed["attempts"], packed["hits"] = counters.attempts, counters.hits
    return json.dumps(packed, separators=(",", ":"))


def unpack(text: str) -> DecodeCounters:
    """Raises ValueError for text that no :func:`pack` made."""
    packed = json.loads(text)
    if not isinstance(packed, dict):
        raise ValueError("counters are not an object")
    counters = DecodeCounters()
    for name in SCALARS:
        setattr(counters, name, int(packed.get(name, 0)))
    counters.attempts = [int(value) for value in packed.get("attempts", [])]
    counters.hits = [[int(value) for value in ranks] for ranks in packed.get("hits", [])]
    return counters


@dataclass(slots=True)
class Tally:
    """Counters that may be scaled: for decayed and weighed statistics. Rates are derived here, on read."""

    values: dict[str, float] = field(default_factory=dict)
    attempts: list[float] = field(default_factory=list)
    hits: list[list[float]] = field(default_factory=list)

    @classmethod
    def of(cls, counters: DecodeCounters) -> Tally:
        return cls(
            {name: float(value) for name in SCALARS if (value := getattr(counters, name))},
            [float(value) for value in counters.attempts],
            [[float(value) for value in ranks] for ranks in counters.hits],
        )

    def scaled(self, factor: float, of_heads: float | None = None) -> Tally:
        """``of_heads``: another factor for what is counted by head."""
        of_heads = factor if of_heads is None else of_heads
        return Tally(
            {name: value * factor for name, value in self.values.items()},
            [value * of_heads for value in self.attempts],
            [[value * of_heads for value in ranks] for ranks in self.hits],
        )

    def plus(self, other: Tally) -> Tally:
        values = dict(self.values)
        for name, value in other.values.items():
            values[name] = values.get(name, 0.0) + value
        attempts, hits = list(self.attempts), [list(ranks) for ranks in self.hits]
        _add_lists(attempts, other.attempts)
        while len(hits) < len(other.hits):
            hits.append([])
        for own, theirs in zip(hits, other.hits, strict=False):
            _add_lists(own, theirs)
        return Tally(values, attempts, hits)

    def get(self, name: str) -> float:
        return self.values.get(name, 0.0)

    @property
    def steps(self) -> float:
        return self.get("steps")

    @property
    def speedup(self) -> float | None:
        """Against vanilla in the same batches, by the engine's cost table; None without a measurement."""
        spent = self.get("spent_us")
        return self.get("vanilla_us") / spent if spent > 0 else None

    @property
    def tokens_per_step(self) -> float | None:
        return self.get("emitted_tokens") / self.steps if self.steps > 0 else None

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted of drafted tokens."""
        drafted = self.get("drafted_tokens")
        return self.get("accepted_tokens") / drafted if drafted > 0 else None

    @property
    def accuracies(self) -> list[list[float]]:
        """How often head h's guess of rank r was right, of the steps in which it could be checked."""
        return [
            [hit / attempts for hit in ranks] if attempts > 0 else []
            for attempts, ranks in zip(self.attempts, self.hits, strict=False)
        ]

    @property
    def control_ratio(self) -> float | None:
        """Measured over predicted time of vanilla requests: how far the cost table is from the truth."""
        predicted = self.get("control_vanilla_us")
        return self.get("control_measured_us") / predicted if predicted > 0 else None


def sum_tallies(parts: Iterable[Tally]) -> Tally:
    total = Tally()
    for part in parts:
        total = total.plus(part)
    return total


def as_json(tally: Tally) -> dict[str, Any]:
    return {
        "values": {name: round(value, 3) for name, value in tally.values.items()},
        "attempts": [round(value, 3) for value in tally.attempts],
        "hits": [[round(value, 3) for value in ranks] for ranks in tally.hits],
    }


def from_json(value: Mapping[str, Any]) -> Tally:
    return Tally(
        {str(name): float(number) for name, number in value["values"].items()},
        [float(number) for number in value["attempts"]],
        [[float(number) for number in ranks] for ranks in value["hits"]],
    )


def _add_lists(into: list[Any], more: list[Any]) -> None:
    for index, value in enumerate(more):
        if index < len(into):
            into[index] += value
        else:
            into.append(value)


def _minus(now: list[int], before: list[int]) -> list[int]:
    padded = before + [0] * (len(now) - len(before))
    return [max(value - earlier, 0) for value, earlier in zip(now, padded, strict=False)]
