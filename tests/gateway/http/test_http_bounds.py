"""What clients may do to a connection: slow and endless headers and bodies, answers left unread, and noise."""

from __future__ import annotations

import json
import socket
import string
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from gateway.http.server import bind
from gateway.settings import GatewaySettings
from tests.support.access_helpers import CHAT, chat
from tests.support.fakes import PATIENCE_S, FakeDecoder
from tests.support.live_gateway import LiveGateway, running_gateway

SHORT_S = 0.3
MOST = 8 * 1024
BOUNDED = settings(
    max_examples=60,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def gateway() -> Iterator[LiveGateway]:
    bounds = GatewaySettings(
        max_header_bytes=MOST, header_timeout_s=SHORT_S, body_timeout_s=SHORT_S, max_body_bytes=100_000
    )
    with running_gateway(bounds) as live:
        yield live


class Line:
    """A bare connection."""

    def __init__(self, gateway: LiveGateway) -> None:
        host, _, port = gateway.url.removeprefix("http://").partition(":")
        self.socket = socket.create_connection((host, int(port)), PATIENCE_S)

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def rest(self) -> bytes:
        """All until the server closes. Waits PATIENCE_S at most: that it closes at all is what is tested."""
        found = b""
        try:
            while data := self.socket.recv(65536):
                found += data
        except ConnectionResetError:
            # Closed while we were still sending; what came before may be lost with it.
            pass
        return found


def head(path: str = CHAT, method: str = "POST", **headers: str) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", *(f"{name}: {value}" for name, value in headers.items())]
    return ("\r\n".join(lines) + "\r\n").encode()


def error_of(answer: bytes) -> tuple[int, str]:
    status, _, body = answer.partition(b"\r\n\r\n")
    return int(status.split()[1]), json.loads(body)["error"]["code"]


def test_a_silent_connection_is_closed_without_a_word(gateway: LiveGateway) -> None:
    with Line(gateway) as line:
        assert line.rest() == b""


@pytest.mark.parametrize("sent", [b"P", head(), head() + b"X-Slow: a"])
def test_headers_that_do_not_end(gateway: LiveGateway, sent: bytes) -> None:
    with Line(gateway) as line:
        line.send(sent)
        assert error_of(line.rest()) == (408, "request_timeout")


def test_a_byte_now_and_then_does_not_help(gateway: LiveGateway) -> None:
    """The classic slow loris: it always sends a little more, and never the end."""
    with Line(gateway) as line:
        line.send(head())
        stop = threading.Event()

        def drip() -> None:
            while not stop.wait(SHORT_S / 10):
                try:
                    line.send(b"X-a: b\r\n")
                except OSError:
                    return

        dripping = threading.Thread(target=drip)
        dripping.start()
        answer = line.rest()
        stop.set()
        dripping.join()
        assert answer == b"" or error_of(answer) == (408, "request_timeout")


@pytest.mark.parametrize("framing", [{"Content-Length": "1000"}, {"Transfer-Encoding": "chunked"}])
def test_a_body_that_does_not_end(gateway: LiveGateway, framing: dict[str, str]) -> None:
    with Line(gateway) as line:
        line.send(head(**{"Content-Type": "application/json"}, **framing) + b"\r\n" + b"3e8\r\n{")
        assert error_of(line.rest()) == (408, "request_timeout")
    assert gateway.state.admission.in_flight == 0


def test_a_body_that_nobody_wants_is_not_waited_for_either(gateway: LiveGateway) -> None:
    """Refused at once; the connection goes when the time for the body is over."""
    with Line(gateway) as line:
        line.send(head(**{"Content-Type": "text/plain", "Content-Length": "1000"}) + b"\r\n{")
        answer = line.rest()
        assert answer.startswith(b"HTTP/1.1 415")
        assert answer.count(b"HTTP/1.1") == 1, "nothing is said twice"


def test_a_second_request_on_the_same_connection_has_its_own_time(gateway: LiveGateway) -> None:
    with Line(gateway) as line:
        line.send(head("/healthz", "GET") + b"\r\n")
        assert line.socket.recv(65536).startswith(b"HTTP/1.1 200")
        line.send(head("/healthz", "GET"))
        assert error_of(line.rest()) == (408, "request_timeout")


def test_time_is_not_counted_while_the_gateway_works(gateway: LiveGateway) -> None:
    gateway.decoder.hold(at_step=1)
    release = threading.Timer(SHORT_S * 3, gateway.decoder.release)
    release.start()
    response = gateway.http.post(CHAT, json=chat())
    release.join()
    assert response.status_code == 200


@pytest.mark.parametrize(
    "sent",
    [
        head("/" + "x" * MOST, "GET") + b"\r\n",
        head(**{"X-Long": "x" * MOST}) + b"\r\n",
        head(**{f"X-{n}": "x" for n in range(MOST // 4)}) + b"\r\n",
        head() + b"X-Endless: " + b"x" * 4 * MOST,
        b"GET /" + b"x" * 4 * MOST,
    ],
    ids=["long path", "long value", "many headers", "endless value", "endless path"],
)
def test_headers_that_are_too_large(gateway: LiveGateway, sent: bytes) -> None:
    with Line(gateway) as line:
        line.send(sent)
        answer = line.rest()
        assert answer == b"" or error_of(answer) == (431, "headers_too_large")


def test_headers_just_small_enough(gateway: LiveGateway) -> None:
    assert gateway.http.get("/healthz", headers={"x-long": "x" * (MOST - 1000)}).status_code == 200


def test_an_oversized_body_is_refused_however_it_is_framed(gateway: LiveGateway) -> None:
    body = json.dumps(chat("x" * 200_000)).encode()
    headers = {"content-type": "application/json"}
    assert gateway.http.post(CHAT, content=body, headers=headers).status_code == 413
    pieces = (body[at : at + 10_000] for at in range(0, len(body), 10_000))
    assert gateway.http.post(CHAT, content=pieces, headers=headers).status_code == 413


def test_a_stream_that_nobody_reads_is_given_up() -> None:
    """Else one client that does not read holds places for ever."""
    decoder = FakeDecoder(max_model_len=100_000)
    with bind("127.0.0.1", 0) as small:
        # Inherited by what is accepted: so little is written ahead that an answer of some 100 KiB is enough.
        small.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        bounds = GatewaySettings(stalled_timeout_s=SHORT_S)
        with running_gateway(bounds, decoder, more_sockets=[small]) as live, socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(small.getsockname())
            body = json.dumps(chat(stream=True, max_tokens=5000, ignore_eos=True)).encode()
            framing = {"Content-Type": "application/json", "Content-Length": str(len(body))}
            client.sendall(head(**framing) + b"\r\n" + body)
            decoder.wait_until(lambda fake: len(fake.aborted) == 1)
            live.wait_idle()


# Noise.

_CHARACTERS = st.sampled_from(string.printable + "éß🙂\x00\x7f%/\\?#..;=")
_PARTS = ["v1", "admin", "..", ".", "%2e%2e", "%00", "%ff", "", "stats", "models", "x" * 300]
PATHS = st.one_of(
    st.text(_CHARACTERS, max_size=40),
    st.lists(st.sampled_from(_PARTS), max_size=6).map("/".join),
)
STATUSES = {200, 204, 400, 401, 403, 404, 405, 408, 411, 413, 415, 417, 431, 501, 505}


def answered(gateway: LiveGateway, data: bytes) -> bytes:
    with Line(gateway) as line:
        try:
            line.send(data)
            line.socket.shutdown(socket.SHUT_WR)
        except OSError:
            pass
        return line.rest()


def check(answer: bytes) -> None:
    assert b"Traceback" not in answer
    assert b'File "' not in answer
    for each in answer.split(b"HTTP/1.1 ")[1:]:
        assert int(each[:3]) in STATUSES, answer
        if not each.startswith(b"20"):
            assert b'{"error":{' in each or each.startswith(b"405") or b"content-length: 0" in each, answer


def test_path_fuzzing(gateway: LiveGateway) -> None:
    @BOUNDED
    @given(PATHS, st.sampled_from(["GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE"]))
    def run(path: str, method: str) -> None:
        answer = answered(gateway, head("/" + path, method, Connection="close") + b"\r\n")
        if method != "HEAD":
            check(answer)

    run()


def test_header_fuzzing(gateway: LiveGateway) -> None:
    names = st.sampled_from(
        ["authorization", "content-type", "content-length", "transfer-encoding", "host", "x-request-id", "expect",
         "connection", "upgrade", "origin", "content-encoding", "traceparent", "x-medusa-hops", "cookie", "accept"]
    ) | st.text(string.ascii_letters + "-_ \x00:", max_size=12)  # fmt: skip
    known = [b"100-continue", b"chunked", b"-1", b"99999999999999999999", b"close"]
    values = st.binary(max_size=60) | st.sampled_from(known)

    @BOUNDED
    @given(st.lists(st.tuples(names, values), max_size=8), st.booleans())
    def run(headers: Any, post: bool) -> None:
        lines = b"".join(name.encode() + b": " + value + b"\r\n" for name, value in headers)
        start = head(CHAT, "POST", Connection="close") if post else head("/v1/models", "GET", Connection="close")
        check(answered(gateway, start + lines + b"\r\n" + b'{"model": "fake-model"}'))

    run()
    assert gateway.http.get("/healthz").status_code == 200
    assert gateway.state.admission.in_flight == 0


def test_bytes_that_are_not_http(gateway: LiveGateway) -> None:
    @BOUNDED
    @given(st.binary(min_size=1, max_size=200))
    def run(data: bytes) -> None:
        check(answered(gateway, data))

    run()
