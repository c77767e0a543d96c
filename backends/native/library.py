"""Compile the C kernels once per machine and bind them with ctypes (which releases the GIL during a call)."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from ctypes import POINTER, c_float, c_int, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path

import platformdirs

from backends.batch import ARRAYS

SOURCES = ("kernels.c", "transformer.h", "int8.h", "simd.h", "team.h")
# No contraction and no fast-math: an operation gives the same bits wherever the compiler places it.
FLAGS = (
    "-O2",
    "-march=native",
    "-std=gnu11",
    "-fPIC",
    "-pthread",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-Wno-psabi",
)


class NativeUnavailable(RuntimeError):
    """The kernels can't be built or loaded here; the message says why. Callers fall back to torch operations."""


class Layer(ctypes.Structure):
    _fields_ = [
        (name, c_void_p)
        for name in (
            "qkv",
            "o",
            "gate_up",
            "down",
            "attention_norm",
            "mlp_norm",
            "qkv_bias",
            "q_norm",
            "k_norm",
        )
    ]


class Model(ctypes.Structure):
    _fields_ = [
        *(
            (name, c_int32)
            for name in (
                "layers",
                "hidden",
                "heads",
                "kv_heads",
                "head_dim",
                "intermediate",
                "is_bf16",
                "reserved",
            )
        ),
        ("eps", c_float),
        ("scale", c_float),
        ("pages", c_int64),
        ("layer", POINTER(Layer)),
        *((name, c_void_p) for name in ("embed", "final_norm", "cos", "sin", "k_pool", "v_pool")),
    ]


class Batch(ctypes.Structure):
    _fields_ = [
        ("rows", c_int32),
        ("out_rows", c_int32),
        *((name, c_void_p) for name in ARRAYS),
    ]


class Int8Layer(ctypes.Structure):
    _fields_ = [(name, c_void_p) for name in ("weights", "scale")]


class Heads(ctypes.Structure):
    _fields_ = [
        *(
            (name, c_int32)
            for name in (
                "heads",
                "hidden",
                "inner",
                "in_size",
                "draft_vocab_padded",
                "draft_vocab",
                "is_bf16",
                "is_int8",
            )
        ),
        *((name, c_void_p) for name in ("up", "down", "draft_lm_head", "embed", "up_bias", "draft_ids")),
        *((name, Int8Layer) for name in ("up8", "down8", "draft_lm_head8")),
    ]


FOLLOW_GIVEN = ("row", "pending", "planned", "plan_above", "plan_rank")
FOLLOW_WRITTEN = ("tokens", "below", "probabilities", "survival", "count", "first", "from", "token", "list")


class Follow(ctypes.Structure):
    _fields_ = [
        *((name, c_int32) for name in ("n", "lists", "k", "width")),
        ("least", c_float),
        ("rows", c_int32),
        ("levels", c_int32),
        *((name, c_void_p) for name in (*FOLLOW_GIVEN, *FOLLOW_WRITTEN)),
    ]


@cache
def load_library() -> ctypes.CDLL:
    """The bound kernels. Raises :class:`NativeUnavailable` where no compiler is, or ``MEDUSA_GATEWAY_NATIVE=0``."""
    if os.environ.get("MEDUSA_GATEWAY_NATIVE", "1") == "0":
        raise NativeUnavailable("switched off by MEDUSA_GATEWAY_NATIVE=0")
    try:
        library = ctypes.CDLL(str(_build()))
    except OSError as error:
        raise NativeUnavailable(f"the compiled kernels can't be loaded: {error}") from error
    _bind(library)
    return library


def _compiler() -> str:
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        if name and (found := shutil.which(name)):
            return found
    raise NativeUnavailable("no C compiler found (looked for $CC, cc, gcc, clang)")


def _cpu_identity() -> str:
    """What ``-march=native`` depends on, so that a cache shared between machines never serves the wrong code."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return platform.machine() + line
    except OSError:
        pass
    return platform.machine() + platform.processor() + platform.node()


def _build() -> Path:
    here = Path(__file__).parent
    compiler = _compiler()
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    digest = hashlib.sha256("\0".join([version, *FLAGS, _cpu_identity()]).encode())
    for source in SOURCES:
        digest.update((here / source).read_bytes())
    folder = Path(platformdirs.user_cache_dir("medusa-gateway")) / "native"
    target = folder / f"kernels-{digest.hexdigest()[:16]}.so"
    if target.exists():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            built = Path(scratch) / target.name
            command = [compiler, *FLAGS, "-shared", str(here / SOURCES[0]), "-o", str(built), "-lm"]
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            if result.returncode:
                lines = result.stderr.strip().splitlines()
                raise NativeUnavailable(f"{compiler} failed: {lines[0] if lines else 'no message'}")
            built.replace(target)
    except OSError as error:
        raise NativeUnavailable(f"the kernels can't be built in {folder}: {error}") from error
    return target


def _bind(library: ctypes.CDLL) -> None:
    def declare(name: str, result: type | None, *arguments: object) -> None:
        function = getattr(library, name)
        function.restype, function.argtypes = result, list(arguments)

    pool, rows = c_void_p, c_void_p
    declare("mg_pool_new", c_void_p, c_int)
    declare("mg_pool_free", None, pool)
    declare("mg_workspace_new", c_void_p, POINTER(Model), c_int, c_int, c_int)
    declare("mg_workspace_free", None, c_void_p)
    declare("mg_forward", None, pool, POINTER(Model), POINTER(Batch), c_void_p, c_void_p)
    declare("mg_project", None, pool, c_int, c_void_p, c_int, c_int, c_void_p, c_int, c_void_p)
    declare("mg_copy_slots", None, POINTER(Model), c_void_p, c_void_p, c_int)
    declare("mg_heads_logits", c_int, pool, POINTER(Heads), c_void_p, c_void_p, c_int, c_void_p)
    declare("mg_heads_follow", c_int, pool, POINTER(Heads), POINTER(Follow), c_void_p, c_int)
    declare("mg_has_int8", c_int)
    declare("mg_argmax", None, pool, c_void_p, rows, c_int, c_int64, c_int, c_void_p)
    declare("mg_top_k", None, pool, c_void_p, c_int, c_int64, c_int, c_int, c_void_p, c_void_p)
    declare("mg_sample", c_int, pool, c_void_p, rows, c_int, c_int64, c_int, *[c_void_p] * 6)


__all__ = [
    "Batch",
    "Follow",
    "Heads",
    "Int8Layer",
    "Layer",
    "Model",
    "NativeUnavailable",
    "load_library",
]
