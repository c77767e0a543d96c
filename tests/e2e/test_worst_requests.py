"""The worst requests that a client may send, one after the other, while a stream runs: nobody else is held up.

A real gateway with the tiny engine in a process of its own. Two bystanders are watched: a stream that always runs, and
a client that asks for ``/healthz`` all the time. What a bad request answers does not matter here, only that it answers,
and that neither bystander waits much longer meanwhile than it does without.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from tests.support.fakes import PATIENCE_S
from tests.support.paths import ROOT

MODEL = "tiny-random"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
EXPLAIN, VALIDATE = "/v1/decoding/explain", "/admin/policy/validate"
MOST = 4 * 1024 * 1024
"""The largest body that a gateway takes by default."""

FLOOR_S = 0.1
RATIO = 4.0
"""A bystander's longest wait is at most this many times its longest wait without the request, plus the floor."""
TRIES = 3


def floor_s() -> float:
    """More where more programs want each core: one that holds a lock is then stopped in the midst of it."""
    return FLOOR_S * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


CALM_S = 0.5


class Row(NamedTuple):
    name: str
    path: str
    body: bytes


def dumped(**fields: Any) -> bytes:
    body = json.dumps({"model": MODEL, "max_tokens": 2, **fields}, separators=(",", ":")).encode()
    assert len(body) <= MOST, f"{len(body)} bytes would only be refused for their number"
    return body


