"""Prompts and keys never reach a log: a real process with everything switched on, and its whole output."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from tests.access_helpers import CHAT, bearer, entry, new_key, write_keys

MARKER = "zanzibar-marker-7f3a"
MODEL = "fake-model"
PATIENCE_S = 120.0

# Every logger at its lowest level, also those of libraries, and asyncio's own debugging. The engine is a fake; all that
# has to do with HTTP is as it is served.
SERVE = """
import logging, sys
from tests.test_cli import FakeLoading
sys.modules["backends.loading"] = FakeLoading()
logging.basicConfig(level=1, stream=sys.stderr)
from gateway.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_prompts_and_keys_are_never_logged(tmp_path: Path) -> None:
    key, admin = new_key(), new_key()
    write_keys(tmp_path / "keys", entry("alice", key, scopes=["inference", "admin"]), entry("root", admin))
    options = ["--port", "0", "--redis-url", "memory", "--access-log", "--log-level", "debug"]
    command = [sys.executable, "-c", SERVE, "serve", *options, "--api-keys", str(tmp_path / "keys")]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONASYNCIODEBUG": "1", "LITESTAR_DEBUG": "1"}
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        cwd=Path(__file__).parent.parent,
    )
    assert process.stdout is not None
    lines: list[str] = []
    ready = threading.Event()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if "serves" in line and "http://" in line:
                ready.set()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        assert ready.wait(PATIENCE_S), "".join(lines)
        url = next(found.group() for line in lines if (found := re.search(r"http://[\d.:]+", line)))
        prompt = f"Say {MARKER}, and then {MARKER}."
        message = {"role": "user", "content": prompt}
        good = {"model": MODEL, "messages": [message], "max_tokens": 8}
        bodies: list[bytes | dict[str, object]] = [
            good,
            {**good, "stream": True},
            {**good, "n": 2, "temperature": 1.0, "decoding": {"method": "vanilla"}},
            # Refused, each in its own way and each with the prompt at hand.
            {**good, "messages": [{"role": MARKER, "content": prompt}]},
            {**good, "messages": [{**message, MARKER: 1}]},
            {**good, "model": f"{MARKER}-model"},
            {**good, "max_tokens": 10**6},
            {**good, "messages": [message] * 200},
            {**good, "stop": [MARKER], "user": MARKER, "metadata": {"x": MARKER}},
            json.dumps(good).encode()[:-9],
            json.dumps(good).encode().replace(b"Say", b"\xff"),
        ]
        headers = {**bearer(key), "content-type": "application/json"}
        statuses = []
        with httpx.Client(base_url=url, timeout=PATIENCE_S) as http:
            for body in bodies:
                raw = body if isinstance(body, bytes) else json.dumps(body).encode()
                statuses.append(http.post(CHAT, content=raw, headers=headers).status_code)
            text = {"model": MODEL, "prompt": prompt, "max_tokens": 4}
            statuses.append(http.post("/v1/completions", json=text, headers=headers).status_code)
            statuses.append(http.post("/v1/decoding/explain", json=good, headers=headers).status_code)
            statuses.append(http.post(CHAT, json=good, headers=bearer(f"mgw-{MARKER}")).status_code)
            with http.stream("POST", CHAT, json={**good, "stream": True, "max_tokens": 200}, headers=headers) as stream:
                next(stream.iter_bytes())  # and leave
            http.get("/healthz")
        assert statuses[:3] == [200, 200, 200]
        assert set(statuses) == {200, 400, 401, 404}
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
        reader.join(PATIENCE_S)
    finally:
        process.kill()
        process.wait()
    output = "".join(lines)
    assert "INFO gateway.requests" in output, "logs are on"
    assert "/v1/chat/completions" in output, "the access log too"
    for secret in (MARKER, "zanzibar", key, admin, key.removeprefix("mgw-")):
        assert secret not in output


def test_an_unexpected_error_is_logged_without_its_message(caplog: pytest.LogCaptureFixture) -> None:
    """An exception's text may quote what it choked on."""
    from gateway.errors import handle_unexpected

    def choke(text: str) -> None:
        try:
            raise KeyError(text)
        except KeyError as error:
            raise ValueError(f"can't digest {text}") from error

    try:
        choke(MARKER)
    except ValueError as error:
        told = handle_unexpected(error, "POST /v1/chat/completions")
    assert MARKER not in caplog.text
    assert "ValueError" in caplog.text
    assert "KeyError" in caplog.text
    assert "in choke" in caplog.text
    assert told.body() == (
        b'{"error":{"message":"The gateway failed on this request; its log says why.",'
        b'"type":"server_error","param":null,"code":"internal_error"}}'
    )
