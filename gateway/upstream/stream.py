"""One answer of an upstream: asked for, read, timed, and typed when it fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from datetime import UTC, datetime
from typing import Any

import httpx
import msgspec

from gateway.routing.circuit_breaker import Permit
from gateway.routing.spec import Timeouts
from gateway.upstream.backend import UpstreamBackend
from gateway.upstream.chunk import NULL, Chunk, read_chunk
from gateway.upstream.errors import (
    UpstreamFailure,
    UpstreamTimeout,
    UpstreamUnavailable,
    failure_of_status,
    outcome_of,
)
from gateway.upstream.meter import Meter
from gateway.upstream.sse import EventParser, MalformedStream
from gateway.wire.errors import APIError, handle_unexpected, shutting_down
from telemetry.words import transport_words

MAX_ERROR_BYTES = 64 * 1024
_AHEAD = 64
"""Chunks that are read before a slow client has taken earlier ones; then the upstream's connection backs up."""
_LINGER_S = 1.0
_LATE_S = 0.1
_SECOND_LOOKS = 5
"""An alarm that the loop was late for says nothing about the upstream; so many times in a row it is put off."""
_USAGE_S = 5.0
"""What an upstream gets after the last word of an answer to count its tokens and end the stream."""
_MOST_HELD = 16
_MOST_HELD_BYTES = 64 * 1024
"""Chunks that say nothing are kept until one does; what comes past that is forgotten, and nobody misses it."""
STALE_S = 1.0
"""A kept connection that the server had closed meanwhile shows at once. One that breaks later has carried the request
there, and sending it again could bring down a second time what it brought down."""


OnEnd = Callable[[APIError | None, str], None]
"""Called with how the request failed, if it did, and with its outcome in a word."""


