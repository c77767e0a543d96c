"""Prompts and keys never reach a log: a real process with everything switched on, and its whole output."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from gateway.auth.keyfile import parse_keys
from gateway.routing.backends_file import parse_backends
from policy.config.problems import ConfigError, PolicyError
from policy.file.format import parse_policy
from policy.shared.redis_client import parse_redis_url
from telemetry.logs import without_secrets
from tests.support.access_helpers import CHAT, bearer, entry, new_key, write_keys
from tests.support.alert_receivers import Webhook
from tests.support.paths import ROOT

MARKER = "zanzibar-marker-7f3a"
MODEL = "fake-model"
PATIENCE_S = 120.0

# Every logger at its lowest level, also those of libraries, and asyncio's own debugging. The engine is a fake; all that
# has to do with HTTP is as it is served.
SERVE = """
import logging, sys
from tests.gateway.commands.test_cli import FakeLoading
sys.modules["backends.engine.loading"] = FakeLoading()
logging.basicConfig(level=1, stream=sys.stderr)
from gateway.cli import main
sys.exit(main(sys.argv[1:]))
"""


class Serving:
    """A gateway in a process of its own, and all that it has said."""

    def __init__(self, *options: str, **environment: str) -> None:
        self.lines: list[str] = []
        self._ready = threading.Event()
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVE, "serve", "--port", "0", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
            cwd=ROOT,
        )
        self._reader = threading.Thread(target=self._read)

    def __enter__(self) -> Serving:
        self._reader.start()
        if not self._ready.wait(PATIENCE_S):
            self.__exit__()
            pytest.fail(self.output)
        self.url = next(found.group() for line in self.lines if (found := re.search(r"http://[\d.]+:\d+", line)))
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(PATIENCE_S)

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(PATIENCE_S) == 0

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if "serves" in line and "http://" in line:
                self._ready.set()


def test_prompts_and_keys_are_never_logged(tmp_path: Path) -> None:
    key, admin = new_key(), new_key()
    write_keys(tmp_path / "keys", entry("alice", key, scopes=["inference", "admin"]), entry("root", admin))
    options = ["--redis-url", "memory", "--access-log", "--log-level", "debug", "--api-keys", str(tmp_path / "keys")]
    with Serving(*options, PYTHONASYNCIODEBUG="1", LITESTAR_DEBUG="1") as serving:
        url = serving.url
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
        serving.end()
    output = serving.output
    assert "INFO gateway.requests" in output, "logs are on"
    assert "/v1/chat/completions" in output, "the access log too"
    for secret in (MARKER, "zanzibar", key, admin, key.removeprefix("mgw-")):
        assert secret not in output


SECRET = "topsecret"
BAD = ("nobody", "odd", "torn")
POLICY = """
version: 1
alerts:
  - {name: up, metric: medusa_engine_up, above: 0, for: 0s}
receivers:
  good: {kind: webhook, url_env: GOOD_URL, token_env: TOKEN}
  nobody: {kind: alertmanager, url_env: NOBODY_URL}
  odd: {kind: webhook, url_env: ODD_URL}
  torn: {kind: webhook, url_env: GOOD_URL, token_env: TORN_TOKEN}
"""
BACKENDS = """
version: 1
backends:
  - {name: engine, kind: engine, serves: fake-model}
  - {name: away, kind: openai, serves: fake-model, url: "http://127.0.0.1:1/v1", api_key_env: TOKEN, priority: 1}
