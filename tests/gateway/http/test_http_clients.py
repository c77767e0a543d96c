"""What clients of HTTP may count on: half-closed connections, HTTP/1.0, HEAD, kept connections, Java's own client."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import h11
import pytest

from gateway.settings import GatewaySettings
from tests.support.access_helpers import CHAT, chat
from tests.support.fakes import PATIENCE_S
from tests.support.live_gateway import LiveGateway, running_gateway
from tests.support.paths import DATA
from tests.support.wire import Wire

JAVA = DATA / "JdkClient.java"


@pytest.fixture(scope="module", params=["uvloop", "asyncio"])
def gateway(request: pytest.FixtureRequest) -> Iterator[LiveGateway]:
    """On either event loop: they tell half-closed connections in their own ways."""
    with ExitStack() as stack:
        if request.param == "asyncio":
            stack.enter_context(pytest.MonkeyPatch.context()).setitem(sys.modules, "uvloop", None)
        else:
            pytest.importorskip("uvloop")
        live = stack.enter_context(running_gateway())
        assert type(live.loop).__module__.startswith(request.param)
        yield live


def port_of(live: LiveGateway) -> int:
    return int(live.url.rpartition(":")[2])


def asked(body: dict[str, Any], version: str = "1.1", **headers: str) -> bytes:
    content = json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Content-Length": str(len(content)), **headers}
    lines = [f"POST {CHAT} HTTP/{version}", "Host: localhost", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


def read_answer(data: bytes) -> tuple[int, bytes, int]:
    """Status, body, and how many interim answers came before, as a client that knows HTTP reads them."""
    client, interim, body = h11.Connection(h11.CLIENT), 0, b""
    client.send(h11.Request(method="POST", target="/", headers=[("host", "x"), ("content-length", "0")]))
    client.send(h11.EndOfMessage())
    client.receive_data(data)
    client.receive_data(b"")
    while isinstance(event := client.next_event(), h11.InformationalResponse):
        assert event.status_code == 100
        interim += 1
    assert isinstance(event, h11.Response), event
    status = event.status_code
    while isinstance(event := client.next_event(), h11.Data):
        body += event.data
    assert isinstance(event, h11.EndOfMessage), event
    return status, body, interim


def content_of(body: bytes, *, stream: bool) -> str:
    if not stream:
        return str(json.loads(body)["choices"][0]["message"]["content"])
    events = [line.removeprefix("data: ") for line in body.decode().split("\n\n") if line]
    assert events[-1] == "[DONE]"
    return "".join(json.loads(each)["choices"][0]["delta"].get("content", "") for each in events[:-1])


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_closes_its_side_gets_its_answer(gateway: LiveGateway, stream: bool) -> None:
    body = chat(stream=stream, max_tokens=20, seed=1)
    expected = content_of(gateway.http.post(CHAT, json=body).content, stream=stream)
    with Wire(port_of(gateway)) as wire:
        wire.send(asked(body))
        wire.socket.shutdown(socket.SHUT_WR)
        status, answer, _ = read_answer(wire.rest())
        assert (status, content_of(answer, stream=stream)) == (200, expected)
    # While the answer is worked on, too: what is sent to find out whether the client is there does no harm.
    for step in (0, 1):
        gateway.decoder.hold(at_step=step)
        with Wire(port_of(gateway)) as wire:
            wire.send(asked(body))
            wire.socket.shutdown(socket.SHUT_WR)
            wire.until(rb"\n\n\r\n0$" if stream and step else rb"^HTTP/1.1 100 Continue\r\n\r\n$")
            gateway.decoder.release()
            status, answer, interim = read_answer(wire.rest())
        assert (status, content_of(answer, stream=stream)) == (200, expected)
        assert interim <= 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("step", [0, 1])
def test_a_client_that_left_is_noticed(gateway: LiveGateway, stream: bool, version: str, step: int) -> None:
    """While no token comes, so that nothing would be written to it."""
    submitted, aborted = len(gateway.decoder.submitted), len(gateway.decoder.aborted)
    gateway.decoder.hold(at_step=step)
    with Wire(port_of(gateway)) as wire:
        wire.send(asked(chat(stream=stream, ignore_eos=True, max_tokens=100), version))
        gateway.decoder.wait_until(lambda fake: len(fake.submitted) > submitted)
        if stream and step:
            wire.until(rb"data: ")
    gateway.decoder.wait_until(lambda fake: len(fake.aborted) > aborted)
    gateway.wait_idle()
    gateway.decoder.release()


@pytest.mark.parametrize(
    "sent", [b"GET /healthz HT", asked(chat())[:-5], b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"]
)
def test_half_a_request_and_then_the_end(gateway: LiveGateway, sent: bytes) -> None:
    with Wire(port_of(gateway)) as wire:
        wire.send(sent)
        wire.socket.shutdown(socket.SHUT_WR)
        status, body, _ = read_answer(wire.rest())
        assert (status, json.loads(body)["error"]["code"]) == (400, "incomplete_request")


def test_requests_sent_together_are_answered_in_turn_also_half_closed(gateway: LiveGateway) -> None:
    with Wire(port_of(gateway)) as wire:
        wire.send(
            asked(chat(max_tokens=5)) + b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n" + asked(chat(max_tokens=5))
        )
        wire.socket.shutdown(socket.SHUT_WR)
        assert [status for status in wire.statuses(9) if status != 100] == [200, 200, 200]


@pytest.fixture(scope="module")
def plain() -> Iterator[LiveGateway]:
    with running_gateway() as live:
        yield live


@pytest.mark.parametrize("connection", ["", "keep-alive"])
def test_a_client_of_http_1_0_gets_a_stream_without_chunks(plain: LiveGateway, connection: str) -> None:
    body = chat(stream=True, max_tokens=20, seed=1)
    expected = content_of(plain.http.post(CHAT, json=body).content, stream=True)
    with Wire(port_of(plain)) as wire:
        wire.send(asked(body, "1.0", **({"Connection": connection} if connection else {})))
        head, _, answer = wire.rest().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert content_of(answer, stream=True) == expected


def test_head_is_answered_wherever_get_is(plain: LiveGateway) -> None:
    """Asks the app itself, so a route that is added later is there too."""
    app: Any = plain.server.config.app
    found = [re.sub(r"\{[^}]*\}", "fake-model", route.path) for route in app.routes if "GET" in route.methods]
    assert len(found) > 8
    for path in found:
        got, headed = plain.http.get(path), plain.http.head(path)
        assert headed.status_code == got.status_code, path
        assert headed.content == b""
        assert headed.headers.keys() == got.headers.keys()
        assert int(headed.headers["content-length"]) > 0
        if not path.startswith(("/admin", "/metrics")):  # which change with what has happened
            assert headed.headers["content-length"] == str(len(got.content)), path
        assert "GET, HEAD" in plain.http.options(path).headers["allow"]
    refused = plain.http.head(CHAT)
    assert (refused.status_code, refused.headers["allow"]) == (405, "POST, OPTIONS")


def test_the_names_of_health_and_of_the_routes(plain: LiveGateway) -> None:
    assert plain.http.get("/health").json() == plain.http.get("/healthz").json()
    for path in ("/v1", "/v1/", "/"):
        routes = plain.http.get(path).json()["routes"]
        assert {"GET /v1/models", "POST /v1/chat/completions", "POST /v1/completions", "GET /healthz"} < set(routes)
        assert not [each for each in routes if "/admin" in each]


def test_an_idle_connection_is_kept_as_long_as_was_asked_for() -> None:
    with (
        running_gateway(GatewaySettings(keep_alive_s=0.2, header_timeout_s=PATIENCE_S)) as live,
        Wire(port_of(live)) as wire,
    ):
        for _ in range(2):
            # An empty line behind a request is no new one: it must not be answered with 408.
            wire.send(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n\r\n")
            assert wire.statuses(1) == [200]
        assert wire.rest() == b"", "closed without a word"
    assert GatewaySettings().keep_alive_s > 60, "what balancers keep idle connections for"


def test_a_byte_order_mark_is_called_so(plain: LiveGateway) -> None:
    for mark in (b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff"):
        answer = plain.http.post(CHAT, content=mark + b"{}", headers={"content-type": "application/json"})
        assert answer.status_code == 400
        assert "byte order mark" in answer.json()["error"]["message"]


def test_javas_own_client(plain: LiveGateway) -> None:
    """java.net.http.HttpClient as it comes: it asks for HTTP/2 by an upgrade in every request."""
    if (java := shutil.which("java")) is None:
        pytest.skip("no java on PATH")
    if (
        subprocess.run([java, "--list-modules"], capture_output=True, text=True, check=False).stdout.find(
            "jdk.compiler"
        )
        < 0
    ):
        pytest.skip("this java can't run source files; a JDK can")
    body = chat(max_tokens=20, seed=1)
    expected = content_of(plain.http.post(CHAT, json=body).content, stream=False)
    command = [java, "-XX:TieredStopAtLevel=1", "-Xshare:auto", str(JAVA), plain.url + CHAT]
    command += [json.dumps(body), json.dumps({**body, "stream": True})]
    done = subprocess.run(command, capture_output=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr.decode()
    first, second, streamed = done.stdout.split(b"\n----\n")[:3]
    for each, stream in ((first, False), (second, False), (streamed, True)):
        status, _, answer = each.partition(b"\n")
        assert status == b"200 HTTP_1_1"
        assert content_of(answer, stream=stream) == expected
