"""Kernels compiled for ARM and run under qemu give the bits that they give here; ``make test-arm`` does only this."""

from __future__ import annotations

import platform
import random
import shutil
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from backends.engine.loading import EngineOptions, build_core, load_parts
from backends.proof.lossless import verify_lossless
from backends.runners.native import bindings as lib
from backends.runners.native.runner import NativeRunner
from tests.support import arm
from tests.support.engine_helpers import FLAT_COST, native_or_skip, one_thread, random_prompt

__all__ = ["one_thread"]


@pytest.fixture(scope="module")
def programs() -> dict[str, Path]:
    if reason := arm.unavailable():
        pytest.skip(reason)
    return arm.build("aarch64")


def test_every_kernel(programs: dict[str, Path]) -> None:
    """Linear layers, norms, rotation, attention, heads, eight bits, exponentials, rounding, maxima and draws, over
    random numbers and odd shapes. Here: by the lowest variant, which any machine of the kind runs."""
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("compares ARM with x86")
    lowest = list(lib.variant_flags())[-1]
    here = arm.run(arm.build(platform.machine(), only=lowest)[lowest])
    assert len(here) == 17
    with ThreadPoolExecutor() as workers:
        for variant, found in zip(programs, workers.map(arm.run, programs.values()), strict=True):
            assert found == here, variant


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_whole_models(architecture: str, dtype: str, programs: dict[str, Path], tmp_path: Path) -> None:
    """Every step of a proof of losslessness, decoded here and then again by the kernels for ARM: prompts in chunks,
    trees in company, single rows, and what is accepted of them, bit by bit."""
    native_or_skip()
    options = EngineOptions(model=f"tiny-random:{architecture}", dtype=dtype, runner="native", threads=1)
    loaded = build_core(load_parts(options), options, cost=FLAT_COST)
    runner = loaded.core.runner
    assert isinstance(runner, NativeRunner)
    recording, rng = arm.Recording(runner), random.Random(architecture)
    report = verify_lossless(loaded, [random_prompt(rng, 3, 60) for _ in range(5)], seed=3, max_tokens=12)
    assert report.lossless, report
    assert report.accepted > 5
    assert all(recording.calls.values())
    saved = recording.save(tmp_path / "recording")
    for variant, program in programs.items():
        lines = [tuple(line.split()) for line in arm.run(program, saved)]
        found = Counter((name, verdict) for name, _, verdict in lines)
        assert found == {(name, "equal"): recording.calls[name] for name in ("forward", "logits")}, variant
        rows = [int(count) for name, count, _ in lines if name == "forward"]
        assert min(rows) == 1 and max(rows) > 10


def test_a_bit_that_differs_is_seen(programs: dict[str, Path], tmp_path: Path) -> None:
    """Of the last answer that was recorded: the program would say so of any."""
    native_or_skip()
    options = EngineOptions(model="tiny-random:llama", dtype="float32", runner="native", threads=1)
    runner = build_core(load_parts(options), options, cost=FLAT_COST).core.runner
    assert isinstance(runner, NativeRunner)
    recording = arm.Recording(runner)
    runner.logits(runner.embed([1, 2, 3]))
    recording.written[-1] ^= 1
    (line,) = arm.run(programs["neon"], recording.save(tmp_path / "recording"))
    assert line == "logits 3 DIFFERENT"


@pytest.mark.parametrize(("cpu", "without"), [("cortex-a57", 1), ("neoverse-n1", 0), ("max", 0)])
def test_what_a_cpu_can_run_is_seen_at_load(cpu: str, without: int, programs: dict[str, Path]) -> None:
    assert arm.run(programs["generic"], "variants", cpu=cpu) == list(lib.variant_flags("aarch64"))[without:]


@pytest.mark.parametrize("machine", ["aarch64", "arm64"])
def test_variants_that_can_be_asked_for(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    runnable = ["neon", "generic"]
    assert [lib.chosen_variant(asked, runnable) for asked in (None, *runnable)] == ["neon", *runnable]
    with pytest.raises(ValueError, match="MEDUSA_CPU is 'neon_dotprod', which this CPU can't run; it can run neon"):
        lib.chosen_variant("neon_dotprod", runnable)
    with pytest.raises(ValueError, match="MEDUSA_CPU is 'avx2'; it can be neon_dotprod, neon, generic or"):
        lib.chosen_variant("avx2", runnable)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None if name.startswith("qemu") else name)
    reason = arm.unavailable()
    assert reason is not None
    assert reason.startswith("no qemu-aarch64-static here: apt-get install")
