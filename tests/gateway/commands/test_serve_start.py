"""What a real ``serve`` says from its start to its readiness: the same few lines on a terminal and in a file."""

from __future__ import annotations

import os
import pty
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import platformdirs
import pytest

PATIENCE_S = 120.0
LOGGED = r"[\d-]+ [\d:,]+ INFO backends\.start: "
MODEL = "smollm2-135m-instruct"
QUESTION = {"max_tokens": 2, "messages": [{"role": "user", "content": "Hello"}]}
START = [
    LOGGED + r"loading the demo model \(a few seconds, most of them for torch and transformers\)",
    LOGGED + rf"measuring what steps of {MODEL} cost \(at most 5 s\)",
    LOGGED + rf"{MODEL} \(\w+\) is ready after [\d.]+ s: importing [\d.]+, loading [\d.]+, demo model [\d.]+, "
    r"measuring [\d.]+; what steps of \d+ sizes cost is guessed until there is an idle moment",
    rf"medusa-gateway serves {MODEL} at http://127\.0\.0\.1:\d+/v1",
    r"try it:  curl .*",
]
CONVERTING = LOGGED + rf"converting {MODEL} \(not converted yet\): a few seconds, once"
NO_KERNELS = r"[\d-]+ [\d:,]+ WARNING backends\.engine\.\w+: no C kernels here \(.*\): torch operations .*"
BUSY = r"[\d-]+ [\d:,]+ WARNING backends\.cost\.persistence: .*"
"""On a machine that has other things to do, or is slow."""


def started(cache: Path, *options: str, terminal: bool, **environment: str) -> tuple[list[str], Any]:
    """Serve until an answer. Returns the lines up to the readiness, and what ``/admin/backends`` says of the engine."""
    command = [sys.executable, "-m", "gateway", "serve", *options, "--port", "0", "--redis-url", "memory"]
    ours, theirs = pty.openpty() if terminal else os.pipe()
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "XDG_CACHE_HOME": str(cache), **environment},
    ) as process:
        os.close(theirs)
        try:
            # A carriage return inside a line is a bar that draws over itself.
            with os.fdopen(ours, encoding="utf-8", newline="\n") as output:
                lines: list[str] = []
                while not lines or not lines[-1].startswith("try it"):
                    line = output.readline()
                    assert line, f"it ended with {lines}"
                    lines.append(line.removesuffix("\n").removesuffix("\r"))
                url = lines[-2].split()[-1].removesuffix("/v1")
                (engine,) = httpx.get(f"{url}/admin/backends", timeout=PATIENCE_S).json()["backends"]
                answer = httpx.post(
                    f"{url}/v1/chat/completions",
                    json={
                        "model": engine["model"],
                        "max_tokens": 2,
                        "messages": [{"role": "user", "content": "Hello"}],
                    },
                    timeout=PATIENCE_S,
                )
                assert answer.status_code == 200, answer.text
                return lines, engine
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()


def check(lines: list[str], patterns: list[str]) -> None:
    lines = [line for line in lines if not re.fullmatch(BUSY, line)]
    assert len(lines) == len(patterns), lines
    for line, pattern in zip(lines, patterns, strict=True):
        assert re.fullmatch(pattern, line), (line, pattern)


@pytest.mark.model
def test_the_first_start_into_a_pipe_and_one_without_a_compiler_on_a_terminal(tmp_path: Path) -> None:
    built = Path(platformdirs.user_cache_dir("medusa-gateway")) / "native"
    if built.is_dir():  # they are compiled once a machine, and other tests do
        shutil.copytree(built, tmp_path / "medusa-gateway" / "native")
    lines, engine = started(tmp_path, "--device", "cpu", terminal=False)
    check([line for line in lines if not re.fullmatch(NO_KERNELS, line)], [START[0], CONVERTING, *START[1:]])
    cost = engine["step_cost"]
    assert {"1", "8", "32", "128"} <= cost["rows_ms"].keys() and set(cost["guessed_rows"]) >= {48, 64, 96, 128}
    lines, _ = started(tmp_path, "--model", "tiny-random", terminal=True, CC="false")
    tiny = [line.replace("the demo model", "tiny-random").replace(MODEL, "tiny-random") for line in START]
    tiny[2] = tiny[2].replace(r"demo model [\d.]+, ", "")
    check(lines, [tiny[0], NO_KERNELS, *tiny[1:]])
