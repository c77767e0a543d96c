"""uvicorn's HTTP protocol with our own reading of requests, and with limits on the time that clients may take.

:mod:`gateway.http.parser` says where requests begin and end. One request of a connection is read at a time: what is
sent behind it stays unread until it is answered, and is thrown away when the connection is to be closed.

One timer per connection. It runs while the client owes something: the rest of its headers, the rest of its body, the
reading of what was written to it, or its next request. Without it, a client that sends a byte a minute holds its
connection for ever.

A client may close its side behind its request and still read (``nc -N``, some proxies). On the wire that looks like one
that is gone. The difference shows when something is sent: a client that is gone resets the connection. So something
without meaning is sent, soon and then now and then (:meth:`BoundedProtocol._probe`).
"""

from __future__ import annotations

import asyncio
import logging
import select
from http import HTTPStatus
from typing import Any, Literal
from urllib.parse import unquote

import msgspec
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gateway.http.parser import END, Head, Malformed, RequestParser
from gateway.settings import GatewaySettings
from gateway.wire.errors import ErrorBody, ErrorDetail

logger = logging.getLogger("gateway.http")

LINGER_S = 2.0
"""How long what a client still sends is thrown away before its connection is closed. Closing at once would reset it,
and the reset would overtake the answer."""
PROBE_AFTER_S, PROBE_EVERY_S = 0.05, 15.0
LOOK_FIRST_S, LOOK_EVERY_S = 0.02, 1.0
MOST_ZEROS = 8

Phase = Literal["connected", "head", "body", "working", "idle"]


def protocol_for(settings: GatewaySettings) -> type[HttpToolsProtocol]:
    """The class that uvicorn makes an instance of for each connection."""

    class Protocol(BoundedProtocol):
        limits = settings

    return Protocol


