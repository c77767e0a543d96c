"""Compile the C kernels once and bind the variant that suits this CPU with ctypes (which releases the GIL in a call).

The library holds every variant of its architecture, so it runs on any machine of that: what the cache calls it depends
on the source and the compiler only. Which variant is run is decided when it is loaded (``csrc/variants.c``).
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from ctypes import POINTER, c_char_p, c_float, c_int, c_int32, c_int64, c_void_p
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import platformdirs

from backends.runners.batch import PAGE_SIZE
from backends.runners.cpu_cores import CPU_VARIABLE, asked_variant
from backends.runners.native.packing import GROUP
from backends.tree import MAX_DEPTH, MAX_RANKS

log = logging.getLogger(__name__)

SOURCE_FOLDER = Path(__file__).parent / "csrc"
SOURCES = (
    "kernels.c",
    "variants.c",
    "names.h",
    "planner.h",
    "rows.h",
    "checks.h",
    "sampling.h",
    "follow.h",
    "transformer.h",
    "linear.h",
    "weights8.h",
    "attention.h",
    "int8.h",
    "simd.h",
    "thread_pool.h",
)
# No contraction and no fast-math: an operation gives the same bits wherever the compiler places it.
FLAGS = (
    "-O2",
    "-std=gnu11",
    "-fPIC",
    "-pthread",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-Wno-psabi",
)
_AVX2 = ("-mavx2", "-mfma")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl")
# Compiler flags of each variant of an architecture, best first as in csrc/variants.c.
_VARIANTS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "avx512_bf16": (*_AVX512, "-mavx512vnni", "-mavx512bf16"),
        "avx512": _AVX512,
        "avx2": _AVX2,
    },
    "aarch64": {
        "neon_dotprod": ("-march=armv8.2-a+dotprod",),
        "neon": ("-march=armv8-a",),
        "generic": ("-march=armv8-a", "-DMG_GENERIC"),
    },
}
_VARIANTS["AMD64"] = _VARIANTS["x86_64"]
_VARIANTS["arm64"] = _VARIANTS["aarch64"]  # as macOS calls it
# More flags, for a debugger or a sanitizer: MEDUSA_KERNEL_FLAGS="-g -DMG_CHECKED".
_FLAGS_VARIABLE = "MEDUSA_KERNEL_FLAGS"


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
                "is_int8",
                "vocab",
                "max_context",
            )
        ),
        ("eps", c_float),
        ("scale", c_float),
        ("pages", c_int64),
        ("layer", POINTER(Layer)),
        *((name, c_void_p) for name in ("embed", "final_norm", "cos", "sin", "k_pool", "v_pool")),
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
                "vocab",
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


class _Entry(ctypes.Structure):
    _fields_ = [("structure", c_char_p), ("field", c_char_p), ("offset", c_int64), ("size", c_int64)]


# By structure and field: offset and size; field "" is the whole structure, structure "" a limit that both sides know.
Layout = Mapping[tuple[str, str], tuple[int, int]]
_STRUCTURES = {"mg_layer": Layer, "mg_model": Model, "mg_int8": Int8Layer, "mg_heads": Heads, "mg_follow": Follow}
_LIMITS = {"LANES": PAGE_SIZE, "MAX_RANKS": MAX_RANKS, "MAX_DEPTH": MAX_DEPTH, "GROUP8": GROUP}


def our_layout() -> dict[tuple[str, str], tuple[int, int]]:
    """As the structures of this module have it."""
    found = {("", name): (value, 0) for name, value in _LIMITS.items()}
    for name, structure in _STRUCTURES.items():
        found[name, ""] = (0, ctypes.sizeof(structure))
        for field in (each[0] for each in structure._fields_):
            place = getattr(structure, field)
            found[name, field] = (place.offset, place.size)
    return found


def _kernels_layout(kernels: Kernels) -> dict[tuple[str, str], tuple[int, int]]:
    found, entries = {}, kernels.mg_layout()
    for entry in iter(lambda: entries[len(found)], None):
        if entry.structure is None:
            break
        found[entry.structure.decode(), entry.field.decode()] = (entry.offset, entry.size)
    return found


def layout_fault(ours: Layout, kernels: Layout) -> str | None:
    """The first thing that the two sides of the boundary take for different things."""
    for key in sorted(ours.keys() | kernels.keys()):
        if ours.get(key) != kernels.get(key):
            name = ".".join(part for part in key if part)
            sides = (f"(offset, size) {each[key]}" if key in each else "unknown" for each in (ours, kernels))
            return f"{name}: {next(sides)} in bindings.py, {next(sides)} in the kernels"
    return None


class Kernels:
    """One variant of a bound library: its functions by the names that ``csrc/names.h`` knows.

    ``build`` stands for the kernels' source, the compiler and the variant.
    """

    def __init__(self, library: ctypes.CDLL, variant: str) -> None:
        self.library, self.variant = library, variant
        self.build = f"{Path(library._name).stem}-{variant}"

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.library, f"{name}_{self.variant}")
        setattr(self, name, found)
        return found


@cache
def load_library() -> Kernels:
    """The bound kernels: those of :func:`prebuild`, else compiled.

    Raises :class:`NativeUnavailable` where there is neither such a file nor a compiler, none of their variants runs on
    this CPU, or ``MEDUSA_GATEWAY_NATIVE=0``; ValueError where ``MEDUSA_CPU`` names a variant that can't be run here.
    """
    if os.environ.get("MEDUSA_GATEWAY_NATIVE", "1") == "0":
        raise NativeUnavailable("switched off by MEDUSA_GATEWAY_NATIVE=0")
    made = prebuilt()
    return bind(made if made.exists() else compiled(SOURCE_FOLDER / SOURCES[0]))


def bind(path: Path, variant: str | None = None) -> Kernels:
    """Loads compiled kernels; ``variant``: see :func:`chosen_variant`. Raises :class:`NativeUnavailable` where that
    fails, and RuntimeError when they have other structures than this module: then one of the two was changed alone."""
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeUnavailable(f"the compiled kernels can't be loaded: {error}") from error
    kernels = Kernels(library, chosen_variant(variant or asked_variant(), runnable_variants(library)))
    _declare(kernels)
    if fault := layout_fault(our_layout(), _kernels_layout(kernels)):
        raise RuntimeError(f"backends/runners/native/bindings.py and the C sources disagree: {fault}")
    return kernels


def variant_flags(machine: str | None = None) -> Mapping[str, Sequence[str]]:
    """The variants of an architecture, this one's unless it is named, best first, with their compiler flags."""
    return _VARIANTS.get(machine or platform.machine(), {"generic": ()})