"""


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(("level", "form"), [("info", "json"), ("debug", "text")])
def test_secrets_of_urls_and_headers_are_never_logged(tmp_path: Path, level: str, form: str) -> None:
    """Those of webhooks, collectors, upstreams and Redis, whether they can be reached or not."""
    (tmp_path / "policy.yaml").write_text(POLICY)
    (tmp_path / "backends.yaml").write_text(BACKENDS)
    files = ["--policy", str(tmp_path / "policy.yaml"), "--backends", str(tmp_path / "backends.yaml")]
    collector = f"http://user:{SECRET}@127.0.0.1:1/{SECRET}?token={SECRET}"
    with (
        Webhook() as webhook,
        Serving(
            *(*files, "--log-level", level, "--log-format", form),
            GOOD_URL=f"{webhook.url}/services/{SECRET}?token={SECRET}",
            NOBODY_URL=f"http://{SECRET}:{SECRET}@127.0.0.1:1/{SECRET}?token={SECRET}",
            ODD_URL=f"http://user:{SECRET}",
            TOKEN=SECRET,
            TORN_TOKEN=f"{SECRET}\n{SECRET}",
            MEDUSA_REDIS_URL=f"redis://user:{SECRET}@127.0.0.1:1/0",
            OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=collector,
            OTEL_EXPORTER_OTLP_METRICS_ENDPOINT=collector,
            OTEL_EXPORTER_OTLP_HEADERS=f"api-key={SECRET}",
            OTEL_METRIC_EXPORT_INTERVAL="100",
            OTEL_BSP_SCHEDULE_DELAY="100",
            OTEL_EXPORTER_OTLP_TIMEOUT="2",
        ) as serving,
        httpx.Client(base_url=serving.url, timeout=PATIENCE_S) as http,
    ):
        webhook.wait(1)
        assert webhook.received[0][0] == f"/services/{SECRET}?token={SECRET}"
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        assert http.post(CHAT, json=chat).status_code == 200
        until(lambda: all(http.get("/admin/alerts").json()["receivers"][name]["error"] for name in BAD))
        shown = [http.get(path).text for path in ("/admin/alerts", "/admin/backends", "/healthz", "/metrics")]
        until(lambda: "while exporting" in serving.output and "alerts did not reach torn" in serving.output)
        if form == "json":
            # Exporters get seconds for their last words.
            serving.end()
    assert SECRET not in serving.output
    assert SECRET not in "".join(shown)
    assert "gateway.requests" in serving.output, "the level is what was asked for"
    if form == "json":
        lines = [json.loads(line) for line in serving.lines]
        assert {"timestamp", "level", "logger", "message"} <= lines[0].keys()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("POST http://u:s3cret@h:1/p?a=s3cret&b=c done", "POST http://***@h:1/p?*** done"),
        ("Pool(host='h'): failed with url: /s3cret/v1?x=s3cret (Caused by x)", "failed with url: *** (Caused by x)"),
        ("redis://:s3cret@h/0", "redis://***@h/0"),
        ("is it? a=b, at http://h/p", "is it? a=b, at http://h/p"),
    ],
)
def test_secrets_are_taken_out_of_any_line(text: str, shown: str) -> None:
    assert without_secrets(text).endswith(shown)


@pytest.mark.parametrize("url", ["redis://:top/secret@h", "redis://:top#secret@h", "redis://h/topsecret"])
def test_a_wrong_redis_url_is_not_quoted(url: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_redis_url(url)
    assert "top" not in str(caught.value)
    assert "secret" not in str(caught.value)


def test_wrong_urls_in_files_are_not_quoted(tmp_path: Path) -> None:
    for url in (f"ftp://user:{SECRET}@h", f"http://user:{SECRET}@h", f"http://user:{SECRET}", f"http://h/?k={SECRET}"):
        with pytest.raises(ConfigError) as caught:
            parse_backends(BACKENDS.replace("http://127.0.0.1:1/v1", url).encode(), "backends.yaml")
        assert SECRET not in str(caught.value)
        if "?" not in url and not url.endswith(SECRET):
            with pytest.raises(PolicyError) as caught:
                parse_policy(POLICY.replace("url_env: GOOD_URL", f'url: "{url}"').encode(), "policy.yaml")
            assert SECRET not in str(caught.value)


@pytest.mark.parametrize("parse", [parse_keys, parse_backends, parse_policy])
def test_a_secret_in_place_of_the_version_is_not_quoted(parse: Callable[[bytes, str], object]) -> None:
    with pytest.raises(ConfigError, match="this gateway reads version 1") as caught:
        parse(f"version: {SECRET}\n".encode(), "file.yaml")
    assert SECRET not in str(caught.value)


def test_an_unexpected_error_is_logged_without_its_message(caplog: pytest.LogCaptureFixture) -> None:
    """An exception's text may quote what it choked on."""
    from gateway.wire.errors import handle_unexpected

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
