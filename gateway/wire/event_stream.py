"""A response of server-sent events: its headers, its end, and how a failure inside it is told."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

from litestar.response.streaming import ASGIStreamingResponse

from gateway.wire.errors import APIError

DONE = b"data: [DONE]\n\n"
HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    # nginx would otherwise hold events back until its buffer is full.
    "x-accel-buffering": "no",
}


def error_event(error: APIError) -> bytes:
    """After the first byte a failure can only be told inside the stream."""
    return b"data: %b\n\n" % error.body()


_LINE_ENDS = ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"), (b"\xc2\x85", b"\\u0085"))


def in_one_line(events: bytes) -> bytes:
    """The same events, with those characters escaped that many readers of lines take for the end of one.

    The standard's lines of events end with CR and LF only, and JSON may hold U+2028, U+2029 and U+0085 as they are; but
    Python's ``splitlines`` cuts there, in the middle of the JSON. Outside its strings JSON has no such characters.
    """
    for raw, escaped in _LINE_ENDS:
        if raw in events:
            events = events.replace(raw, escaped)
    return events


class _InOneLine:
    def __init__(self, events: AsyncIterator[bytes]) -> None:
        self._events = events

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        return in_one_line(await anext(self._events))


class _Translated:
    def __init__(self, events: AsyncIterator[Any], translate: Callable[[bytes], bytes]) -> None:
        self._events = events
        self._translate = translate

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        while True:
            if out := self._translate(await anext(self._events)):
                return out


class EventStream(ASGIStreamingResponse):
    """Litestar's streaming response (what its ``Stream`` sends), which also calls ``close`` whatever happens.

    The generator's own ``finally`` is not enough: a client that leaves before the first event is asked for leaves a
    generator that never started, and those run no ``finally``.
    """

    def __init__(self, iterator: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        super().__init__(
            iterator=_InOneLine(iterator), headers=HEADERS, media_type="text/event-stream", status_code=200
        )
        self._close = close

    def translated(self, translate: Callable[[bytes], bytes]) -> EventStream:
        """The same stream in another API's events. ``translate`` gets whole events, and may answer with nothing."""
        return EventStream(_Translated(aiter(self.iterator), translate), self._close)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()
