"""What was measured, as numbers: pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Answer:
    """``sent`` and the times in ``chunks`` (time, tokens) in seconds since its run began. ``tokens``: ids, or pieces of
    text of a peer that tells no ids."""

    sent: float
    chunks: tuple[tuple[float, int], ...]
    tokens: tuple[Any, ...]

    @classmethod
    def parse(cls, told: Mapping[str, Any]) -> Answer:
        """Raises KeyError, TypeError or ValueError for what no worker should say."""
        chunks = tuple((float(at), int(count)) for at, count in told["chunks"])
        return cls(float(told["sent"]), chunks, tuple(told["tokens"]))

    @property
    def num_tokens(self) -> int:
        return sum(count for _, count in self.chunks)

    @property
    def first_token_s(self) -> float | None:
        return self.chunks[0][0] - self.sent if self.chunks else None

    @property
    def per_token_s(self) -> float | None:
        """From the first token on, by later token: what it takes to stream one (TPOT); None of shorter answers."""
        later = self.num_tokens - self.chunks[0][1] if self.chunks else 0
        return (self.chunks[-1][0] - self.chunks[0][0]) / later if later else None


def tokens_per_second(answers: Sequence[Answer]) -> float:
    """Of all answers of a run, until its last token."""
    end = max((answer.chunks[-1][0] for answer in answers if answer.chunks), default=0.0)
    return sum(answer.num_tokens for answer in answers) / end if end else 0.0


def percentile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at least ``share`` of them don't exceed; None of none."""
    ordered = sorted(values)
    rank = max(0, -(-round(share * 1000) * len(ordered) // 1000) - 1)
    return ordered[rank] if ordered else None


def median_ratio(above: Sequence[float], below: Sequence[float]) -> float | None:
    """The median of the ratios of what stood side by side; None where nothing did."""
    ratios = [a / b for a, b in zip(above, below, strict=False) if b]
    return statistics.median(ratios) if ratios else None
