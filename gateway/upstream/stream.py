"""One answer of an upstream: asked for, read, timed, and typed when it fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import httpx
import msgspec

from gateway.errors import APIError, handle_unexpected, shutting_down
from gateway.routing.spec import Timeouts
from gateway.upstream.backend import UpstreamBackend
from gateway.upstream.errors import (
    UpstreamFailure,
    UpstreamTimeout,
    UpstreamUnavailable,
    error_detail,
    failure_of_status,
)
from gateway.upstream.sse import EventParser, MalformedStream

MAX_ERROR_BYTES = 64 * 1024
_AHEAD = 64
"""Chunks that are read before a slow client has taken earlier ones; then the upstream's connection backs up."""
_LINGER_S = 1.0

NULL = msgspec.Raw(b"null")
"""Raw can't be optional; JSON's own nothing stands for nothing."""


class ChoiceChunk(msgspec.Struct):
    """One choice in a chunk: what is passed on unread stays raw, :data:`NULL` where there is none."""

    index: int = 0
    delta: msgspec.Raw = NULL
    text: str | None = None
    logprobs: msgspec.Raw = NULL
    finish_reason: str | None = None


class Chunk(msgspec.Struct):
    """An event of a streamed answer of either endpoint. Unknown fields are dropped: they would be another server's
    extensions under this one's name."""

    choices: list[ChoiceChunk] = []
    usage: msgspec.Raw = NULL
    error: msgspec.Raw = NULL
    decoding: msgspec.Raw = NULL


_chunks = msgspec.json.Decoder(Chunk)


class _Clock:
    """The three limits on reading, as one alarm that is moved from wait to wait."""

    def __init__(self, timeouts: Timeouts, ring: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._ring = ring
        self._alarm: asyncio.TimerHandle | None = None
        self._end = self._loop.time() + timeouts.total_s
        self._timeouts = timeouts
        self.told = ""
        self._wait(timeouts.first_byte_s, "first byte")

    def go_on(self) -> None:
        """Something came; the next piece has its own time."""
        self._wait(self._timeouts.between_bytes_s, "next bytes")

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
        self._alarm = self._loop.call_at(at, self._ring)


class UpstreamAnswer:
    """Reads in a task of its own, so that closing is a synchronous, idempotent cancel that reaches the upstream
    wherever the reader stands; see :class:`gateway.generation.Generation`.

    ``sequences``: choices that must finish before the answer is whole.
    """

    def __init__(
        self, backend: UpstreamBackend, path: str, body: dict[str, Any], headers: dict[str, str], sequences: int
    ) -> None:
        """Sends the request. Raises :class:`UpstreamFailure` if the circuit opened meanwhile."""
        self._backend = backend
        self._permit = backend.begin()
        self._unfinished = set(range(sequences))
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
            told = clock.told
            self._end(UpstreamTimeout(f"The backend '{name}' did not answer in time: {told}."), told)
        except APIError as failure:
            self._end(failure, "")
        except MalformedStream as failure:
            self._end(UpstreamFailure(f"The backend '{name}' sent what is no event stream."), str(failure))
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, OSError) as failure:
            self._end(_failure_of_transport(name, failure), f"{type(failure).__name__}: {failure}")
        except Exception as failure:
            self._end(handle_unexpected(failure, f"the answer of backend {name}"), repr(failure))
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
        client = self._backend.client
        request = client.build_request("POST", path, content=content, headers=headers)
        try:
            return await client.send(request, stream=True)
        except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
            # A kept connection that the server had closed meanwhile looks like this; a new one will tell.
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
            raise failure_of_status(self._backend.name, response.status_code, body, retry_after)
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
                    clock.stop()
                    await self._pass_on(data)
            # Comments keep a connection alive, but are no answer.
            if self._over:
                clock.linger()
            elif self._begun:
                clock.go_on()
        self._check_whole()
        self._end(None)

    async def _pass_on(self, data: bytes) -> None:
        name = self._backend.name
        try:
            # An event of several lines: JSON has them between its tokens only, and what stays raw goes into one line.
            chunk = _chunks.decode(data.replace(b"\n", b" "))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise MalformedStream(f"an event is no chunk: {error}") from None
        if chunk.error != NULL:
            detail = error_detail(chunk.error)
            said = f": {detail.message}" if detail else "."
            raise UpstreamFailure(f"The backend '{name}' ended the answer with an error{said}")
        for choice in chunk.choices:
            if choice.finish_reason is not None:
                self._unfinished.discard(choice.index)
        if not self._begun:
            self._begun = True
            self._backend.answering(self._permit)
        self._queue.put_nowait(chunk)
        while self._queue.qsize() >= _AHEAD:
            self._room.clear()
            await self._room.wait()

    def _check_whole(self) -> None:
        if self._unfinished and not self._over:
            raise UpstreamFailure(
                f"The backend '{self._backend.name}' ended its stream before the answer was complete."
            )

    def _end(self, error: APIError | None, internal: str = "") -> None:
        """Report once how it went, and tell the reader. Later calls change nothing."""
        if self._over:
            return
        self._over = True
        if error is not None and error is not self._shutdown:
            self._backend.fail(self._permit, error, internal)
        elif self._unfinished:
            self._backend.abandon(self._permit)
        else:
            self._backend.complete(self._permit)
        self._queue.put_nowait(error)


def _failure_of_transport(name: str, failure: Exception) -> UpstreamFailure:
    if isinstance(failure, httpx.ConnectTimeout):
        return UpstreamTimeout(f"The backend '{name}' did not accept a connection in time.")
    if isinstance(failure, httpx.ConnectError):
        return UpstreamUnavailable(f"The backend '{name}' can't be reached.")
    return UpstreamFailure(f"The backend '{name}' broke the connection before the answer was complete.")
