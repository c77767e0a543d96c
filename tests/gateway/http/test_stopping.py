"""The process ends after SIGTERM, whatever hangs, and its log names what that was."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys

import pytest

from gateway.http.stopping import place_of, stopped
from tests.support.fakes import PATIENCE_S
from tests.support.paths import ROOT

SERVER = """
import asyncio, logging, sys, threading, time
from gateway.http import app, server
from gateway.serving.background import Background
from gateway.settings import GatewaySettings
from gateway.serving.call import ServedModel
from gateway.serving.state import GatewayState
from tests.support.fakes import FakeDecoder, FakeTokenizer

logging.basicConfig()
app.STOP_S = app.CONTROLLER_STOP_S = 0.1
server.LIFESPAN_S, server.EXIT_S = 0.5, 1.0

async def deaf():
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            pass

async def hangs_in_controller(self):
    await deaf()

async def hangs_in_drain(timeout_s):
    raise RuntimeError("a drain that fails")

decoder = FakeDecoder()
state = GatewayState.create({decoder.info.name: ServedModel(decoder, FakeTokenizer())}, GatewaySettings())
hang = sys.argv[1]
if hang == "controller":
    Background.stop = hangs_in_controller
if hang == "drain":
    state.admission.drain = hangs_in_drain
server.run_server(state, server.bind("127.0.0.1", 0), bounded_exit=True)
if hang == "engine":
    time.sleep(3600)
"""


@pytest.mark.parametrize(
    ("hangs", "status", "says"),
    [
        (
            "controller",
            1,
            [
                "the controller did not stop within 0.1 s",
                "at hangs_in_controller > deaf > sleep (",
                "the process did not end",
            ],
        ),
        ("engine", 1, ["the process did not end within 1 s", "thread MainThread at <module> (<string>:"]),
        ("drain", 0, ["draining failed", "a drain that fails"]),
    ],
)
def test_whatever_hangs_the_process_ends_and_says_what_it_was(hangs: str, status: int, says: list[str]) -> None:
    root = ROOT
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, hangs],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root), "MEDUSA_REDIS_URL": "memory"},
    )
    try:
        assert process.stdout is not None
        assert "serves fake-model" in process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == status, errors
    for each in says:
        assert each in errors


async def test_one_part_that_hangs_or_fails_does_not_keep_the_others(caplog: pytest.LogCaptureFixture) -> None:
    async def hangs() -> None:
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                return

    async def fails() -> None:
        raise ValueError("broken")

    async def works() -> None:
        pass

    with caplog.at_level(logging.ERROR, "gateway"):
        assert not await stopped("A", hangs(), 0.01)
        assert await stopped("B", fails(), PATIENCE_S)
        assert await stopped("C", works(), PATIENCE_S)
    assert [record.getMessage().partition(" and ")[0] for record in caplog.records] == [
        "A did not stop within 0.01 s",
        "B failed while it stopped",
    ]


async def test_the_place_says_who_waits_for_whom() -> None:
    async def inner() -> None:
        await asyncio.Event().wait()

    async def outer() -> None:
        await inner()

    task = asyncio.ensure_future(outer())
    await asyncio.sleep(0)
    try:
        names = [each.rpartition(".")[2] for each in place_of(task).partition(" (")[0].split(" > ")]
        assert names == ["outer", "inner", "wait"]
    finally:
        task.cancel()
