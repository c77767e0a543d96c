"""The process ends after SIGTERM, whatever hangs, and its log names what that was."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from gateway.http.stopping import place_of, stopped
from tests.support.access_helpers import bearer, entry, new_key, write_keys
from tests.support.fakes import PATIENCE_S
from tests.support.paths import ROOT
from tests.support.valkey import ValkeyProcess

SERVER = """
import asyncio, logging, sys, threading, time
from gateway import admission
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
if hang == "step":
    # A real engine in a step that never returns, such as a kernel of a broken device.
    from backends.engine.thread import Engine
    from tests.support.engine_helpers import make_core

    def never_returns():
        print("in a step", flush=True)
        time.sleep(3600)

    admission.ABORT_GRACE_S = server.ABORT_GRACE_S = 0.1
    core = make_core()
    core.step = never_returns
    decoder = Engine(core, decoder.info)
    settings = GatewaySettings(drain_timeout_s=0.1)
    state = GatewayState.create({decoder.info.name: ServedModel(decoder, FakeTokenizer())}, settings)
if hang == "redis":
    from pathlib import Path
    from gateway.auth.access import Access, open_keys
    from gateway.serving import background
    from gateway.serving.controller import Controller
    from gateway.serving.statistics_store import store_opener
    from policy.runtime import PolicyRuntime

    app.STOP_S, app.CONTROLLER_STOP_S, server.LIFESPAN_S, server.EXIT_S = 2.0, 2.0, 5.0, 20.0
    background.FLUSH_PATIENCE_S = background.ALERTS_PATIENCE_S = 0.2
    state = GatewayState.create(
        {decoder.info.name: ServedModel(decoder, FakeTokenizer())},
        controller=Controller(PolicyRuntime.embedded(), open_store=store_opener(sys.argv[2])),
        access=Access(open_keys(Path(sys.argv[3])), local=True),
    )
if hang == "drain":
    state.admission.drain = hangs_in_drain
server.run_server(state, server.bind("127.0.0.1", 0), bounded_exit=True)
if hang == "engine":
    time.sleep(3600)
decoder.close()
"""


@contextmanager
def serving(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process of :data:`SERVER`, and where it serves."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "MEDUSA_REDIS_URL": "memory"},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "serves fake-model" in line
        yield process, re.findall(r"http://[^/]+", line)[0]
    finally:
        process.kill()
        process.wait()


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
    with serving(hangs) as (process, _):
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == status, errors
    for each in says:
        assert each in errors


def test_a_step_that_never_returns_keeps_no_process() -> None:
    body = {"model": "fake-model", "prompt": "hi", "max_tokens": 4}
    with serving("step") as (process, url), ThreadPoolExecutor(1) as pool:
        asked = pool.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=PATIENCE_S, trust_env=False)
        assert process.stdout is not None
        while "in a step" not in process.stdout.readline():
            pass
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=PATIENCE_S)
        # Nobody can end the answer but the step: the client sees its connection end.
        assert isinstance(asked.exception(PATIENCE_S), httpx.TransportError)
    assert process.returncode == 1, errors
    assert "drain timeout: 1 requests were aborted" in errors
    assert "the process did not end within" in errors
    assert "never_returns (" in errors, "the step is named"


def test_a_redis_that_hangs_keeps_no_process(tmp_path: Path) -> None:
    """It takes connections and answers nothing: statistics, alerts and what limits owe can't be written."""
    key = new_key()
    write_keys(tmp_path / "keys.json", entry("alice", key, limits={"requests_per_minute": 1000}))
    valkey = ValkeyProcess(tmp_path).start()
    try:
        with serving("redis", valkey.url, str(tmp_path / "keys.json")) as (process, url):
            body = {"model": "fake-model", "prompt": "hi", "max_tokens": 4}
            answer = httpx.post(f"{url}/v1/completions", json=body, headers=bearer(key), trust_env=False)
            assert answer.status_code == 200
            assert valkey.process is not None
            valkey.process.send_signal(signal.SIGSTOP)
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=PATIENCE_S)
    finally:
        valkey.kill()
    assert process.returncode == 0, errors
    assert "Traceback" not in errors


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
