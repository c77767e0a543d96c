"""uvicorn's HTTP protocol with what it lacks: limits on the size of headers and on the time that clients may take.

One timer per connection. It runs while the client owes something: the rest of its headers, the rest of its body, or the
reading of what was written to it. Without it, a client that sends a byte a minute holds its connection for ever.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gateway.errors import ErrorBody, ErrorDetail
from gateway.settings import GatewaySettings


def protocol_for(settings: GatewaySettings) -> type[HttpToolsProtocol]:
    """The class that uvicorn makes an instance of for each connection."""

    class Protocol(BoundedProtocol):
        limits = settings

    return Protocol


class BoundedProtocol(HttpToolsProtocol):
    limits: GatewaySettings

    _timer: asyncio.TimerHandle | None = None
    _in_headers = True
    """From the connection, or the first byte of a further request, to the end of the headers."""
    _owes_body = False
    _header_bytes = 0

    # What the transport tells.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_client(self.limits.header_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._in_headers:
            self._header_bytes += len(data)
        super().data_received(data)
        # The parser keeps what is unfinished, however long; what is finished was measured by on_headers_complete.
        if self._in_headers and self._header_bytes > self.limits.max_header_bytes:
            self._refuse_headers()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stop_waiting()
        self._timer = self.loop.call_later(self.limits.stalled_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_waiting()
        if self._owes_body:
            self._wait_for_client(self.limits.body_timeout_s)

    # What the parser tells.

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if not self._in_headers:
            # A further request on this connection; at the first one, the timer runs since the client connected.
            self._in_headers, self._header_bytes = True, 1
            self._wait_for_client(self.limits.header_timeout_s)

    def on_headers_complete(self) -> None:
        if self.transport.is_closing():
            return
        # Each line has four more bytes than these: colon, space, end of line.
        if (
            len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
            > self.limits.max_header_bytes
        ):
            self._refuse_headers()
            return
        self._in_headers, self._header_bytes = False, 0
        self._owes_body = True
        self._wait_for_client(self.limits.body_timeout_s)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._owes_body = False
        self._stop_waiting()
        if not self.transport.is_closing():
            super().on_message_complete()

    # What is done about it.

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "invalid_http", f"{msg} What was sent is not HTTP/1.1.")

    def _wait_for_client(self, seconds: float) -> None:
        self._stop_waiting()
        self._timer = self.loop.call_later(seconds, self._give_up)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._refuse(408, "request_timeout", "The request did not arrive in time.")

    def _refuse_headers(self) -> None:
        most = self.limits.max_header_bytes
        self._refuse(431, "headers_too_large", f"The request's line and headers are over {most} bytes together.")

    def _answering(self) -> RequestResponseCycle | None:
        """The request that is being answered. (uvicorn's ``cycle`` is None before the first one.)"""
        cycle: RequestResponseCycle | None = self.cycle
        return None if cycle is None or cycle.response_complete else cycle

    def _refuse(self, status: int, code: str, message: str) -> None:
        """Answer if no answer has begun, and close. A connection on which nothing was sent is closed without a word."""
        self._stop_waiting()
        if self.transport.is_closing():
            return
        cycle = self._answering()
        if self._in_headers:
            may_answer = self._header_bytes > 0 and cycle is None
        else:
            may_answer = cycle is not None and not cycle.response_started
        if may_answer:
            body = msgspec.json.encode(ErrorBody(ErrorDetail(message, "invalid_request_error", None, code)))
            lines = (
                f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
                "content-type: application/json",
                f"content-length: {len(body)}",
                "x-content-type-options: nosniff",
                "cache-control: no-store",
                "connection: close",
            )
            self.transport.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        if cycle is not None:
            # Whoever waits for the rest of the body is told that the client left; nothing more is written.
            cycle.disconnected = True
            cycle.message_event.set()
        self.transport.close()
