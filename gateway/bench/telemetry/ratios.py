"""Paired comparisons: a median with an interval that assumes nothing of how the pairs are distributed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

CONFIDENCE = 0.95


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float] | None:
    """Order statistics that enclose the true median with at least ``confidence``; None for too few values.

    The number of values below the true median is binomial with p = 1/2 whatever the distribution, so the k-th smallest
    and the k-th largest enclose it unless fewer than k lie on one side (the sign test's interval).
    """
    count = len(values)
    tail, k = 0.0, 0
    while (tail := tail + math.comb(count, k) / 2**count) <= (1 - confidence) / 2:
        k += 1
    if k == 0:
        return None
    ordered = sorted(values)
    return ordered[k - 1], ordered[-k]


def paired_ratios(found: Sequence[float], base: Sequence[float]) -> list[float]:
    """``found`` over ``base``, round by round. Raises ValueError where they have not as many."""
    return [value / reference for value, reference in zip(found, base, strict=True)]


def summary(found: Sequence[float], base: Sequence[float]) -> tuple[float, tuple[float, float] | None]:
    """Median of the paired ratios, and its interval."""
    ratios = paired_ratios(found, base)
    return statistics.median(ratios), median_interval(ratios)
