"""Accelerators without one: a fake driver that knows, doesn't know, and goes away; messages that help."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from backends.devices import CudaFacts, Nvml, device_fault
from backends.engine.cuda import cuda_facts, device_of, memory_told, monitor_of
from backends.engine.loading import EngineOptions, load_core
from backends.engine.thread import Engine
from backends.models.tiny import TINY_MODEL_NAME
from backends.types import DecodingPlan, DeviceReading, GenerationRequest, SamplingParams

H200 = ("NVIDIA H200", (9, 0))
WELL = CudaFacts("12.8", (12, 9), (H200, H200))
OOM = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of ...")


class FakeNvml:
    """As much of ``pynvml`` as is used. ``missing``: what this device doesn't tell."""

    class NVMLError(Exception):
        pass

    def __init__(self, *missing: str, known: str = "GPU-1234") -> None:
        self.missing, self.known, self.calls = set(missing), known, 0

    def _told(self, name: str, value: Any) -> Any:
        self.calls += 1
        if name in self.missing:
            raise self.NVMLError(f"{name}: not supported")
        return value

    def nvmlInit(self) -> None:
        self._told("init", None)

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != self.known:
            raise self.NVMLError("not found")
        return uuid

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        return self._told("memory", SimpleNamespace(used=10, total=40))

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        return self._told("utilization", SimpleNamespace(gpu=25, memory=1))

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return self._told("power", 123_000)


def test_a_device_is_read_by_its_uuid() -> None:
    assert Nvml("1234", FakeNvml()).read() == DeviceReading(10, 40, 0.25, 123.0)


def test_a_slice_of_a_device_tells_its_memory_only() -> None:
    library = FakeNvml("utilization", "power", known="MIG-7")
    assert Nvml("MIG-7", library).read() == DeviceReading(10, 40, None, None)


@pytest.mark.parametrize("library", [FakeNvml("init"), FakeNvml(known="GPU-else"), FakeNvml("memory")])
def test_what_does_not_answer_is_said_once_and_left_alone(library: FakeNvml, caplog: pytest.LogCaptureFixture) -> None:
    device = Nvml("1234", library)
    assert device.read() is None
    calls = library.calls
    assert device.read() is None and library.calls == calls
    assert len(caplog.records) == 1 and "NVML does not" in caplog.text


def test_without_the_library_nothing_breaks(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    assert Nvml("1234").read() is None
    assert "pip install 'medusa-gateway[nvidia]'" in caplog.text


@pytest.mark.parametrize(
    ("device", "facts", "said"),
    [
        ("cuda", CudaFacts(None, None, ()), "built without CUDA"),
        ("cuda", CudaFacts("12.8", None, ()), "no NVIDIA driver answers.*nvidia-smi.*--gpus all"),
        ("cuda", CudaFacts("13.0", (12, 4), (H200,)), "CUDA up to 12.4, this torch is built for 13.0"),
        ("cuda", CudaFacts("12.8", (12, 8), ()), "CUDA_VISIBLE_DEVICES"),
        ("cuda:2", WELL, r"there are 2 device\(s\): cuda:0 \(NVIDIA H200\), cuda:1"),
        ("cuda", CudaFacts("12.8", (12, 8), (("Tesla T4", (7, 5)),)), "Tesla T4 has compute capability 7.5.*float32"),
    ],
)
def test_a_device_that_can_not_run_is_refused_with_what_mends_it(device: str, facts: CudaFacts, said: str) -> None:
    with pytest.raises(ValueError, match=f"device {device}: .*{said}"):
        device_of(device, facts=lambda: facts)
    if device == "cuda":
        assert device_of("auto", facts=lambda: facts) == torch.device("cpu")


def test_devices_that_can() -> None:
    assert device_of("cuda:1", facts=lambda: WELL) == torch.device("cuda:1")
    assert device_of("auto", facts=lambda: WELL) == torch.device("cuda")
    assert device_fault("cuda", CudaFacts("12.8", (12, 1), (("Tesla T4", (7, 5)),)), "float32") is None
    assert device_of("cpu", facts=lambda: pytest.fail("not asked")) == torch.device("cpu")


def test_facts_are_what_torch_says() -> None:
    cuda = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 1,
        get_device_name=lambda number: "A100",
        get_device_capability=lambda number: (8, 0),
    )
    driver = SimpleNamespace(_cuda_getDriverVersion=lambda: 12040)
    fake = SimpleNamespace(version=SimpleNamespace(cuda="12.4"), _C=driver, cuda=cuda)
    assert cuda_facts(fake) == CudaFacts("12.4", (12, 4), (("A100", (8, 0)),))
    driver._cuda_getDriverVersion = lambda: 0
    assert cuda_facts(fake) == CudaFacts("12.4", None, ())
    assert monitor_of(torch.device("cpu")) is None


def test_too_little_memory_at_the_start_is_told_with_numbers() -> None:
    emptied: list[bool] = []
    cuda = SimpleNamespace(mem_get_info=lambda device: (1 << 30, 80 << 30), empty_cache=lambda: emptied.append(True))
    said = r"cuda:1 has too little memory for the weights of m of 2.50 GiB: 1.00 GiB of 80.00 GiB are free"
    with pytest.raises(ValueError, match=said), memory_told(torch.device("cuda:1"), "the weights of m", cuda):
        raise OOM
    assert emptied


async def test_too_little_memory_in_a_step_costs_its_requests_only(caplog: pytest.LogCaptureFixture) -> None:
    loaded = load_core(EngineOptions(model=TINY_MODEL_NAME, runner="transformers"))
    runner, broken = loaded.core.runner, [True]
    forward = runner.forward

    def fails_once(batch: Any) -> torch.Tensor:
        if broken:
            broken.pop()
            raise OOM
        return forward(batch)

    runner.forward = fails_once  # type: ignore[method-assign]
    engine = Engine(loaded.core, loaded.info, device=Nvml("1234", FakeNvml()))
    try:
        assert engine.device_reading() == DeviceReading(10, 40, 0.25, 123.0)
        reasons = []
        for name in ("first", "second"):
            request = GenerationRequest(name, (70, 71, 72), SamplingParams(max_tokens=3), DecodingPlan())
            async with asyncio.timeout(60):
                reasons.append([chunk.finish_reason async for chunk in engine.submit(request)][-1])
        assert reasons[0] == "error" and reasons[1] in ("length", "stop")
        assert engine.alive
        said = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
        assert any(message.startswith("too little memory for a step") for message in said)
    finally:
        engine.close()