def said(content: Any, role: str = "user", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def wrapped(inside: bytes, before: bytes = b"") -> bytes:
    return b'{"model":"%b",%b%b}' % (MODEL.encode(), before, inside)


HI = [said("hi")]
LETTERS = "some words and others " * 800
PROMPTS = [
    Row("4 MB in one message", CHAT, dumped(messages=[said("some words " * 380_000)])),
    Row("4 MB without a blank", CHAT, dumped(messages=[said("a" * 4_000_000)])),
    Row("1 MB of emoji", CHAT, dumped(messages=[said("\U0001f469\u200d\U0001f680" * 40_000)])),
    Row("4 MB with special tokens", CHAT, dumped(messages=[said("words <|end|> " * 290_000)])),
    Row("70,000 messages", CHAT, dumped(messages=[said("a b c")] * 70_000)),
    Row("40,000 answers as upstreams give them", CHAT, dumped(messages=[said("a", "assistant", reasoning_content="x",
                                                                            refusal=None)] * 40_000)),
    Row("100,000 parts", CHAT, dumped(messages=[said([{"type": "text", "text": "a b"}] * 100_000)])),
    Row("16,000 letters as messages", CHAT, dumped(messages=[said("words ")] * 16_000)),
    Row("4 MB of prompt", TEXT, dumped(prompt="some words " * 380_000)),
    Row("4 MB of prompt without a blank", TEXT, dumped(prompt="a" * 4_000_000)),
    Row("100 prompts of 16,000 letters", TEXT, dumped(prompt=[LETTERS[:16_000]] * 100)),
    Row("2,000,000 token ids", TEXT, dumped(prompt=[7] * 2_000_000)),
    Row("600,000 prompts of one token", TEXT, dumped(prompt=[[7]] * 600_000)),
    Row("1,000,000 prompts of one letter", TEXT, dumped(prompt=["a"] * 1_000_000)),
]  # fmt: skip
BIASES = {str(i): 1 for i in range(50_000)}
LABELS = {f"key {i}": "x" for i in range(100_000)}
UNKNOWN = [f"unknown field {i}" for i in range(150_000)]
FIELDS = [
    Row("16 stops of 1,024 letters", CHAT, dumped(messages=HI, stop=[chr(97 + i) * 1024 for i in range(16)])),
    Row("50,000 biases", CHAT, dumped(messages=HI, logit_bias=BIASES)),
    Row("a wrong bias after 50,000", CHAT, dumped(messages=HI, logit_bias={**BIASES, "x": "y"})),
    Row("the widest tree", CHAT, dumped(messages=HI, decoding={"tree": [[i] for i in range(256)]})),
    Row("the deepest tree", CHAT, dumped(messages=HI, decoding={"tree": "1x1x1x1", "method": "medusa"})),
    Row("the largest tree", CHAT, dumped(messages=HI, decoding={"tree": "4x3x3x4", "method": "medusa"})),
    Row("16 choices with 20 alternatives", CHAT, dumped(messages=HI, n=16, logprobs=True, top_logprobs=20,
                                                        max_tokens=64)),
    Row("100,000 keys of metadata", CHAT, dumped(messages=HI, metadata=LABELS)),
    Row("a wrong key after 100,000", CHAT, dumped(messages=HI, metadata={**LABELS, "a": 1})),
]  # fmt: skip
ODD = [
    Row("nested beyond depth", CHAT, wrapped(b'"tools":' + b"[" * 2_000_000 + b"]" * 2_000_000)),
    Row("nested objects", CHAT, wrapped(b'"messages":[],"tools":' + b'{"a":' * 400_000 + b"1" + b"}" * 400_000)),
    Row("a list of 1,300,000 lists", CHAT, wrapped(b'"messages":[],"tools":[' + b"[]," * 1_300_000 + b"[]]")),
    Row("a field name of 4 MB", CHAT, wrapped(b'"messages":[],"' + b"n" * 4_000_000 + b'":1')),
    Row("4 MB of unknown fields", CHAT, dumped(messages=HI, **dict.fromkeys(UNKNOWN, 1))),
    Row("4 MB of unknown fields that are null", CHAT, dumped(messages=HI, **dict.fromkeys(UNKNOWN))),
    Row("a wrong role of 4 MB", CHAT, dumped(messages=[said("hi", "r" * 4_000_000)])),
    Row("a name of 4 MB", CHAT, dumped(messages=[said("hi", name="n" * 4_000_000)])),
    Row("spaces", CHAT, b" " * (MOST - 1)),
]  # fmt: skip


def policy_row(name: str, text: str) -> Row:
    return Row(name, VALIDATE, json.dumps({"policy": text}).encode())


CLASSES = "version: 1\nclasses:\n"
POLICIES = [
    policy_row("a policy of brackets", "version: 1\ndefaults: " + "[" * 5000 + "]" * 5000),
    policy_row("a policy of 6,000 classes", CLASSES + "".join(f"  class{i}: {{}}\n" for i in range(6_000))),
    policy_row(
        "a policy of 400 classes and 400 rules",
        CLASSES
        + "".join(f"  c{i}: {{}}\n" for i in range(400))
        + "rules:\n"
        + "".join(f"  - {{name: r{i}, when: {{load: {{min: {i}}}}}, set: {{}}}}\n" for i in range(400)),
    ),
    policy_row(
        "a policy of 1,000 classes and 1,000 rules",
        CLASSES
        + "".join(f"  c{i}: {{}}\n" for i in range(1_000))
        + "rules:\n"
        + "".join(f"  - {{name: r{i}, when: {{load: {{min: {i}}}}}, set: {{}}}}\n" for i in range(1_000)),
    ),
    policy_row("4 MB of policy", "version: 1\n" + "# a comment\n" * 300_000),
]
# The decoder is the routes' own, so of the rest one is enough.
EXPLAINED = [Row(f"explain: {name}", EXPLAIN, body) for name, _, body in [*PROMPTS, *ODD[:1]]]
ROWS = [*PROMPTS, *FIELDS, *ODD, *EXPLAINED, *POLICIES]


class Bystander:
    """Does ``work`` over and over in a thread, and remembers when it had to wait, and how long."""

    def __init__(self, port: int) -> None:
        self.waits: list[tuple[float, float]] = []
        """When each wait ended, and how long it was."""
        self._waiting_since = time.monotonic()
        self._stop = threading.Event()
        self._port = port
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def work(self, connection: http.client.HTTPConnection) -> None:
        raise NotImplementedError

    def begin(self) -> None:
        self._waiting_since = time.monotonic()

    def end(self) -> None:
        now = time.monotonic()
        self.waits.append((now, now - self._waiting_since))

    def longest(self, begun: float, ended: float) -> float:
        """Of the waits that overlap a time, also of one that is not over yet."""
        return max((wait for at, wait in self.waits if at >= begun and at - wait <= ended), default=0.0)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(PATIENCE_S)

    def _run(self) -> None:
        while not self._stop.is_set():
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE_S)
            try:
                while not self._stop.is_set():
                    self.work(connection)
            except (OSError, http.client.HTTPException):
                # Cut off by a gateway that had no time for it: that counts as waiting for ever.
                self.waits.append((time.monotonic(), float("inf")))
                time.sleep(0.01)
            finally:
                connection.close()


