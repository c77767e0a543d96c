"""CUDA devices at the start of an engine and in its service: whether they can be used, and what is said when not."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch

from backends.devices import CudaFacts, Nvml, device_fault, out_of_memory

# Bytes by the units in which torch tells what it could not allocate.
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def cuda_facts(torch_module: Any = torch) -> CudaFacts:
    """What torch says. ``torch_module``: for tests."""
    built_for = torch_module.version.cuda
    if built_for is None:
        return CudaFacts(None, None, ())
    try:
        version = torch_module._C._cuda_getDriverVersion()
    except RuntimeError:
        version = 0
    driver = divmod(version // 10, 100) if version else None
    devices = ()
    if driver is not None and torch_module.cuda.is_available():
        devices = tuple(
            (torch_module.cuda.get_device_name(number), torch_module.cuda.get_device_capability(number))
            for number in range(torch_module.cuda.device_count())
        )
    return CudaFacts(built_for, driver, devices)


def device_of(name: str, dtype: str = "auto", facts: Callable[[], CudaFacts] = cuda_facts) -> torch.device:
    """The device that ``--device`` names; "auto": a CUDA device that can run a model, else the CPU.

    Raises ValueError for one that can't, with what mends it.
    """
    if name == "auto":
        return torch.device("cuda" if device_fault("cuda", facts(), dtype) is None else "cpu")
    if name.startswith("cuda") and (fault := device_fault(name, facts(), dtype)):
        raise ValueError(fault)
    return torch.device(name)


@contextlib.contextmanager
def memory_told(device: torch.device, doing: str, cuda: Any = torch.cuda) -> Iterator[None]:
    """What a device has no memory for becomes a ValueError with the numbers."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ValueError(shortage(error, device, doing, cuda)) from error


def shortage(error: torch.OutOfMemoryError, device: torch.device, doing: str, cuda: Any = torch.cuda) -> str:
    """What is said of it; gives torch's unused blocks back, so that the next attempt has what there is."""
    if device.type != "cuda":
        return f"too little memory for {doing}: {error}"
    cuda.empty_cache()
    free, total = cuda.mem_get_info(device)
    found = re.search(r"Tried to allocate ([\d.]+) (bytes|[KMG]iB)", str(error))
    wanted = None if found is None else int(float(found[1]) * _UNITS[found[2]])
    return out_of_memory(str(device), doing, wanted, free, total)


def monitor_of(device: torch.device, cuda: Any = torch.cuda) -> Nvml | None:
    """Reads the device through NVML; None for a CPU."""
    return Nvml(str(cuda.get_device_properties(device).uuid)) if device.type == "cuda" else None
