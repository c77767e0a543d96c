"""Kernels for ARM on another kind of machine: compiled across, run under qemu. ``make test-arm``."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import struct
import subprocess
import sys
import tempfile
from array import array
from collections.abc import Callable
from functools import partial
from pathlib import Path

import platformdirs
import torch
from torch import Tensor

from backends.runners.batch import StepBatch
from backends.runners.native import bindings as lib
from backends.runners.native.runner import NativeRunner
from tests.support.paths import ROOT

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64-static"
PACKAGES = "gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user-static"
# The least that has what a variant needs: what else it used would be an illegal instruction.
LEAST_CPU = {"neon_dotprod": "neoverse-n1", "neon": "cortex-a57", "generic": "cortex-a57"}
STRICT = ("-Wall", "-Wextra", "-Werror")
PROGRAM = ROOT / "tests" / "backends" / "runners" / "kernel_hashes.c"


def unavailable() -> str | None:
    """What is missing here, and where Debian has it."""
    missing = [name for name in (COMPILER, EMULATOR, "gcc") if shutil.which(name) is None]
    return f"no {' and no '.join(missing)} here: apt-get install gcc {PACKAGES}" if missing else None


def build(machine: str, *, only: str | None = None) -> dict[str, Path]:
    """The program for every variant of a machine, or one of them, compiled side by side unless the cache has it."""
    compiler = COMPILER if machine == "aarch64" else "gcc"
    folder = Path(platformdirs.user_cache_dir("medusa-gateway")) / "native" / f"hashes-{_digest(compiler, machine)}"
    folder.mkdir(parents=True, exist_ok=True)
    sources = [str(PROGRAM), str(lib.SOURCE_FOLDER / "variants.c")]
    variants = {name: each for name, each in lib.variant_flags(machine).items() if only in (None, name)}
    made = {variant: folder / f"{machine}-{variant}" for variant in variants}
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        running = {}
        for variant, flags in variants.items():
            if not made[variant].exists():
                options = [*lib.FLAGS, *STRICT, "-static", *flags, f"-DMG_VARIANT={variant}", f"-I{lib.SOURCE_FOLDER}"]
                command = [compiler, *options, *sources, "-o", f"{scratch}/{variant}", "-lm"]
                running[variant] = subprocess.Popen(command)
        failed = [process.args for process in running.values() if process.wait()]
        assert not failed
        for variant in running:
            Path(scratch, variant).replace(made[variant])
    return made


def _digest(compiler: str, machine: str) -> str:
    """Of all that the programs are made of."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    digest = hashlib.sha256("\0".join([version, *lib.FLAGS, *STRICT, repr(lib.variant_flags(machine))]).encode())
    for source in (*(lib.SOURCE_FOLDER / name for name in lib.SOURCES), PROGRAM, PROGRAM.with_name("kernel_units.c")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def run(program: Path, *arguments: str | Path, cpu: str | None = None) -> list[str]:
    """The lines that it prints; of ARM's, under the emulator of ``cpu``, or of the least that the variant needs."""
    machine, _, variant = program.name.partition("-")
    command = [EMULATOR, "-cpu", cpu or LEAST_CPU[variant]] if machine == "aarch64" else []
    result = subprocess.run([*command, program, *arguments], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


class Recording:
    """All that a runner is asked to compute from now on, and what it answers, as ``kernel_hashes.c`` reads it.

    Integers of 32 bits, and blocks of bytes after their length: the model first, then call after call.
    """

    def __init__(self, runner: NativeRunner) -> None:
        self.written = bytearray()
        self.calls = {"forward": 0, "logits": 0, "copy_slots": 0}
        self._runner = runner
        self._model()
        for call, name in enumerate(self.calls, 1):
            setattr(runner, name, partial(getattr(self, f"_{name}"), call, getattr(runner, name)))

    def save(self, path: Path) -> Path:
        path.write_bytes(self.written + bytes(4))
        return path

    def _integers(self, *values: int) -> None:
        self.written += struct.pack(f"<{len(values)}i", *values)

    def _block(self, data: bytes) -> None:
        self._integers(len(data))
        self.written += data

    def _at(self, address: int | None, size: int) -> None:
        self._block(b"" if address is None else ctypes.string_at(address, size))

    def _model(self) -> None:
        runner = self._runner
        m, size = runner._model, runner.dtype.itemsize
        self._integers(m.layers, m.hidden, m.heads, m.kv_heads, m.head_dim, m.intermediate, m.is_bf16, m.vocab)
        self._integers(m.max_context)
        self.written += struct.pack("<ff", m.eps, m.scale)
        self._integers(m.pages, runner.max_rows, runner.lm_head.shape[0])
        q_size, kv_size = m.heads * m.head_dim, m.kv_heads * m.head_dim
        for layer in runner._layers:
            self._at(layer.qkv, (q_size + 2 * kv_size) * m.hidden * size)
            self._at(layer.o, m.hidden * q_size * size)
            self._at(layer.gate_up, 2 * m.intermediate * m.hidden * size)
            self._at(layer.down, m.hidden * m.intermediate * size)
            self._at(layer.attention_norm, 4 * m.hidden)
            self._at(layer.mlp_norm, 4 * m.hidden)
            self._at(layer.qkv_bias, 4 * (q_size + 2 * kv_size))
            self._at(layer.q_norm, 4 * m.head_dim)
            self._at(layer.k_norm, 4 * m.head_dim)
        self._at(m.embed, m.vocab * m.hidden * size)
        self._at(m.final_norm, 4 * m.hidden)
        self._at(m.cos, 4 * m.max_context * m.head_dim // 2)
        self._at(m.sin, 4 * m.max_context * m.head_dim // 2)
        self._block(_bytes(runner.lm_head))

    def _forward(self, call: int, forward: Callable[[StepBatch], Tensor], batch: StepBatch) -> Tensor:
        self.calls["forward"] += 1
        found = forward(batch)
        self._integers(call)
        self._block(batch.memory.tobytes())
        self._block(struct.pack(f"<{len(batch.ends)}i", *batch.ends))
        self._block(_bytes(found))
        return found

    def _logits(self, call: int, logits: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        self.calls["logits"] += 1
        found = logits(hidden)
        self._integers(call)
        self._block(_bytes(hidden))
        self._at(found.data_ptr(), 4 * found.shape[0] * found.stride(0))
        return found

    def _copy_slots(
        self, call: int, copy_slots: Callable[[list[int], list[int]], None], source: list[int], target: list[int]
    ) -> None:
        self.calls["copy_slots"] += 1
        copy_slots(source, target)
        self._integers(call)
        self._block(array("i", [*source, *target]).tobytes())


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()


def main() -> int:
    if reason := unavailable():
        print(f"the kernels for ARM can't be tested: {reason}", file=sys.stderr)
        return 1
    return subprocess.run([sys.executable, "-m", "pytest", "tests/backends/runners/test_arm.py"], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
