"""Waiting for a process: it is told, it ends, and an early end is told as such."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.drills.progress import await_line


def program(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-u", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_the_line_is_found_and_the_rest_is_read() -> None:
    process = program("print('loading'); print('serves m at http://h:1/v1'); print('x' * 10**6)")
    told: list[str] = []
    assert await_line(process, r"serves (\S+) at", told.append)[1] == "m"
    assert process.wait(30) == 0, "a pipe that nobody reads would hold it up"
    assert told == []


def test_a_process_that_ends_is_told_at_once() -> None:
    with pytest.raises(RuntimeError, match="ended while it started"):
        await_line(program("pass"), "serves", print)


def test_waiting_is_told_and_bounded() -> None:
    process = program("input()")
    told: list[str] = []
    with pytest.raises(TimeoutError, match=r"within 0\.1 s"):
        await_line(process, "serves", told.append, within_s=0.1, every_s=0.02)
    process.kill()
    process.wait()
    assert told and told[0].startswith("the gateway is starting, for 0 of at most 0.1 s")
