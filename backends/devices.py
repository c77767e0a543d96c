"""Accelerators as the driver sees them: what they hold and draw, and whether they can run a model. Free of torch.

``nvidia-ml-py`` (the extra ``nvidia``) is asked once a second at most, from the thread that wants to know, never in a
step. Where it is missing, or the driver doesn't answer, there is nothing to tell and nothing breaks.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from backends.types import DeviceReading

log = logging.getLogger(__name__)

LEAST_CAPABILITY = (8, 0)
"""bfloat16 in its matrix instructions: Ampere (A100, sm_80) and later."""


@dataclass(slots=True)
class Nvml:
    """One NVIDIA device. ``uuid``: as torch tells it, which no environment variable renumbers; "GPU-" before it may be
    left out, a MIG slice's begins with "MIG-". ``library``: for tests."""

    uuid: str
    library: Any = None
    _handle: Any = None
    _gone: bool = False
    _tried: bool = field(default=False, init=False)

    def read(self) -> DeviceReading | None:
        """None where the driver can't be asked. What a device doesn't tell (a MIG slice has no utilisation of its own)
        is None in the reading."""
        if not self._open():
            return None
        library, handle = self.library, self._handle
        try:
            memory = library.nvmlDeviceGetMemoryInfo(handle)
        except library.NVMLError as error:
            self._give_up(f"NVML does not tell the memory of {self.uuid}: {error}")
            return None

        def told(ask: Callable[[], float]) -> float | None:
            try:
                return ask()
            except library.NVMLError:
                return None

        return DeviceReading(
            memory_used=memory.used,
            memory_total=memory.total,
            utilization=told(lambda: library.nvmlDeviceGetUtilizationRates(handle).gpu / 100.0),
            power_w=told(lambda: library.nvmlDeviceGetPowerUsage(handle) / 1e3),
        )

    def _open(self) -> bool:
        if self._tried:
            return not self._gone
        self._tried = True
        try:
            if self.library is None:
                self.library = importlib.import_module("pynvml")
        except ImportError:
            self._give_up("memory, utilisation and power of GPUs are not told: pip install 'medusa-gateway[nvidia]'")
            return False
        try:
            self.library.nvmlInit()
            self._handle = self.library.nvmlDeviceGetHandleByUUID(
                self.uuid if self.uuid.startswith(("GPU-", "MIG-")) else f"GPU-{self.uuid}"
            )
        except self.library.NVMLError as error:
            self._give_up(f"NVML does not know the device {self.uuid}: {error}")
            return False
        return True

    def _give_up(self, why: str) -> None:
        self._gone = True
        log.warning("%s", why)


@dataclass(frozen=True, slots=True)
class CudaFacts:
    """What torch says of CUDA here. ``built_for``: the CUDA version that torch was built for, None for a build without;
    ``driver``: the newest CUDA version that the installed driver can run, None where there is no driver."""

    built_for: str | None
    driver: tuple[int, int] | None
    devices: tuple[tuple[str, tuple[int, int]], ...]
    """Name and compute capability of each visible device."""


def device_fault(device: str, facts: CudaFacts, dtype: str = "auto") -> str | None:
    """Why a model can't run on ``device`` ("cuda", "cuda:N"), and what mends it; None: it can. Pure."""
    if facts.built_for is None:
        return f"device {device}: this torch is built without CUDA; install a CUDA build of torch, or use --device cpu"
    if facts.driver is None:
        return (
            f"device {device}: no NVIDIA driver answers here. Check that nvidia-smi works; in a container, that it was "
            "started with the GPU (docker run --gpus all, or the resource nvidia.com/gpu in Kubernetes); or use "
            "--device cpu"
        )
    needed = tuple(int(part) for part in facts.built_for.split(".")[:2])
    if facts.driver[0] < needed[0]:
        return (
            f"device {device}: the driver runs CUDA up to {facts.driver[0]}.{facts.driver[1]}, this torch is built for "
            f"{facts.built_for}; install a newer driver, or a torch that is built for CUDA {facts.driver[0]}"
        )
    if not facts.devices:
        return (
            f"device {device}: the driver answers, but no device is visible. CUDA_VISIBLE_DEVICES may be empty, or the "
            "container was given none"
        )
    number = int(device.partition(":")[2] or 0)
    if number >= len(facts.devices):
        known = ", ".join(f"cuda:{index} ({name})" for index, (name, _) in enumerate(facts.devices))
        return f"device {device}: there are {len(facts.devices)} device(s): {known}"
    name, capability = facts.devices[number]
    if capability < LEAST_CAPABILITY and dtype != "float32":
        return (
            f"device {device}: {name} has compute capability {capability[0]}.{capability[1]}, bfloat16 needs "
            f"{LEAST_CAPABILITY[0]}.{LEAST_CAPABILITY[1]} (A100 and later); use --dtype float32"
        )
    return None


def out_of_memory(device: str, doing: str, wanted: int | None, free: int, total: int) -> str:
    """What is said when a device's memory does not suffice. Sizes in bytes; ``wanted`` None: not known."""
    asked = "" if wanted is None else f" of {_gib(wanted)}"
    return (
        f"device {device} has too little memory for {doing}{asked}: {_gib(free)} of {_gib(total)} are free. Fewer "
        "kv_tokens or max_running, a smaller max_model_len, or a quantised model need less; nvidia-smi shows who holds "
        "the rest"
    )


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.2f} GiB"
