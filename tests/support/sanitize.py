"""Kernel tests under gcc's sanitizers of addresses, undefined behaviour, and threads: ``make test-sanitize``.

The kernels are built with the sanitizer and ``-DMG_CHECKED``, and its runtime is loaded into Python before anything
else: what the tests allocate is watched too. Leaks are not looked for, as Python itself leaves much behind at its end.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass

from backends.runners.cpu_cores import CPU_VARIABLE
from backends.runners.native.bindings import variant_flags
from tests.support.paths import ROOT

KERNEL_TESTS = (
    "tests/backends/runners/test_kernel_units.py",
    "tests/backends/runners/test_kernels.py",
    "tests/backends/sampling/test_sampling.py",
    "tests/backends/engine/test_broken_models.py",
)


@dataclass(frozen=True, slots=True)
class Sanitizer:
    """``runtimes``: libraries to be loaded first; ``tests``: arguments of pytest."""

    flags: tuple[str, ...]
    runtimes: tuple[str, ...]
    settings: dict[str, str]
    tests: tuple[str, ...]


SANITIZERS = {
    "address": Sanitizer(
        flags=("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"),
        # ASan looks up how to throw when it starts, so that library has to be there.
        runtimes=("libasan.so", "libstdc++.so.6"),
        settings={"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1"},
        tests=(*KERNEL_TESTS, "-k", "not transformers"),
    ),
    "thread": Sanitizer(
        flags=("-fsanitize=thread",),
        runtimes=("libtsan.so",),
        # torch and Python are built without it, so what they do can't be judged.
        settings={
            "TSAN_OPTIONS": "halt_on_error=1:report_signal_unsafe=0:ignore_noninstrumented_modules=1",
            # Threads are the same in every variant; who can run any can run the lowest.
            CPU_VARIABLE: list(variant_flags())[-1],
        },
        tests=(*KERNEL_TESTS, "-k", "(units and threads3) or team or threads_change or (heads and native)"),
    ),
}


def unavailable() -> str | None:
    """Why no sanitizer can be run here."""
    if shutil.which("gcc") is None:
        return "no gcc here"
    for name, sanitizer in SANITIZERS.items():
        if missing := [each for each in sanitizer.runtimes if _runtime(each) is None]:
            return f"gcc has no {', '.join(missing)}"
        # The one for threads can't live with how some systems lay out memory.
        command = [sys.executable, "-c", "pass"]
        started = subprocess.run(command, env=_environment(sanitizer), capture_output=True, text=True, check=False)
        if started.returncode:
            return f"Python does not start under the {name} sanitizer: {started.stderr.strip()[:200]}"
    return None


def _environment(sanitizer: Sanitizer) -> dict[str, str]:
    preload = " ".join(filter(None, map(_runtime, sanitizer.runtimes)))
    return {**os.environ, "LD_PRELOAD": preload, "OMP_NUM_THREADS": "1", **sanitizer.settings}


def run(name: str) -> subprocess.CompletedProcess[str]:
    """The kernels' tests under a sanitizer; what it found is on the standard error."""
    sanitizer = SANITIZERS[name]
    # Not optimised, they are built in a fifth of the time.
    flags = ("-g", "-O0", "-fno-omit-frame-pointer", "-DMG_CHECKED", *sanitizer.flags)
    environment = {**_environment(sanitizer), "CC": "gcc", "MEDUSA_KERNEL_FLAGS": " ".join(flags)}
    # A sanitizer that ends the process writes to the descriptor; pytest would keep that to itself.
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--capture=sys", *sanitizer.tests]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def _runtime(name: str) -> str | None:
    """gcc answers with the bare name for what it does not have."""
    found = subprocess.run(
        ["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return found if os.sep in found else None


def main() -> int:
    if reason := unavailable():
        print(f"sanitizers can't be run: {reason}", file=sys.stderr)
        return 1
    for name in sys.argv[1:] or SANITIZERS:
        print(f"kernels under the {name} sanitizer", flush=True)
        result = run(name)
        print(result.stdout[-4000:], result.stderr[-8000:], sep="")
        if result.returncode:
            return result.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
