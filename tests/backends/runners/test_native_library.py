"""How the kernels come to be: compilers, flags, and that Python and C mean the same structures."""

from __future__ import annotations

import ctypes
import platform
import re
import shutil
import subprocess
from pathlib import Path

import platformdirs
import pytest
import torch

from backends.engine import loading
from backends.engine.loading import EngineOptions, _dtype
from backends.runners.native import bindings as library
from backends.runners.native.bindings import (
    FLAGS,
    NativeUnavailable,
    bind,
    chosen_variant,
    compiled,
    layout_fault,
    load_library,
    our_layout,
    runnable_variants,
    variant_flags,
)
from tests.support.engine_helpers import native_or_skip

SOURCE = Path(library.__file__).parent / "csrc" / "kernels.c"


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda name: str(tmp_path / "cache" / name))
    return tmp_path


def program(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def test_both_sides_have_the_same_structures() -> None:
    native_or_skip()
    load_library()
    assert {structure for structure, _ in our_layout()} >= {"mg_model", "mg_heads", "mg_follow", ""}


@pytest.mark.parametrize(
    ("key", "theirs", "message"),
    [
        (
            ("mg_model", "pages"),
            (44, 8),
            r"mg_model\.pages: \(offset, size\) \(48, 8\) in bindings\.py, .*\(44, 8\) in",
        ),
        (("mg_heads", ""), (0, 8), r"mg_heads: .*\(0, 8\) in the kernels"),
        (("mg_follow", "new"), (0, 4), r"mg_follow\.new: unknown in bindings\.py"),
        (("mg_model", "eps"), None, r"mg_model\.eps: .* unknown in the kernels"),
        (("", "MAX_DEPTH"), (15, 0), r"MAX_DEPTH: .*\(15, 0\) in the kernels"),
    ],
)
def test_a_difference_is_named(key: tuple[str, str], theirs: tuple[int, int] | None, message: str) -> None:
    kernels = our_layout()
    kernels.pop(key, None)
    if theirs is not None:
        kernels[key] = theirs
    fault = layout_fault(our_layout(), kernels)
    assert fault is not None
    assert re.match(message, fault), fault


def test_kernels_of_another_layout_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    native_or_skip()
    built = compiled(SOURCE)
    monkeypatch.setitem(library._LIMITS, "MAX_RANKS", 31)
    with pytest.raises(RuntimeError, match=r"the C sources disagree: MAX_RANKS: .*\(31, 0\) in bindings\.py"):
        library.bind(built)


@pytest.mark.parametrize("text", ["", "no program\n", "#!/nowhere/cc\n"])
def test_a_compiler_that_cannot_be_run(text: str, empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", program(empty_cache / "cc", text))
    if not text:
        monkeypatch.setattr(library, "_compiler", lambda: str(empty_cache))  # a folder
    with pytest.raises(NativeUnavailable, match=r"can't be run|failed"):
        compiled(SOURCE)


def test_a_compiler_that_fails(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", program(empty_cache / "cc", "#!/bin/sh\necho no such flag >&2\nexit 1\n"))
    with pytest.raises(NativeUnavailable, match="cc failed: no such flag"):
        compiled(SOURCE)


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(NativeUnavailable, match="no C compiler found"):
        compiled(SOURCE)


@pytest.mark.parametrize("variant", variant_flags())
@pytest.mark.parametrize("checked", [[], ["-DMG_CHECKED"]], ids=["plain", "checked"])
@pytest.mark.parametrize("compiler", ["gcc", "clang", "clang-14"])
def test_no_warnings(compiler: str, variant: str, checked: list[str]) -> None:
    found = shutil.which(compiler)
    if found is None:
        pytest.skip(f"no {compiler} here")
    # The optimiser, which takes seconds, is asked about the usual build of one variant only.
    whole = variant == next(iter(variant_flags())) and not checked
    output = ["-c", "-o", "/dev/null"] if whole else ["-fsyntax-only"]
    flags = [*FLAGS, *variant_flags()[variant], f"-DMG_VARIANT={variant}", *checked, "-Wall", "-Wextra", "-Werror"]
    result = subprocess.run([found, *flags, *output, str(SOURCE)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_the_library_holds_every_variant_of_its_architecture() -> None:
    native_or_skip()
    held = ctypes.CDLL(str(compiled(SOURCE)))
    for name in variant_flags():
        assert hasattr(held, f"mg_forward_{name}")
    runnable = runnable_variants(held)
    assert runnable == [name for name in variant_flags() if name in runnable]


def test_what_it_is_called_does_not_depend_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    native_or_skip()
    name = compiled(SOURCE)
    monkeypatch.setenv("MEDUSA_CPU", "avx2")
    monkeypatch.setattr(platform, "processor", lambda: "another")
    assert compiled(SOURCE) == name
    assert not any("native" in flag for flags in variant_flags().values() for flag in flags)


def test_a_lower_variant_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    native_or_skip()
    built = compiled(SOURCE)
    runnable = runnable_variants(ctypes.CDLL(str(built)))
    for unset in ("", "native"):
        monkeypatch.setenv("MEDUSA_CPU", unset)
        assert bind(built).variant == runnable[0]
    for name in runnable:
        monkeypatch.setenv("MEDUSA_CPU", name)
        assert bind(built).variant == name
        assert bind(built).build.endswith(f"-{name}"), "tables of what steps cost are told apart by this"


def test_variants_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert chosen_variant(None, ["avx512", "avx2"]) == "avx512"
    with pytest.raises(ValueError, match="MEDUSA_CPU is 'sse'; it can be avx512_bf16, avx512, avx2 or"):
        chosen_variant("sse", ["avx2"])
    with pytest.raises(ValueError, match="MEDUSA_CPU is 'avx512', which this CPU can't run; it can run avx2"):
        chosen_variant("avx512", ["avx2"])
    with pytest.raises(NativeUnavailable, match="need a CPU with avx512_bf16 or avx512 or avx2 instructions"):
        chosen_variant("avx2", [])


def test_a_variant_that_the_compiler_does_not_know_is_left_out(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native_or_skip()
    if platform.machine() != "x86_64":
        pytest.skip("another kind of processor")
    real = shutil.which("cc") or shutil.which("gcc")
    old = f'#!/bin/sh\ncase "$*" in *avx512*) echo no such flag >&2; exit 1;; esac\nexec {real} -O0 "$@"\n'
    monkeypatch.setenv("CC", program(empty_cache / "cc", old))
    assert runnable_variants(ctypes.CDLL(str(compiled(SOURCE)))) == ["avx2"]


def test_prebuilt_kernels_need_no_compiler(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native_or_skip()
    here = empty_cache / "csrc"
    shutil.copytree(library.SOURCE_FOLDER, here, ignore=shutil.ignore_patterns("*.so"))
    monkeypatch.setattr(library, "SOURCE_FOLDER", here)
    monkeypatch.setenv("MEDUSA_KERNEL_FLAGS", "-O0")
    target = library.prebuild()
    assert {each.suffix for each in here.iterdir()} == {".c", ".h", ".so"}, "no objects are left"
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    load = library.load_library.__wrapped__
    assert load().library._name == str(target)
    with (here / "kernels.c").open("a") as source:
        source.write("// An edit: what was built is of other sources.\n")
    with pytest.raises(NativeUnavailable, match="no C compiler found"):
        load()


def test_bfloat16_is_the_default_where_it_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    native_or_skip()
    cpu = torch.device("cpu")
    for quick in (False, True):
        monkeypatch.setattr(loading, "torch_has_quick_bf16", lambda quick=quick: quick)
        in_torch = torch.bfloat16 if quick else torch.float32
        assert _dtype(EngineOptions(), cpu, "llama") is torch.bfloat16
        assert _dtype(EngineOptions(dtype="float32"), cpu, "llama") is torch.float32
        assert _dtype(EngineOptions(), cpu, "gemma") is in_torch
        assert _dtype(EngineOptions(runner="transformers"), cpu, "llama") is in_torch
        assert _dtype(EngineOptions(quantize="int8"), cpu, "llama") is torch.bfloat16
        assert _dtype(EngineOptions(quantize="int4"), cpu, "llama") is in_torch
    monkeypatch.setattr(loading, "load_library", _no_kernels)
    monkeypatch.setattr(loading, "torch_has_quick_bf16", lambda: False)
    assert _dtype(EngineOptions(), cpu, "llama") is torch.float32


def _no_kernels() -> None:
    raise NativeUnavailable("none")


def test_flags_may_be_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEDUSA_KERNEL_FLAGS", "-g '-DA=1 2'")
    assert library.flags()[-2:] == ("-g", "-DA=1 2")
