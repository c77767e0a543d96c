"""One answer of an upstream: asked for, read, timed, and typed when it fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
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


class ChoiceChunk(msgspec.Struct):
    """One choice in a chunk: what is passed on unread stays raw."""

    index: int = 0
    delta: msgspec.Raw | None = None
    text: str | None = None
    logprobs: msgspec.Raw | None = None
    finish_reason: str | None = None


class Chunk(msgspec.Struct):
    """An event of a streamed answer of either endpoint. Unknown fields are dropped: they would be another server's
    extensions under this one's name."""

    choices: list[ChoiceChunk] = []
    usage: msgspec.Raw | None = None
    error: msgspec.Raw | None = None
    decoding: msgspec.Raw | None = None


_LINGER_S = 1.0

_chunks = msgspec.json.Decoder(Chunk)
_NULL = msgspec.Raw(b"null")


class _Clock:
    """The three limits on reading, as one deadline that is moved from wait to wait."""

    def __init__(self, limit: asyncio.Timeout, timeouts: Timeouts) -> None:
        self._limit = limit
        self._now = asyncio.get_running_loop().time
        self._end = self._now() + timeouts.total_s
        self._timeouts = timeouts
        self.waiting_for = "first byte"
        self._set(timeouts.first_byte_s)

    def _set(self, seconds: float) -> None:
        at = self._now() + seconds
        if at > self._end:
            at, self.waiting_for = self._end, "end"
        self._limit.reschedule(at)

    def go_on(self) -> None:
        self.waiting_for = "next bytes"
        self._set(self._timeouts.between_bytes_s)

    def wait_for_end(self) -> None:
        """All was said; a moment for the connection to be whole, so that it can be used again."""
        self._limit.reschedule(self._now() + _LINGER_S)

    def pause(self) -> None:
        """While the client is slow; its own slowness is no fault of the upstream's."""
        self._limit.reschedule(None)

    @property
    def told(self) -> str:
        seconds = {
            "first byte": self._timeouts.first_byte_s,
            "next bytes": self._timeouts.between_bytes_s,
            "end": self._timeouts.total_s,
        }[self.waiting_for]
        return f"waited {seconds:g} s for its {self.waiting_for}"


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
        self._begun = self._over = False
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
            self._task.cancel()

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
        clock: _Clock | None = None
        try:
            async with asyncio.timeout(None) as limit:
                clock = _Clock(limit, self._backend.spec.timeouts)
                response = await self._send(path, content, headers)
                try:
                    await self._relay(response, clock)
                finally:
                    await response.aclose()
        except TimeoutError:
            told = clock.told if clock else ""
            self._end(UpstreamTimeout(f"The backend '{name}' did not answer in time: {told}."), told)
        except APIError as failure:
            self._end(failure, "")
        except MalformedStream as failure:
            self._end(UpstreamFailure(f"The backend '{name}' sent what is no event stream."), str(failure))
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, OSError) as failure:
            self._end(_failure_of_transport(name, failure), f"{type(failure).__name__}: {failure}")
        except Exception as failure:
            self._end(handle_unexpected(failure, f"the answer of backend {name}"), repr(failure))

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
                    clock.pause()
                    await self._pass_on(data)
            # Comments keep a connection alive, but are no answer.
            if self._over:
                clock.wait_for_end()
            elif self._begun:
                clock.go_on()
        self._check_whole()
        self._end(None)

    async def _pass_on(self, data: bytes) -> None:
        name = self._backend.name
        try:
            chunk = _chunks.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise MalformedStream(f"an event is no chunk: {error}") from None
        if chunk.error is not None and chunk.error != _NULL:
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