def runnable_variants(library: ctypes.CDLL) -> list[str]:
    """Those that the library holds and this CPU can run, best first."""
    name_of = library.mg_variant
    name_of.restype, name_of.argtypes = c_char_p, [c_int]
    names = (name.decode() for name in iter(map(name_of, count()).__next__, None))
    return [name for name in names if hasattr(library, f"mg_layout_{name}")]


def chosen_variant(asked: str | None, runnable: Sequence[str]) -> str:
    """The best of the ``runnable`` variants, or the one that is ``asked`` for.

    Raises ValueError for an unknown variant or one that is not runnable, :class:`NativeUnavailable` where none is.
    """
    known = tuple(variant_flags())
    if asked is not None and asked not in known:
        raise ValueError(f'{CPU_VARIABLE} is {asked!r}; it can be {", ".join(known)} or "native" (or be left out)')
    if not runnable:
        raise NativeUnavailable(f"the kernels need a CPU with {' or '.join(known)} instructions; this one has none")
    if asked is not None and asked not in runnable:
        raise ValueError(f"{CPU_VARIABLE} is {asked!r}, which this CPU can't run; it can run {', '.join(runnable)}")
    return asked or runnable[0]


def _compiler() -> str:
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        if name and (found := shutil.which(name)):
            return found
    raise NativeUnavailable("no C compiler found (looked for $CC, cc, gcc, clang); install one")


def flags() -> tuple[str, ...]:
    return (*FLAGS, *shlex.split(os.environ.get(_FLAGS_VARIABLE, "")))


def compiled(source: Path, more_flags: Sequence[str] = ()) -> Path:
    """The shared library of a source that includes :data:`SOURCES`, built unless the cache has it.

    Raises :class:`NativeUnavailable`.
    """
    here = SOURCE_FOLDER
    compiler, every_flag = _compiler(), (*flags(), *more_flags)
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    except OSError as error:
        raise NativeUnavailable(f"the C compiler {compiler} can't be run: {error}") from error
    digest = hashlib.sha256("\0".join([version, *every_flag, platform.machine(), repr(variant_flags())]).encode())
    for path in (source, *(here / name for name in SOURCES)):
        digest.update(path.read_bytes())
    folder = Path(platformdirs.user_cache_dir("medusa-gateway")) / "native"
    target = folder / f"{source.stem}-{digest.hexdigest()[:16]}.so"
    if target.exists():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            built = Path(scratch) / target.name
            _build([compiler, *every_flag, f"-I{here}"], source, here / "variants.c", built)
            built.replace(target)
    except OSError as error:
        raise NativeUnavailable(f"the kernels can't be built in {folder}: {error}") from error
    return target


