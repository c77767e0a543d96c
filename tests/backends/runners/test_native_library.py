"""How the kernels come to be: compilers, flags, and that Python and C mean the same structures."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from pathlib import Path

import platformdirs
import pytest
import torch

from backends.engine.loading import _dtype
from backends.runners.cpu_cores import cpu_has_bf16, instruction_set
from backends.runners.native import bindings as library
from backends.runners.native.bindings import FLAGS, NativeUnavailable, compiled, layout_fault, load_library, our_layout
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


@pytest.mark.parametrize("target", ["-march=native", "-march=x86-64-v3"])
@pytest.mark.parametrize("checked", [[], ["-DMG_CHECKED"]], ids=["plain", "checked"])
@pytest.mark.parametrize("compiler", ["gcc", "clang", "clang-14"])
def test_no_warnings(compiler: str, target: str, checked: list[str]) -> None:
    found = shutil.which(compiler)
    if found is None:
        pytest.skip(f"no {compiler} here")
    if "x86" in target and platform.machine() != "x86_64":
        pytest.skip("another kind of processor")
    # The optimiser, which takes seconds, is asked about the usual build only.
    whole = target == "-march=native" and not checked
    output = ["-c", "-o", "/dev/null"] if whole else ["-fsyntax-only"]
    command = [found, *FLAGS, target, *checked, "-Wall", "-Wextra", "-Werror", *output, str(SOURCE)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_a_cpu_without_avx512_can_be_played(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEDUSA_CPU", "avx2")
    assert instruction_set() == "avx2"
    assert "-march=x86-64-v3" in library.flags()
    assert "-march=native" not in library.flags()
    assert not cpu_has_bf16()
    assert _dtype("auto", torch.device("cpu")) is torch.float32
    for unset in ("", "native"):
        monkeypatch.setenv("MEDUSA_CPU", unset)
        assert "-march=native" in library.flags()
    monkeypatch.setenv("MEDUSA_CPU", "sse")
    with pytest.raises(ValueError, match="MEDUSA_CPU is 'sse'"):
        library.flags()


def test_flags_may_be_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEDUSA_KERNEL_FLAGS", "-g '-DA=1 2'")
    assert library.flags()[-2:] == ("-g", "-DA=1 2")
