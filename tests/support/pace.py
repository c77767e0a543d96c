"""How fast this machine runs Python just now: what tests of speed measure against, as absolute times say nothing."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable


def yardstick() -> None:
    """A thousand small operations on tuples and a dictionary."""
    held: dict[int, tuple[int, object]] = {}
    for i in range(1000):
        held[i & 63] = (i, held.get(i & 31))


def yardsticks(run: Callable[[], object], turns: int = 200) -> float:
    """What ``run`` takes, in yardsticks: medians of turns side by side, the best of three tries."""
    tries = []
    for _ in range(3):
        times: dict[Callable[[], object], list[int]] = {yardstick: [], run: []}
        for _ in range(turns):
            for each, found in times.items():
                began = time.perf_counter_ns()
                each()
                found.append(time.perf_counter_ns() - began)
        tries.append(statistics.median(times[run]) / statistics.median(times[yardstick]))
    return min(tries)
