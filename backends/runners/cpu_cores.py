"""Which processor this is, and how many of its cores there are to use."""

from __future__ import annotations

import os
import platform
from pathlib import Path

CPU_VARIABLE = "MEDUSA_CPU"


def asked_variant() -> str | None:
    """The variant of the kernels that ``MEDUSA_CPU`` asks for; None: the best that the CPU can run."""
    asked = os.environ.get(CPU_VARIABLE) or "native"
    return None if asked == "native" else asked


def torch_has_quick_bf16() -> bool:
    """Whether torch multiplies bfloat16 numbers on this CPU about as fast as float32 ones, or faster."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


def usable_cores() -> int:
    """Cores that this process may use: fewer than the machine's in a container or under taskset."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_name() -> str:
    """The model as Linux calls it; without that, as Python does."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split())
    except OSError:
        pass
    return platform.processor() or platform.machine()
