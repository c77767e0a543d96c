"""How many cores there are to use."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Cores that this process may use: fewer than the machine's in a container or under taskset."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
