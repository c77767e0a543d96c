"""A real server that remembers every request that reached the application, and bare connections to it."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from gateway.settings import GatewaySettings
from tests.support.fakes import PATIENCE_S
from tests.support.live_gateway import LiveGateway, running_gateway
from tests.support.wire_cases import Seen

_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)\r\n", re.IGNORECASE)


@dataclass
class Echo:
    """What reached the application. Targets under ``/echo`` are answered here, all others by the gateway itself."""

    live: LiveGateway
    seen: list[Seen] = field(default_factory=list)

    @property
    def port(self) -> int:
        return int(self.live.url.rpartition(":")[2])

    def turn(self) -> None:
        """Until the server has read what was sent so far, as far as it wants to."""

        async def nothing() -> None:
            pass

        # The first one wakes the loop, which then looks at its sockets too.
        self.live.in_loop(nothing())
        self.live.in_loop(nothing())


@contextmanager
def echoing(settings: GatewaySettings | None = None) -> Iterator[Echo]:
    with running_gateway(settings) as live:
        echo = Echo(live)
        app: Any = live.server.config.app
        behind = app.asgi_handler

        async def handle(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] != "http":
                await behind(scope, receive, send)
                return
            target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
            if not target.startswith(b"/echo"):
                echo.seen.append((scope["method"], target, b""))
                await behind(scope, receive, send)
                return
            body, more = b"", True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return
                body += message["body"]
                more = message["more_body"]
            echo.seen.append((scope["method"], target, body))
            headers = [(b"content-length", b"0")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        app.asgi_handler = handle
        yield echo


class Wire:
    """A bare connection."""

    def __init__(self, port: int, patience_s: float = PATIENCE_S) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), patience_s)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._read = b""

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        # A server that has refused already may close while we send.
        with suppress(ConnectionError):
            self.socket.sendall(data)

    def statuses(self, count: int) -> list[int]:
        """Of the next ``count`` answers; fewer where the connection ends before."""
        found: list[int] = []
        while len(found) < count:
            end = self._read.find(b"\r\n\r\n")
            if end < 0:
                if not self._more():
                    break
                continue
            status, length = _STATUS.match(self._read), _LENGTH.search(self._read, 0, end + 2)
            assert status, self._read
            size = end + 4 + (int(length[1]) if length else 0)
            while len(self._read) < size and self._more():
                pass
            self._read = self._read[size:]
            found.append(int(status[1]))
        return found

    def until(self, pattern: bytes) -> bytes:
        """All that was not read yet, once it matches. Nothing of it is taken away."""
        while not re.search(pattern, self._read, re.DOTALL):
            assert self._more(), self._read
        return self._read

    def rest(self) -> bytes:
        """All until the server closes."""
        with suppress(ConnectionResetError):
            while self._more():
                pass
        return self._read

    def _more(self) -> bool:
        data = self.socket.recv(65536)
        self._read += data
        return bool(data)


def cut(data: bytes, at: Sequence[int]) -> list[bytes]:
    edges = [0, *sorted(at), len(data)]
    return [data[low:high] for low, high in pairwise(edges)]
