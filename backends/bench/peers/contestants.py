"""Who takes part, and what each needs: an environment, weights in its format, options of its adapter."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backends.bench.peers.environments import python_of
from backends.bench.peers.weights import gguf_file

VANILLA, AGAIN = "vanilla", "vanilla-again"
_WORKERS = Path(__file__).parent / "workers"


class Unavailable(Exception):
    """A contestant that can't take part here; the message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class Program:
    """One process. ``environment`` None: this one. ``gguf``: the kind of weights in a GGUF file that it loads, if it
    does."""

    name: str
    adapter: str
    environment: str | None = None
    gguf: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Contestant:
    """``mode``: what its program is told with every run, so that contestants can share a process and its weights."""

    name: str
    program: Program
    mode: str = ""


@dataclass(frozen=True, slots=True)
class Place:
    """Where and with what a run takes place; the same for all. ``model``: a folder; ``demo``: it is the demo model's.

    ``cpu``: "native", or "avx2" for what a CPU without AVX-512 would run, as far as each can be told to.
    """

    model: Path
    demo: bool
    eos: Sequence[int]
    threads: int
    folder: Path
    cpu: str = "native"
    heads: str | None = None
    dtype: str | None = None
    context: int = 2048
    kv_tokens: int = 8192


_OWN = Program("own", "own.py")
_LLAMA = {kind: Program(f"llama-{kind}", "llama_cpp.py", "llama-cpp", kind) for kind in ("BF16", "Q8_0", "Q4_1")}


def _looking_up(program: Program, how: str | bool = True) -> Program:
    return Program(f"{program.name}-lookup", program.adapter, program.environment, program.gguf, {"lookup": how})


_VLLM = Program("vllm", "vllm_cpu.py", "vllm")
_OPENVINO = Program("openvino", "openvino_genai_cpu.py", "openvino", "F16")
_OPENVINO_Q8 = Program("openvino-q8", "openvino_genai_cpu.py", "openvino", "Q8_0")

CONTESTANTS: dict[str, Contestant] = {
    each.name: each
    for each in (
        Contestant(VANILLA, _OWN, "vanilla"),
        Contestant(AGAIN, _OWN, "vanilla"),
        Contestant("adaptive", _OWN, "adaptive"),
        Contestant("int8", Program("own-int8", "own.py", options={"quantize": "int8"}), "adaptive"),
        Contestant("llama-bf16", _LLAMA["BF16"]),
        Contestant("llama-bf16-lookup", _looking_up(_LLAMA["BF16"], "NGRAM_SIMPLE")),
        Contestant("llama-q8", _LLAMA["Q8_0"]),
        Contestant("llama-q8-lookup", _looking_up(_LLAMA["Q8_0"], "NGRAM_SIMPLE")),
        Contestant("llama-q4", _LLAMA["Q4_1"]),
        Contestant("llama-q4-lookup", _looking_up(_LLAMA["Q4_1"], "NGRAM_SIMPLE")),
        Contestant("vllm", _VLLM),
        Contestant("vllm-lookup", _looking_up(_VLLM)),
        Contestant("openvino", _OPENVINO),
        Contestant("openvino-lookup", _looking_up(_OPENVINO)),
        Contestant("openvino-q8", _OPENVINO_Q8),
        Contestant("transformers", Program("transformers", "transformers_generate.py")),
    )
}
"""In the order of the table. :data:`AGAIN` is the first once more: how far two runs of the same thing are apart."""

USUAL = tuple(name for name in CONTESTANTS if name not in ("vllm-lookup", "openvino-q8"))
"""So many that a round of them, and their loading, are a matter of minutes."""
QUICK = (VANILLA, AGAIN, "adaptive", "llama-bf16", "llama-q4", "llama-q4-lookup", "openvino")


def command(program: Program, place: Place) -> list[str]:
    """How its worker is started. Raises :class:`Unavailable` when its environment is not there."""
    if program.environment is None:
        python: Path | str = sys.executable
    else:
        found = python_of(program.environment, place.folder)
        if found is None:
            raise Unavailable(f"its environment {program.environment} is not made; run: make peers")
        python = found
    return [str(python), str(_WORKERS / "main.py"), str(_WORKERS / program.adapter)]


def server_command(program: Program, place: Place, options: Mapping[str, Any]) -> list[str]:
    """How its HTTP server is started. Raises :class:`Unavailable` for a peer of which there is none here."""
    if program.environment != "llama-cpp":
        raise Unavailable(f"{program.name} has no server here")
    return [command(program, place)[0], str(_WORKERS / "llama_cpp_server.py"), json.dumps(options)]


def load_options(program: Program, place: Place) -> dict[str, Any]:
    """What its worker is told to load; weights are converted first. Raises :class:`Unavailable`."""
    options: dict[str, Any] = {
        "threads": place.threads,
        "context": place.context,
        "kv_tokens": place.kv_tokens,
        "eos": list(place.eos),
        "cpu": place.cpu,
        **program.options,
    }
    if program.gguf is not None:
        if not place.demo:
            raise Unavailable("it reads a GGUF file, which is made of the demo model only")
        return {**options, "gguf": str(gguf_file(program.gguf, place.folder / "weights")), "weights": program.gguf}
    options["dtype"] = place.dtype
    if program.adapter == "own.py":
        # The demo model by its default, so that its heads come with it.
        return {**options, "model": None if place.demo else str(place.model), "heads": place.heads}
    return {**options, "model": str(place.model)}


def environment_of(program: Program, place: Place) -> dict[str, str]:
    """Its environment variables: the same number of threads, and the same instructions where that can be told."""
    inherited = dict(os.environ)
    if program.environment is not None:
        # Packages of this environment are no use in another.
        for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
            inherited.pop(name, None)
    threads = {name: str(place.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    if place.cpu != "avx2":
        return {**inherited, **threads}
    avx2 = {
        "MEDUSA_CPU": "avx2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "DNNL_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    }
    return {**inherited, **threads, **avx2}
