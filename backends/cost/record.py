"""A cost table to be kept for the next start: its text form, for which device it holds, and whether to believe it.

Pure; where such texts lie is :mod:`backends.cost.stores`, who reads and writes them :mod:`backends.cost.persistence`.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from backends.cost.step_cost import StepCost

VERSION = 1
"""Of the text. A table in another version is not read."""
MOST_AGE_S = 30 * 86_400.0
CLOCK_SLACK_S = 300.0
"""How far ahead the clock of the machine that wrote a table may be."""

CHECKED_ROWS = (1, 8, 32)
"""Where a kept table is compared with the device before it is used: one row, a usual tree, a full batch."""
_LEVEL_OFF = 1.5
_SHAPE_OFF = 1.25
_RESTLESS = 1.35


class UnusableRecord(ValueError):
    """The text is no table for this device; the message says why."""


@dataclass(frozen=True, slots=True)
class CostRecord:
    """``facts``: what the times depend on, see :mod:`backends.cost.fingerprint`. ``measured_at``: wall clock, seconds.

    ``factors``: what serving has taught since, see :meth:`backends.cost.calibration.Calibration.learned`.
    """

    facts: Mapping[str, str]
    measured_at: float
    cost: StepCost
    factors: Mapping[int, float] = field(default_factory=dict)

    def text(self) -> str:
        return json.dumps(
            {
                "version": VERSION,
                "facts": dict(sorted(self.facts.items())),
                "measured_at": round(self.measured_at, 3),
                "rows_ms": [[size, round(ms, 6)] for size, ms in self.cost.rows],
                "heads_ms": [[size, round(ms, 6)] for size, ms in self.cost.heads],
                "guessed": list(self.cost.guessed),
                "factors": {str(bucket): round(factor, 6) for bucket, factor in sorted(self.factors.items())},
            }
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    trusted: bool
    reason: str


def key_of(facts: Mapping[str, str]) -> str:
    """The fingerprint: 32 hexadecimal digits, the same for the same facts in any order."""
    return hashlib.sha256(json.dumps(sorted(facts.items())).encode()).hexdigest()[:32]


def neighbourhood(facts: Mapping[str, str]) -> dict[str, str]:
    """Those of the facts that tables must share for one to have the other's shape: one machine, one model. A table of
    other weights' precision, or made by an older version, is a first guess where nothing was measured."""
    return {name: facts[name] for name in ("runner", "device", "cores", "model", "heads") if name in facts}


def read_record(text: str, facts: Mapping[str, str], now: float, *, only_these: bool = False) -> CostRecord:
    """Raises :class:`UnusableRecord` for a text that is damaged, of another version, too old, or of another device.

    ``only_these``: it may have further facts.
    """
    try:
        found = json.loads(text)
        if not isinstance(found, dict):
            raise UnusableRecord("it is no JSON object")
        if found["version"] != VERSION:
            raise UnusableRecord(f"it is of version {found['version']!r}, this gateway reads {VERSION}")
        record = CostRecord(
            facts={str(name): str(value) for name, value in found["facts"].items()},
            measured_at=_finite(found["measured_at"]),
            cost=StepCost(
                _points(found["rows_ms"]),
                _points(found["heads_ms"], least=0),
                # Tables of earlier versions were measured whole.
                tuple(int(size) for size in found.get("guessed", ())),
            ),
            factors={int(bucket): _finite(factor) for bucket, factor in found["factors"].items()},
        )
    except UnusableRecord:
        raise
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UnusableRecord(f"it is damaged ({type(error).__name__}: {error})") from None
    names = facts.keys() if only_these else {*facts, *record.facts}
    if other := sorted(name for name in names if facts.get(name) != record.facts.get(name)):
        # The key is a digest of the facts: somebody has renamed or edited what lies there.
        raise UnusableRecord(f"it is of another device or model: {', '.join(other)} differ")
    age = now - record.measured_at
    if age > MOST_AGE_S or age < -CLOCK_SLACK_S:
        raise UnusableRecord(f"it was measured {age / 86_400:.1f} days ago")
    return record


def judge(kept: StepCost, found: Sequence[tuple[int, float]]) -> Verdict:
    """Whether a kept table holds here and now. ``found``: milliseconds by rows, just measured.

    What is decided by a table depends on its shape, so that is held to more strictly than its level, which moves with
    what else the machine does. A table from a busy moment fails at the first start in a quiet one, by its level.
    """
    ratios = [(rows, ms / kept.forward_ms(rows)) for rows, ms in found if rows not in kept.guessed]
    level = statistics.median(ratio for _, ratio in ratios)
    if not 1 / _LEVEL_OFF <= level <= _LEVEL_OFF:
        return Verdict(False, f"steps take {level:.2f} times what it says")
    rows, worst = max(ratios, key=lambda each: abs(math.log(each[1] / level)))
    if not 1 / _SHAPE_OFF <= worst / level <= _SHAPE_OFF:
        return Verdict(False, f"{rows} rows take {worst:.2f} times what it says, others {level:.2f}")
    return Verdict(True, f"steps take {level:.2f} times what it says")


def restless(times: Mapping[int, Sequence[float]]) -> bool:
    """Whether a measurement fell into a moment too busy to be kept for others: its runs of one size differ.

    ``times``: milliseconds of every run, by size.
    """
    return statistics.median(statistics.median(runs) / min(runs) for runs in times.values()) > _RESTLESS


def _points(found: Any, least: int = 1) -> tuple[tuple[int, float], ...]:
    points = tuple((int(size), _finite(ms)) for size, ms in found)
    sizes, times = [size for size, _ in points], [ms for _, ms in points]
    if len(points) < least or sizes != sorted(set(sizes)) or times != sorted(times) or any(size < 1 for size in sizes):
        raise UnusableRecord("its points are not ascending")
    return points


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number) or number <= 0.0:
        raise UnusableRecord(f"it holds {value!r} where a positive number belongs")
    return number
