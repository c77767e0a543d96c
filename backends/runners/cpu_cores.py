"""Which processor this is, and how many of its cores there are to use."""

from __future__ import annotations

import os
import platform
from pathlib import Path

CPU_VARIABLE = "MEDUSA_CPU"


def instruction_set() -> str:
    """Either "native", or "avx2": what a CPU without AVX-512 would run, where ``MEDUSA_CPU=avx2`` asks for it.

    Raises ValueError for any other wish.
    """
    asked = os.environ.get(CPU_VARIABLE) or "native"
    if asked not in ("native", "avx2"):
        raise ValueError(f'{CPU_VARIABLE} is {asked!r}; it can be "avx2" or "native" (or be left out)')
    return asked


def cpu_has_bf16() -> bool:
    """Whether kernels may use dot products of bfloat16 numbers here."""
    if instruction_set() != "native":
        return False
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
