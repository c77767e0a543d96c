"""While the model is loaded the port answers already; then the real server takes over without losing a connection."""

from __future__ import annotations

import http.client
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from backends.types import START_LOG
from gateway.http.server import GatewayServer, bind
from gateway.http.starting import Starting
from gateway.serving.call import ServedModel
from gateway.serving.state import GatewayState
from tests.support.fakes import PATIENCE_S, FakeDecoder, FakeTokenizer
from tests.support.paths import ROOT


@pytest.fixture
def bound() -> Iterator[socket.socket]:
    with bind("127.0.0.1", 0) as opened:
        yield opened


def ask(bound: socket.socket, method: str, path: str) -> tuple[int, bytes, http.client.HTTPMessage]:
    connection = http.client.HTTPConnection(*bound.getsockname()[:2], timeout=PATIENCE_S)
    try:
        connection.request(method, path, b"{}" if method == "POST" else None)
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.headers
    finally:
        connection.close()


def test_it_says_what_it_waits_for(bound: socket.socket) -> None:
    starting = Starting([bound])
    starting.open()
    try:
        log = logging.getLogger(START_LOG)
        log.setLevel(logging.INFO)
        log.info("loading %s", "/models/secret-folder/llama")
        status, body, _ = ask(bound, "GET", "/healthz")
        assert (status, json.loads(body)["status"], json.loads(body)["degraded"]) == (
            200,
            "starting",
            ["loading llama"],
        )
        asked = (("GET", "/readyz"), ("GET", "/startupz"), ("POST", "/v1/chat/completions"), ("GET", "/metrics"))
        for method, path in asked:
            status, body, headers = ask(bound, method, path)
            assert status == 503 and "loading llama." in json.loads(body)["error"]["message"], path
            assert int(headers["retry-after"]) > 0
        status, body, headers = ask(bound, "HEAD", "/healthz")
        assert (status, body) == (200, b"") and int(headers["content-length"]) > 0
    finally:
        starting.close()


def test_who_connects_in_between_is_answered_by_the_real_server(bound: socket.socket) -> None:
    starting = Starting([bound])
    starting.open()
    with socket.create_connection(bound.getsockname()[:2], PATIENCE_S) as silent:
        starting.close()
        with socket.create_connection(bound.getsockname()[:2], PATIENCE_S) as between:
            between.sendall(b"GET /readyz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            decoder = FakeDecoder()
            state = GatewayState.create({decoder.info.name: ServedModel(decoder, FakeTokenizer())})
            ready = threading.Event()
            server = GatewayServer(state, on_ready=ready.set)
            thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
            thread.start()
            assert ready.wait(PATIENCE_S)
            assert between.recv(4096).startswith(b"HTTP/1.1 200")
            assert ask(bound, "GET", "/healthz")[0] == 200
            assert server._loop is not None
            server._loop.call_soon_threadsafe(server.begin_drain)
            thread.join(PATIENCE_S)
        silent.close()


def test_it_answers_until_the_app_has_started(bound: socket.socket) -> None:
    """Opening the store may take a while too."""
    starting = Starting([bound])
    starting.open()
    decoder = FakeDecoder()
    state = GatewayState.create({decoder.info.name: ServedModel(decoder, FakeTokenizer())})
    seen: list[int] = []

    def on_start() -> None:
        assert state.controller.background.sync is not None, "the app has not started"
        seen.append(ask(bound, "GET", "/readyz")[0])
        starting.close()

    ready = threading.Event()
    server = GatewayServer(state, on_start=on_start, on_ready=ready.set)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    assert ready.wait(PATIENCE_S) and seen == [503]
    assert ask(bound, "GET", "/readyz")[0] == 200
    assert server._loop is not None
    server._loop.call_soon_threadsafe(server.begin_drain)
    thread.join(PATIENCE_S)


TWICE = """
import logging
from gateway.http import server
from gateway.serving.call import ServedModel
from gateway.serving.state import GatewayState
from tests.support.fakes import FakeDecoder, FakeTokenizer
logging.basicConfig()
decoder = FakeDecoder()
decoder.hold(at_step=1)
state = GatewayState.create({decoder.info.name: ServedModel(decoder, FakeTokenizer())})
server.run_server(state, server.bind("127.0.0.1", 0), bounded_exit=True)
"""


def test_a_second_signal_ends_it_without_a_traceback() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", TWICE],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    try:
        assert process.stdout is not None and process.stderr is not None
        port = int(process.stdout.readline().rpartition(":")[2].split("/")[0])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        body = {"model": "fake-model", "prompt": "wait", "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        assert connection.getresponse().status == 200
        process.send_signal(signal.SIGTERM)
        assert "draining: 1 sequences" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0 and errors == "", errors