class Asker(Bystander):
    """A second client: is the gateway well?"""

    def work(self, connection: http.client.HTTPConnection) -> None:
        self.begin()
        connection.request("GET", "/healthz")
        connection.getresponse().read()
        self.end()
        time.sleep(0.001)


class Reader(Bystander):
    """A stream's client: one stream after the other, and the times to the first chunk and from chunk to chunk."""

    BODY = json.dumps(
        {"model": MODEL, "prompt": "once", "max_tokens": 240, "stream": True, "ignore_eos": True, "seed": 1}
    )

    def work(self, connection: http.client.HTTPConnection) -> None:
        self.begin()
        connection.request("POST", TEXT, self.BODY, {"content-type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200, response.read()
        while response.readline():
            self.end()
            self.begin()


class Watched:
    """A gateway with its bystanders."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.bystanders = {"/healthz": Asker(port), "the stream": Reader(port)}

    def send(self, row: Row) -> tuple[int, dict[str, float]]:
        """The status, and each bystander's longest wait meanwhile."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        begun = time.monotonic()
        connection.request("POST", row.path, row.body, {"content-type": "application/json"})
        response = connection.getresponse()
        response.read()
        connection.close()
        return response.status, self._longest(begun)

    def calm(self) -> dict[str, float]:
        """Each bystander's longest wait while nothing else goes on."""
        begun = time.monotonic()
        time.sleep(CALM_S)
        return self._longest(begun)

    def _longest(self, begun: float) -> dict[str, float]:
        ended = time.monotonic()
        for each in self.bystanders.values():
            # A wait that began meanwhile is known when it is over.
            while not (each.waits and each.waits[-1][0] > ended):
                time.sleep(0.001)
        return {name: each.longest(begun, ended) for name, each in self.bystanders.items()}

    def stop(self) -> None:
        for each in self.bystanders.values():
            each.stop()


@pytest.fixture(scope="module")
def watched() -> Iterator[Watched]:
    command = [sys.executable, "-m", "gateway", "serve", "--model", MODEL, "--port", "0", "--redis-url", "memory"]
    folder = ROOT
    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    )
    try:
        assert process.stdout is not None
        line = next((line for line in process.stdout if " serves " in line), "")
        assert line, "the gateway did not start"
        watched = Watched(int(line.split("http://127.0.0.1:")[1].split("/")[0]))
        for _ in range(3):
            watched.calm()
        yield watched
        watched.stop()
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE_S)
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_nobody_else_is_held_up(watched: Watched, row: Row) -> None:
    told: list[str] = []
    for _ in range(TRIES):
        calm = watched.calm() if told else {"/healthz": 0.0, "the stream": 0.0}
        status, busy = watched.send(row)
        assert status < 500, row.name
        late = [name for name, wait in busy.items() if wait > RATIO * calm[name] + floor_s()]
        if not late:
            return
        told.append(", ".join(f"{name}: {busy[name] * 1e3:.0f} ms, else {calm[name] * 1e3:.0f} ms" for name in late))
    pytest.fail("; ".join(told))
