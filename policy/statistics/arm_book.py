"""What is believed of upstreams by how they decode: time to the first word, time per token, failures. Pure, but for the
book that holds it.

Kept by (model, class, temperature bucket, variant, load bucket), in the counters that engines use, so they go by way of
the same store: merged over replicas, and there again after a restart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from backends.types import DecodeCounters
from policy.statistics.counters import StatsKey, Tally, sum_tallies

LOADS = ("light", "medium", "busy", "full")
_LOAD_LIMITS = (0.25, 0.5, 1.0)
FAST_HALF_LIFE, SLOW_HALF_LIFE = 3.0, 40.0
"""In answers. The long memory is what is believed; the short one finds out that it is no longer true."""
PRIOR_REQUESTS = 3.0
"""What earlier days may count for."""
DOUBTED_REQUESTS = 0.5
"""What an arm's evidence counts for after the speed of another one has changed: whatever changed that may have changed
this too, so the next answer decides."""
ENOUGH_REQUESTS = 2.0
"""With fewer at the very load and temperature, evidence at others is taken with it."""
_SHIFT_SHARE, _SHIFT_SIGMAS = 0.15, 3.0
_SHIFT_ANSWERS, _CLEAR_FACTOR = 3.0, 1.5
_LINE_ANSWERS, _LINE_SPREAD = 4.0, 0.2


def load_bucket(load: float) -> str:
    """``load``: sequences over those that run at once, the one that is asked for included."""
    return next((name for name, most in zip(LOADS, _LOAD_LIMITS, strict=False) if load <= most), LOADS[-1])


def counters_of(*, prompt_tokens: int, tokens: int, first_s: float, gap_s: float, gap_tokens: int) -> DecodeCounters:
    """Of one whole answer. ``first_s``: from sending to its first piece; ``gap_s``: from there to its last word, in
    which ``gap_tokens`` of its ``tokens`` came."""
    first_us, gap_us = round(first_s * 1e6), round(gap_s * 1e6)
    counters = DecodeCounters(
        steps=1,
        requests=1,
        emitted_tokens=tokens,
        prompt_tokens=prompt_tokens,
        prompt_squares=prompt_tokens**2,
        first_us=first_us,
        first_prompt=first_us * prompt_tokens,
    )
    if gap_tokens > 0:
        pace = gap_us // gap_tokens
        counters.gap_us, counters.gap_tokens = gap_us, gap_tokens
        counters.paces, counters.pace_us, counters.pace_squares = 1, pace, pace**2
    return counters


def failure() -> DecodeCounters:
    """Of one request that failed by the upstream's fault."""
    return DecodeCounters(steps=1, failures=1)


@dataclass(frozen=True, slots=True)
class ArmFigures:
    """Seconds. A first word takes ``first_s`` and ``first_per_token_s`` for each token of the prompt.

    ``per_token_s`` None: no answer had a second piece. ``requests``: the weight of the evidence after decay. ``load``:
    where it is from; "any" if from several. ``doubted``: the speed of another arm has changed since.
    """

    requests: float
    first_s: float
    first_per_token_s: float
    per_token_s: float | None
    failure_share: float
    answer_tokens: float
    age_s: float
    load: str
    doubted: bool = False

    def expected_first_s(self, prompt_tokens: int) -> float:
        return self.first_s + self.first_per_token_s * prompt_tokens

    def expected_s(self, prompt_tokens: int, tokens: float) -> float:
        """For a whole answer of so many tokens, failures included: each costs as much again."""
        once = self.expected_first_s(prompt_tokens) + (self.per_token_s or 0.0) * max(tokens - 1, 0.0)
        return once / max(1.0 - self.failure_share, 0.01)


@dataclass(frozen=True, slots=True)
class ArmCell:
    """Two decayed sums under one key."""

    fast: Tally = field(default_factory=Tally)
    slow: Tally = field(default_factory=Tally)
    updated_at: float = 0.0
    shifts: int = 0
    doubted: bool = False

    def updated(self, delta: Tally, now: float) -> ArmCell:
        answers = delta.get("requests") + delta.get("failures")
        fast = self.fast.scaled(0.5 ** (answers / FAST_HALF_LIFE)).plus(delta)
        slow = self.slow.scaled(0.5 ** (answers / SLOW_HALF_LIFE)).plus(delta)
        if shifted(fast, slow):
            return ArmCell(fast, fast, now, self.shifts + 1)
        return ArmCell(fast, slow, now, self.shifts)

    def in_doubt(self) -> ArmCell:
        answers = self.slow.get("requests") + self.slow.get("failures")
        factor = min(DOUBTED_REQUESTS / answers, 1.0) if answers > 0 else 1.0
        slow = self.slow.scaled(factor)
        return replace(self, fast=slow, slow=slow, doubted=True)


def shifted(fast: Tally, slow: Tally) -> bool:
    """Whether the latest times per token differ from those before by more than chance, and enough to matter."""
    recent, past = fast.get("paces"), slow.get("paces")
    if recent < _SHIFT_ANSWERS - 0.5 or past <= recent:
        return False
    mean, before = fast.get("pace_us") / recent, slow.get("pace_us") / past
    variance = max(slow.get("pace_squares") / past - before**2, 0.0)
    chance = _SHIFT_SIGMAS * math.sqrt(variance * (1 / recent + 1 / past))
    # A memory of two speeds has so much spread that nothing would surprise it.
    clear = max(mean, before) > _CLEAR_FACTOR * min(mean, before)
    return clear or abs(mean - before) > max(_SHIFT_SHARE * before, chance)