def prebuilt() -> Path:
    """Where :func:`prebuild` puts the kernels of these very sources, flags and variants."""
    digest = hashlib.sha256("\0".join([*flags(), platform.machine(), repr(variant_flags())]).encode())
    for name in SOURCES:
        digest.update((SOURCE_FOLDER / name).read_bytes())
    return SOURCE_FOLDER / f"prebuilt-{digest.hexdigest()[:16]}.so"


def prebuild() -> Path:
    """Compiles every variant into the package, for an image that has no compiler. Raises :class:`NativeUnavailable`."""
    target = prebuilt()
    _build(
        [_compiler(), *flags(), f"-I{SOURCE_FOLDER}"], SOURCE_FOLDER / SOURCES[0], SOURCE_FOLDER / "variants.c", target
    )
    for each in target.parent.glob(f"{target.name}.*.o"):
        each.unlink()
    return target


def _build(compiler: Sequence[str], source: Path, variants: Path, target: Path) -> None:
    """Compiles each variant, side by side, and links them. One that the compiler can't make, as an old one doesn't know
    its instructions, is left out. Raises :class:`NativeUnavailable` where none can be made."""
    running = {}
    for name, more in variant_flags().items():
        command = [*compiler, *more, f"-DMG_VARIANT={name}", "-c", str(source), "-o", f"{target}.{name}.o"]
        running[name] = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    failed = {}
    for name, process in running.items():
        _, said = process.communicate()
        if process.returncode:
            failed[name] = f"{compiler[0]} failed: {(said.strip().splitlines() or ['no message'])[0]}"
    if len(failed) == len(running):
        raise NativeUnavailable(next(iter(failed.values())))
    for name, reason in failed.items():
        log.warning("the kernels have no variant %s: %s", name, reason)
    objects = [f"{target}.{name}.o" for name in running.keys() - failed.keys()]
    command = [*compiler, "-shared", str(variants), *sorted(objects), "-o", str(target), "-lm"]
    linked = subprocess.run(command, capture_output=True, text=True, check=False)
    if linked.returncode:
        raise NativeUnavailable(f"{compiler[0]} failed: {(linked.stderr.strip().splitlines() or ['no message'])[0]}")


def _declare(kernels: Kernels) -> None:
    def declare(name: str, result: type | None, *arguments: object) -> None:
        function = getattr(kernels, name)
        function.restype, function.argtypes = result, list(arguments)

    # What can be refused answers NULL, or why: see checked.refuse.
    pool, array, matrix, fault = c_void_p, c_void_p, c_void_p, c_char_p
    declare("mg_layout", POINTER(_Entry))
    declare("mg_pool_new", c_void_p, c_int)
    declare("mg_pool_free", None, pool)
    declare("mg_model_fault", fault, POINTER(Model), c_int, c_int)
    declare("mg_workspace_new", c_void_p, POINTER(Model), c_int, c_int)
    declare("mg_workspace_free", None, c_void_p)
    declare("mg_forward", fault, pool, POINTER(Model), array, array, c_void_p, matrix)
    declare("mg_project", fault, pool, c_int, c_int, matrix, c_int, c_int, c_void_p, c_int, matrix)
    declare("mg_copy_slots", fault, POINTER(Model), array, array, c_int)
    declare("mg_heads_logits", fault, pool, POINTER(Heads), matrix, matrix, c_int, matrix)
    declare("mg_heads_follow", fault, pool, POINTER(Heads), POINTER(Follow), matrix, c_int, c_int)
    declare("mg_argmax", fault, pool, matrix, c_int, c_int64, c_int, array, c_int, array)
    declare("mg_top_k", fault, pool, matrix, c_int, c_int64, c_int, c_int, array, array)
    declare("mg_sample", fault, pool, matrix, c_int, c_int64, c_int, array, c_int, *[array] * 6)


__all__ = [
    "Follow",
    "Heads",
    "Int8Layer",
    "Kernels",
    "Layer",
    "Model",
    "NativeUnavailable",
    "bind",
    "chosen_variant",
    "compiled",
    "load_library",
    "prebuild",
    "prebuilt",
    "runnable_variants",
    "variant_flags",
]