class _Clock:
    """The three limits on reading, as one alarm that is moved from wait to wait."""

    def __init__(self, timeouts: Timeouts, ring: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._ring = ring
        self._alarm: asyncio.TimerHandle | None = None
        self._end = self._loop.time() + timeouts.total_s
        self._timeouts = timeouts
        self._finish_by: float | None = None
        self.told = ""
        self._wait(timeouts.first_byte_s, "first byte")

    def go_on(self) -> None:
        """Something came; the next piece has its own time."""
        self._wait(self._timeouts.between_bytes_s, "next bytes")

    def finish(self) -> None:
        """The last word was said. All that may still come after it has one time together."""
        if self._finish_by is None:
            self._finish_by = self._loop.time() + min(self._timeouts.between_bytes_s, _USAGE_S)
        self._wait(self._finish_by - self._loop.time(), "end")

    def linger(self) -> None:
        """All was said; a moment for the connection to be whole, so that it can be used again."""
        self._wait(_LINGER_S, "end")

    def stop(self) -> None:
        """No limit: the client is slow, which is no fault of the upstream's, or all is over."""
        if self._alarm is not None:
            self._alarm.cancel()

    def _wait(self, seconds: float, what: str) -> None:
        self.stop()
        at = self._loop.time() + seconds
        if at > self._end:
            at, seconds, what = self._end, self._timeouts.total_s, "end"
        self.told = f"waited {seconds:g} s for its {what}"
        self._alarm = self._loop.call_at(at, self._time_is_up, at, _SECOND_LOOKS)

    def _time_is_up(self, at: float, looks: int) -> None:
        now = self._loop.time()
        if now - at > _LATE_S and looks > 0:
            # The loop was held up, so what came in time is not read yet. It is, before this rings again.
            again = now + _LATE_S
            self._alarm = self._loop.call_at(again, self._time_is_up, again, looks - 1)
        else:
            self._ring()


class _Sending:
    """What the transport tells of one sending: over which connection, and when."""

    def __init__(self) -> None:
        self._clock = asyncio.get_running_loop().time
        self._connected = False
        self._sent_at: float | None = None

    async def note(self, event: str, _: object) -> None:
        if event.startswith("connection.connect_"):
            self._connected = True
        elif event == "http11.send_request_headers.started":
            self._sent_at = self._clock()

    @property
    def met_a_dead_connection(self) -> bool:
        """It was sent over a connection of an earlier request, which broke at once."""
        return not self._connected and self._sent_at is not None and self._clock() - self._sent_at <= STALE_S


class UpstreamAnswer:
    """Reads in a task of its own, so that closing is a synchronous, idempotent cancel that reaches the upstream
    wherever the reader stands; see :class:`gateway.serving.generation.Generation`.

    ``sequences``: choices that must finish before the answer is whole.
    """

    def __init__(
        self,
        backend: UpstreamBackend,
        permit: Permit,
        path: str,
        body: dict[str, Any],
        headers: dict[str, str],
        sequences: int,
        *,
        meter: Meter | None = None,
        on_end: OnEnd = lambda error, outcome: None,
    ) -> None:
        """Sends the request, with the ``permit`` that ``backend.begin()`` gave. ``on_end`` is called once."""
        self._backend = backend
        self._permit = permit
        self._on_end = on_end
        self._meter = meter
        self._sequences = sequences
        self._unfinished = set(range(sequences))
        self._held: list[Chunk] = []
        self._held_bytes = 0
        self._begun = self._over = self._cancelled = self._timed_out = False
        # Bounded by _room rather than by itself: the end must find its place whatever was not taken yet.
        self._queue: asyncio.Queue[Chunk | APIError | None] = asyncio.Queue()
        self._room = asyncio.Event()
        self._shutdown: APIError | None = None
        headers = {
            **headers,
            **backend.headers(),
            "content-type": "application/json",
            "accept": "text/event-stream",
            # Compressed events would be held back until a block is full.
            "accept-encoding": "identity",
        }
        self._task = asyncio.create_task(self._read(path, msgspec.json.encode(body), headers))
        # Also called for a task that is cancelled before its first step, in which no "finally" would run.
        self._task.add_done_callback(lambda _: self._end(self._shutdown))

    def close(self) -> None:
        """Stop reading and close the connection, which is what upstreams take as an abort."""
        if not self._over:
            self._cancel()

    def abort_for_shutdown(self) -> None:
        """End the answer with the error of a replica that goes."""
        self._shutdown = shutting_down(mid_answer=True)
        self.close()

    async def chunks(self) -> AsyncGenerator[Chunk, None]:
        """Until the answer is whole. Raises an :class:`APIError` that says what went wrong."""
        while True:
            item = await self._queue.get()
            self._room.set()
            if item is None:
                return
            if isinstance(item, APIError):
                raise item
            yield item

    async def _read(self, path: str, content: bytes, headers: dict[str, str]) -> None:
        name = self._backend.name
        clock = _Clock(self._backend.spec.timeouts, self._time_out)
        try:
            response = await self._send(path, content, headers)
            try:
                await self._relay(response, clock)
            finally:
                await response.aclose()
        except asyncio.CancelledError:
            if not self._timed_out:
                raise
            self._break_off(UpstreamTimeout(f"The backend '{name}' did not answer in time: {clock.told}."), clock.told)
        except APIError as failure:
            self._end(failure, failure.internal if isinstance(failure, UpstreamFailure) else "")
        except MalformedStream as failure:
            self._end(UpstreamFailure(f"The backend '{name}' sent what is no event stream."), str(failure))
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, OSError) as failure:
            self._break_off(_failure_of_transport(name, failure), transport_words(failure))
        except Exception as failure:
            self._end(handle_unexpected(failure, f"the answer of backend {name}"), type(failure).__name__)
        finally:
            clock.stop()

    def _time_out(self) -> None:
        self._timed_out = True
        self._cancel()

    def _cancel(self) -> None:
        # Once: a second cancel would hit the first one's clean-up and leave the connection open, its answer running.
        if not self._cancelled:
            self._cancelled = True
            self._task.cancel()

    async def _send(self, path: str, content: bytes, headers: dict[str, str]) -> httpx.Response:
        client, sending = self._backend.client, _Sending()
        extensions = {"trace": sending.note}
        request = client.build_request("POST", path, content=content, headers=headers, extensions=extensions)
        try:
            return await client.send(request, stream=True)
        except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
            if not sending.met_a_dead_connection:
                raise
        request = client.build_request("POST", path, content=content, headers=headers)
        return await client.send(request, stream=True)

    async def _relay(self, response: httpx.Response, clock: _Clock) -> None:
        if response.status_code != 200:
            body = b""
            async for piece in response.aiter_bytes():
                body += piece
                if len(body) > MAX_ERROR_BYTES:
                    break
            retry_after = response.headers.get("retry-after")
            raise failure_of_status(self._backend.name, response.status_code, body, retry_after, datetime.now(UTC))
        kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "text/event-stream":
            raise MalformedStream(f"it answered with content-type '{kind[:100]}' instead of text/event-stream")
        parser = EventParser()
        async for piece in response.aiter_bytes():
            for data in parser.feed(piece):
                if self._over:
                    return
                if data == b"[DONE]":
                    self._check_whole()
                    self._end(None)
                else:
                    if self._begun:
                        clock.stop()
                    await self._pass_on(data)
            # Comments keep a connection alive, but are no answer; neither are chunks that say nothing.
            if self._over:
                clock.linger()
            elif not self._unfinished:
                clock.finish()
            elif self._begun:
                clock.go_on()
        self._check_whole()
        self._end(None)

    async def _pass_on(self, data: bytes) -> None:
        chunk = read_chunk(data, self._sequences, self._backend.name)
        self._backend.heard()
        if self._meter is not None:
            self._meter.take(chunk)
        for choice in chunk.choices:
            if choice.finish_reason is not None:
                self._unfinished.discard(choice.index)
        if not self._begun:
            if not chunk.begins:
                self._hold(chunk, len(data))
                return
            self._begun = True
            self._backend.answering(self._permit)
            for each in self._held:
                self._queue.put_nowait(each)
            self._held.clear()
        self._queue.put_nowait(chunk)
        while self._queue.qsize() >= _AHEAD:
            self._room.clear()
            if self._meter is not None:
                self._meter.stalled = True
            await self._room.wait()

    def _hold(self, chunk: Chunk, size: int) -> None:
        """Keep what says nothing until the answer begins: a failure before that is nobody's but the upstream's."""
        self._held_bytes += size
        if self._held_bytes > _MOST_HELD_BYTES:
            return
        if len(self._held) < _MOST_HELD:
            self._held.append(chunk)
        elif chunk.usage != NULL:
            self._held[-1] = chunk

    def _check_whole(self) -> None:
        if self._unfinished and not self._over:
            raise UpstreamFailure(
                f"The backend '{self._backend.name}' ended its stream before the answer was complete."
            )

    def _break_off(self, error: APIError, internal: str) -> None:
        """The stream did not come to its end. After the last word of the answer that is no failure any more."""
        if self._unfinished:
            self._end(error, internal)
        else:
            self._end(None)

    def _end(self, error: APIError | None, internal: str = "") -> None:
        """Report once how it went, and tell the reader. Later calls change nothing."""
        if self._over:
            return
        self._over = True
        failed = error if error is not self._shutdown else None
        if failed is not None:
            self._backend.fail(self._permit, failed, internal)
        elif self._unfinished:
            self._backend.abandon(self._permit)
        else:
            self._backend.complete(self._permit)
        outcome = outcome_of(failed) if failed is not None else "abandoned" if self._unfinished else "completed"
        self._on_end(failed, outcome)
        self._queue.put_nowait(error)


def _failure_of_transport(name: str, failure: Exception) -> UpstreamFailure:
    if isinstance(failure, httpx.ConnectTimeout):
        return UpstreamTimeout(f"The backend '{name}' did not accept a connection in time.")
    if isinstance(failure, httpx.ConnectError):
        return UpstreamUnavailable(f"The backend '{name}' can't be reached.")
    return UpstreamFailure(f"The backend '{name}' broke the connection before the answer was complete.")
