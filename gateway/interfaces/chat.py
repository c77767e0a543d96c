"""What a translation reads of our own chat completions, streamed or whole, and what it writes of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import msgspec
from msgspec import Raw, Struct

from gateway.wire.errors import APIError, ErrorDetail, InvalidRequest
from gateway.wire.event_stream import DONE
from gateway.wire.requests import DecodingOptions
from gateway.wire.responses import Usage

NULL = Raw(b"null")


class Function(Struct):
    name: str | None = None
    arguments: str | None = None


class ToolCall(Struct):
    """A call of a tool, or in a stream the next piece of the call ``index``."""

    index: int = 0
    id: str | None = None
    function: Function = msgspec.field(default_factory=Function)


class Logprobs(Struct):
    content: list[dict[str, Any]] | None = None


class Message(Struct):
    """An answer, or in a stream what a chunk adds to it."""

    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(Struct):
    message: Message = msgspec.field(default_factory=Message)
    delta: Message = msgspec.field(default_factory=Message)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: Logprobs | None = None


class ChatAnswer(Struct):
    """A whole answer, or one event of a stream."""

    id: str = ""
    created: int = 0
    model: str = ""
    choices: list[ChatChoice] = []
    usage: Usage | None = None
    decoding: Raw = NULL
    error: ErrorDetail | None = None


class EventWriter(Protocol):
    """Turns the events of one chat stream into those of another API."""

    def take(self, chunk: ChatAnswer) -> bytes: ...

    def fail(self, error: ErrorDetail) -> bytes:
        """What tells of an error in the middle of a stream; nothing follows it."""
        ...

    def end(self) -> bytes:
        """What follows the last event of a stream that did not fail."""
        ...


read_answer = msgspec.json.Decoder(ChatAnswer).decode
_END = DONE.strip()


class EventTranslator:
    """``events``: whole chat events, one or several, in the order in which they come."""

    def __init__(self, writer: EventWriter) -> None:
        self._writer = writer
        self._failed = False

    def __call__(self, events: bytes) -> bytes:
        return b"".join(map(self._one, filter(None, events.split(b"\n\n"))))

    def _one(self, event: bytes) -> bytes:
        if self._failed:
            return b""
        if event == _END:
            return self._writer.end()
        answer = read_answer(event.removeprefix(b"data: "))
        if answer.error is None:
            return self._writer.take(answer)
        self._failed = True
        return self._writer.fail(answer.error)


def event(name: str, data: Any) -> bytes:
    """One server-sent event with a name, as these APIs have them."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(data))


def refuse_trace(options: DecodingOptions | None) -> None:
    """Raises :class:`InvalidRequest` for a trace: these APIs have no event for it."""
    if options is not None and options.trace:
        raise InvalidRequest(
            "'decoding.trace' is told by /v1/chat/completions and /v1/completions only; leave it out or ask there.",
            param="decoding.trace",
        )


@contextmanager
def in_words_of(names: Mapping[str, str]) -> Iterator[None]:
    """Errors name the fields of the API that the client used. ``names``: chat's names, and what they are there."""
    try:
        yield
    except APIError as error:
        for chat, own in names.items():
            param = error.param or ""
            if param == chat or param.startswith((f"{chat}.", f"{chat}[")):
                # What stands at an index there may stand at another here.
                error.message = error.message.replace(f"'{param}'", f"'{own}'").replace(f"'{chat}'", f"'{own}'")
                error.param = own
                break
        raise