class ArmBook:
    """Used from one thread only."""

    def __init__(self) -> None:
        self._cells: dict[tuple[str, str], dict[StatsKey, ArmCell]] = {}

    def learn(self, key: StatsKey, counters: DecodeCounters, now: float) -> None:
        cells = self._cells.setdefault((key.model, key.class_name), {})
        before = cells.get(key) or ArmCell()
        cells[key] = before.updated(Tally.of(counters), now)
        if cells[key].shifts > before.shifts and key.variant is not None:
            for other, cell in cells.items():
                if other.variant is not None and other.variant[0] != key.variant[0]:
                    cells[other] = cell.in_doubt()

    def doubt(self, model: str, class_name: str) -> None:
        """Something has changed: what is remembered of the class gives way to its next answers."""
        cells = self._cells.get((model, class_name), {})
        for key, cell in cells.items():
            cells[key] = cell.in_doubt()

    def take_past(self, key: StatsKey, tally: Tally, now: float) -> None:
        """Start from what the store remembers, at a weight that present traffic soon outgrows."""
        answers = tally.get("requests") + tally.get("failures")
        if answers <= 0:
            return
        past = tally.scaled(min(PRIOR_REQUESTS / answers, 1.0))
        cells = self._cells.setdefault((key.model, key.class_name), {})
        present = cells.get(key)
        cells[key] = ArmCell(past, past, now) if present is None else replace(present, slow=present.slow.plus(past))

    def figures(
        self, model: str, class_name: str, bucket: str, variant: str, load: str, now: float
    ) -> ArmFigures | None:
        """The nearest evidence there is: at this temperature and load, at this load, at any. None: none at all."""
        cells = {
            key: cell
            for key, cell in self._cells.get((model, class_name), {}).items()
            if key.variant is not None and key.variant[0] == variant
        }
        exact = [cell for key, cell in cells.items() if key.bucket == bucket and key.variant == (variant, load)]
        same_load = [cell for key, cell in cells.items() if key.variant == (variant, load)]
        for near, where in ((exact, load), (same_load, load), (list(cells.values()), "any")):
            tally = sum_tallies(each.slow for each in near)
            if tally.get("requests") >= ENOUGH_REQUESTS or (where == "any" and tally.get("requests") > 0):
                newest = max(each.updated_at for each in near)
                return _figures(tally, now - newest, where, all(each.doubted for each in near))
        return None

    def answer_tokens(self, model: str, class_name: str) -> float | None:
        """How long answers of the class are, whoever gave them."""
        total = sum_tallies(
            cell.slow for key, cell in self._cells.get((model, class_name), {}).items() if key.variant is not None
        )
        return total.get("emitted_tokens") / total.get("requests") if total.get("requests") > 0 else None

    def cells(self) -> list[tuple[StatsKey, ArmCell]]:
        return [item for cells in self._cells.values() for item in cells.items()]


def figures_of(cell: ArmCell, load: str, now: float) -> ArmFigures | None:
    """Of one key alone; None where no answer was whole."""
    if cell.slow.get("requests") <= 0:
        return None
    return _figures(cell.slow, now - cell.updated_at, load, cell.doubted)


def as_evidence(figures: ArmFigures) -> dict[str, Any]:
    """For people, in milliseconds."""
    pace = figures.per_token_s
    return {
        "load": figures.load,
        "requests": round(figures.requests, 1),
        "age_s": round(figures.age_s, 1),
        "first_token_ms": round(figures.first_s * 1e3, 3),
        "first_token_ms_per_prompt_token": round(figures.first_per_token_s * 1e3, 4),
        "ms_per_token": None if pace is None else round(pace * 1e3, 3),
        "failure_share": round(figures.failure_share, 4),
        "answer_tokens": round(figures.answer_tokens, 1),
    }


def _figures(tally: Tally, age_s: float, load: str, doubted: bool) -> ArmFigures:
    answers = tally.get("requests")
    first, slope = _line(tally)
    gap_tokens = tally.get("gap_tokens")
    return ArmFigures(
        requests=answers,
        first_s=first / 1e6,
        first_per_token_s=slope / 1e6,
        per_token_s=tally.get("gap_us") / gap_tokens / 1e6 if gap_tokens > 0 else None,
        failure_share=tally.get("failures") / (answers + tally.get("failures")),
        answer_tokens=tally.get("emitted_tokens") / answers,
        age_s=max(age_s, 0.0),
        load=load,
        doubted=doubted,
    )


def _line(tally: Tally) -> tuple[float, float]:
    """(microseconds of a first word without a prompt, microseconds more for each of its tokens), by least squares where
    prompts differ enough to tell; else the mean, whatever the prompt."""
    answers = tally.get("requests")
    first, prompt = tally.get("first_us") / answers, tally.get("prompt_tokens") / answers
    spread = tally.get("prompt_squares") / answers - prompt**2
    if answers < _LINE_ANSWERS or spread <= (_LINE_SPREAD * prompt) ** 2:
        return first, 0.0
    slope = (tally.get("first_prompt") / answers - prompt * first) / spread
    slope = min(max(slope, 0.0), first / prompt)
    return first - slope * prompt, slope