class BoundedProtocol(HttpToolsProtocol):
    limits: GatewaySettings

    _requests: RequestParser
    _phase: Phase = "connected"
    _timer: asyncio.TimerHandle | None = None
    _owes_body = False
    _closing = False
    """Nothing more is read or answered."""
    _half_closed = False
    _looking: asyncio.TimerHandle | None = None

    # What the transport tells.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._requests = RequestParser(self.limits.max_header_bytes)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._closing = True
        self._stop_timer()
        if self._looking is not None:
            self._looking.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._closing or self.transport.is_closing():
            return
        self._requests.feed(data)
        self._advance()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether the connection stays open for writing."""
        cycle = self._answering()
        if self._closing or self._half_closed:
            return cycle is not None and not self._closing
        self._half_closed = True
        if self._owes_body or (cycle is None and self._requests.begun):
            self._refuse_incomplete()
        elif cycle is not None and cycle.scope["http_version"] != "1.0":
            self._look(LOOK_FIRST_S, PROBE_AFTER_S)
            return True
        return False

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_timer()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._start_timer()

    def shutdown(self) -> None:
        if self._closing:
            self.transport.close()
        super().shutdown()

    # What was sent.

    def _advance(self) -> None:
        """Read on, up to the end of the request that is answered."""
        try:
            while not self._closing and (self._owes_body or self._answering() is None):
                event = self._requests.next_event()
                if event is None:
                    break
                if isinstance(event, Head):
                    self._begin(event)
                elif event is END:
                    self._owes_body = False
                    self.cycle.more_body = False
                    self.cycle.message_event.set()
                elif isinstance(event, bytes) and not self.cycle.response_complete:
                    self.cycle.body += event
                    if len(self.cycle.body) > HIGH_WATER_LIMIT:
                        self.flow.pause_reading()
                    self.cycle.message_event.set()
        except Malformed as problem:
            self._refuse(problem.status, problem.code, problem.message)
        if self._closing:
            return
        if self._answering() is not None and self._requests.waiting > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
        if self._half_closed and self._answering() is None:
            if self._owes_body or self._requests.begun:
                self._refuse_incomplete()
            else:
                self._close()
            return
        self._enter(self._phase_now())

    def _begin(self, head: Head) -> None:
        self.on_message_begin()
        raw_path, _, query = head.target.partition(b"?")
        path = raw_path.decode("ascii")
        self.scope["method"] = head.method
        self.scope["http_version"] = head.version
        self.scope["headers"] = head.headers
        self.scope["path"] = unquote(path) if "%" in path else path
        self.scope["raw_path"] = raw_path
        self.scope["query_string"] = query
        self._owes_body = True
        # So that its body has time of its own, even where the one before it was still coming a moment ago.
        self._phase = "head"
        self.cycle = Cycle(
            scope=self.scope,
            transport=_Outgoing(self),  # type: ignore[arg-type]
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=self.access_log,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=head.expects_continue and head.length != 0,
            keep_alive=head.keep_alive,
            on_response=self.on_response_complete,
        )
        self._start_asgi_task(self.cycle, self.app)  # type: ignore[arg-type]

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self._closing or self.transport.is_closing():
            return
        self.flow.resume_reading()
        self._advance()

    # Time.

    def _phase_now(self) -> Phase:
        if self._owes_body:
            return "body"
        if self._answering() is not None:
            return "working"
        if self._requests.begun:
            return "head"
        return "connected" if self._phase == "connected" else "idle"

    def _enter(self, phase: Phase) -> None:
        before, self._phase = self._phase, phase
        # The first request's headers have their time since the client connected.
        if phase != before and (before, phase) != ("connected", "head"):
            self._start_timer()

    def _start_timer(self) -> None:
        """The one that belongs to what is waited for now."""
        self._stop_timer()
        if self.transport.is_closing():
            return
        limits = self.limits
        if self.flow.write_paused:
            self._timer = self.loop.call_later(limits.stalled_timeout_s, self.transport.abort)
        elif self._closing:
            self._timer = self.loop.call_later(LINGER_S, self._close)
        elif self._phase != "working":
            waits = {"body": limits.body_timeout_s, "idle": limits.keep_alive_s}
            self._timer = self.loop.call_later(waits.get(self._phase, limits.header_timeout_s), self._give_up)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        if self._phase == "idle" or not self._requests.begun:
            # Nobody asked for anything. An answer now would be taken for that to the next request.
            self._close()
        else:
            self._refuse(408, "request_timeout", "The request did not arrive in time.")

    # Refusing and closing.

    def _answering(self) -> RequestResponseCycle | None:
        """The request that is being answered. (uvicorn's ``cycle`` is None before the first one.)"""
        cycle: RequestResponseCycle | None = self.cycle
        return None if cycle is None or cycle.response_complete else cycle

    def _refuse_incomplete(self) -> None:
        self._refuse(400, "incomplete_request", "The connection ended before the request was complete.")

    def _refuse(self, status: int, code: str, message: str) -> None:
        """Answer, unless an answer has begun, and close: where the next request would begin can't be told."""
        logger.info("a request was refused with %d %s: %s", status, code, message)
        cycle = self._answering()
        if not self._owes_body or (cycle is not None and not cycle.response_started):
            body = msgspec.json.encode(ErrorBody(ErrorDetail(message, "invalid_request_error", None, code)))
            lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}".encode()]
            lines += [name + b": " + value for name, value in self.server_state.default_headers]
            lines += [
                b"content-type: application/json",
                b"content-length: %d" % len(body),
                b"x-content-type-options: nosniff",
                b"cache-control: no-store",
                b"connection: close",
            ]
            self.transport.write(b"\r\n".join(lines) + b"\r\n\r\n" + body)
        if cycle is not None:
            # Whoever waits for the rest of the body is told that the client left; nothing more is written.
            cycle.disconnected = True
            cycle.message_event.set()
        self.close_gently(unread=True)

    def close_gently(self, *, unread: bool = False) -> None:
        """Close, with an answer on its way. ``unread``: the client may be sending still."""
        if self._closing:
            return
        unread = unread or self._owes_body or self._requests.waiting > 0
        if not unread or self._half_closed or not self.transport.can_write_eof():
            self._close()
            return
        self._closing = True
        self.transport.write_eof()
        self.flow.resume_reading()
        self._start_timer()

    def _close(self) -> None:
        self._closing = True
        self._stop_timer()
        self.transport.close()
        # A client that does not read what is written to it yet must not hold the connection either.
        self._timer = self.loop.call_later(self.limits.stalled_timeout_s, self.transport.abort)

    # Clients that have closed their side.

    def _probe(self, cycle: RequestResponseCycle, before: int) -> None:
        """Send what changes nothing. HTTP/1.0 has nothing of the kind: its clients must keep their side open."""
        if self.flow.write_paused:
            return
        if not cycle.response_started:
            # Clients must be ready for it, even unasked and again (RFC 9110, 15.2).
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        elif cycle.chunked_encoding and before < MOST_ZEROS:
            # The size of the next chunk begins with it.
            self.transport.write(b"0")

    def _look(self, wait_s: float, until_probe_s: float, probes: int = 0) -> None:
        """Whether the client has reset the connection, which nobody tells once it is not read from any more."""
        cycle = self._answering()
        if cycle is None or self._closing:
            return
        if _hung_up(self.transport):
            self.transport.abort()
            return
        if until_probe_s <= 0:
            self._probe(cycle, probes)
            until_probe_s, probes, wait_s = PROBE_EVERY_S, probes + 1, LOOK_FIRST_S
        self._looking = self.loop.call_later(
            wait_s, self._look, min(2 * wait_s, LOOK_EVERY_S), until_probe_s - wait_s, probes
        )


class Cycle(RequestResponseCycle):
    """uvicorn's, for what it leaves out of HTTP."""

    _until_close = False
    """The answer's length is not known and can't be told in pieces: its end is the connection's."""

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start" and not self.response_started:
            if self.waiting_for_100_continue:
                # An answer instead of "100 Continue". Whether the body comes now is the client's choice, so nobody can
                # tell what the next bytes would be.
                self.keep_alive = False
            names = {name.lower() for name, _ in message.get("headers", ())}
            if self.scope["http_version"] == "1.0" and b"content-length" not in names:
                self._until_close, self.chunked_encoding = True, False
        elif self._until_close:
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


class _Outgoing:
    """A connection as an answer sees it."""

    def __init__(self, protocol: BoundedProtocol) -> None:
        self._protocol = protocol
        self.write = protocol.transport.write
        self.is_closing = protocol.transport.is_closing

    def close(self) -> None:
        self._protocol.close_gently()


def _hung_up(transport: asyncio.Transport) -> bool:
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), 0)
    return bool(poll.poll(0))
