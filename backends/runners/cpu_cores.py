"""Which processor this is, and how many of its cores there are to use."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
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
    """Cores that this process may use: fewer than the machine's in a container or under taskset. On a Mac the quick
    ones: a step ends with its slowest thread, so cores that save power would hold the others up."""
    if sys.platform == "darwin" and (quick := _sysctl("hw.perflevel0.logicalcpu")):
        return int.from_bytes(quick, sys.byteorder)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_name() -> str:
    """The model as the system calls it; without that, as Python does. Linux gives ARM CPUs two numbers for a name."""
    if sys.platform == "darwin" and (brand := _sysctl("machdep.cpu.brand_string")):
        return brand.rstrip(b"\0").decode()
    try:
        return named_in(Path("/proc/cpuinfo").read_text()) or _name_of_python()
    except OSError:
        return _name_of_python()


def named_in(cpuinfo: str) -> str | None:
    """The CPU that the text of ``/proc/cpuinfo`` names, of the first core; of ARM "ARM 0x41 0xd40": who made it, and
    which part it is."""
    fields: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        name, colon, value = line.partition(":")
        if colon:
            fields.setdefault(name.strip(), " ".join(value.split()))
    if "CPU implementer" in fields and "CPU part" in fields:
        return f"ARM {fields['CPU implementer']} {fields['CPU part']}"
    return fields.get("model name")


def _name_of_python() -> str:
    return platform.processor() or platform.machine()


def _sysctl(name: str) -> bytes | None:
    """What a Mac's kernel says; None where it doesn't know the name."""
    query = ctypes.CDLL(None).sysctlbyname
    value, size = ctypes.create_string_buffer(256), ctypes.c_size_t(256)
    if query(name.encode(), value, ctypes.byref(size), None, ctypes.c_size_t(0)):
        return None
    return value.raw[: size.value]
