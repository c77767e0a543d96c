"""An upstream's answer under this gateway's name: streamed on, or gathered into one body."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gateway.upstream.chunk import NULL, ChoiceChunk, Chunk
from gateway.upstream.tally import Tally
from gateway.wire.errors import APIError, handle_unexpected
from gateway.wire.event_stream import DONE, error_event
from gateway.wire.responses import RemoteReport

_encode = msgspec.json.encode


@dataclass(frozen=True, slots=True)
class Identity:
    """What every event of the answer carries."""

    id: str
    object: str
    created: int
    model: str


@dataclass(slots=True)
class CutAtDeadline:
    """``words``: how long it was and who set it. ``hit``: the deadline ended the chunks."""

    words: str = ""
    hit: bool = False

    def shown_in(self, report: RemoteReport) -> RemoteReport:
        if not self.hit:
            return report
        return msgspec.structs.replace(report, reason=f"{report.reason}; cut at its deadline{self.words}")


class RelayWriter:
    """Chunks in, events out. ``tally`` has seen them before.

    Where the client wants no usage, the end of the last choice carries the report. It is held back until the stream is
    over: what an upstream says of its own decoding comes after it.
    """

    def __init__(
        self,
        identity: Identity,
        report: RemoteReport,
        sequences: int,
        tally: Tally,
        *,
        include_usage: bool,
        continuous_usage: bool,
        on_end: Callable[[RemoteReport], None],
    ) -> None:
        same = {"id": identity.id, "object": identity.object, "created": identity.created, "model": identity.model}
        self._head = b"data: " + _encode(same)[:-1] + b',"choices":['
        self._shows_usage = include_usage or continuous_usage
        self._continuous_usage = continuous_usage
        self._chat = identity.object == "chat.completion.chunk"
        self._include_usage = include_usage
        self._unfinished = set(range(sequences))
        self._last: ChoiceChunk | None = None
        self._tally = tally
        self._report = report
        self._on_end = on_end

    def events(self, chunk: Chunk) -> bytes:
        """The events of one chunk; empty if it has nothing to show."""
        if chunk.decoding != NULL:
            self._report = msgspec.structs.replace(self._report, upstream=chunk.decoding)
        out = b""
        for choice in chunk.choices:
            if choice.finish_reason is not None:
                self._unfinished.discard(choice.index)
                if not self._unfinished and not self._include_usage:
                    # Of an upstream that says twice that it ends, both are passed on.
                    out += b"" if self._last is None else self._event(self._last)
                    self._last = choice
                    continue
            out += self._event(choice)
        return out

    def _usage_so_far(self) -> bytes:
        """What a chunk with a choice says of usage; null until the upstream has counted something."""
        if not self._shows_usage:
            return b""
        return b',"usage":' + (bytes(self._tally.usage) if self._continuous_usage else b"null")

    def closing(self, cut: CutAtDeadline) -> bytes:
        """What follows the last chunk: the end of choices that a deadline cut, and usage if the client wants it.

        Usage that the upstream did not count stays null.
        """
        if self._unfinished:
            self._report = cut.shown_in(self._report)
        end: dict[str, Any] = {"delta": msgspec.Raw(b"{}")} if self._chat else {"text": ""}
        unfinished = sorted(self._unfinished)
        out = self.events(Chunk([ChoiceChunk(index, finish_reason="length", **end) for index in unfinished]))
        report = b',"decoding":' + _encode(self._report)
        if self._last is not None:
            out += self._event(self._last, report)
        if self._include_usage:
            out += self._head + b'],"usage":%b%b}\n\n' % (bytes(self._tally.usage), report)
        self._on_end(self._report)
        return out

    def _event(self, choice: ChoiceChunk, report: bytes = b"") -> bytes:
        return self._head + self._choice(choice) + b"]" + self._usage_so_far() + report + b"}\n\n"

    def _choice(self, choice: ChoiceChunk) -> bytes:
        if self._chat:
            inside = b'"delta":%b' % (bytes(choice.delta) if choice.delta != NULL else b"{}")
        else:
            inside = b'"text":%b' % _encode(choice.text or "")
        ending = b'"finish_reason":%b' % _encode(choice.finish_reason)
        if choice.finish_reason is not None:
            ending += b',"stop_reason":%b' % _encode(_stop_string(choice))
        return b'{"index":%d,%b,"logprobs":%b,%b}' % (choice.index, inside, bytes(choice.logprobs), ending)


async def relayed_events(
    first: Chunk, rest: AsyncIterator[Chunk], writer: RelayWriter, close: Callable[[], None], cut: CutAtDeadline
) -> AsyncGenerator[bytes, None]:
    """The whole stream. As for engines, a failure after the first byte is an ``error`` event, never a silent end."""
    try:
        if out := writer.events(first):
            yield out
        async for chunk in rest:
            if out := writer.events(chunk):
                yield out
        if out := writer.closing(cut):
            yield out
    except APIError as error:
        yield error_event(error)
    except Exception as error:
        yield error_event(handle_unexpected(error, "a relayed stream"))
    finally:
        close()
    yield DONE


class _Pieces(list[str]):
    """A text that is not joined yet: joining with every piece would copy a long answer as often as it has pieces."""


@dataclass(slots=True)
class GatheredChoice:
    fields: dict[str, Any] = field(default_factory=dict)
    logprobs: dict[str, Any] | None = None
    finish_reason: str = "length"
    stop_reason: str | None = None
    text: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Gathered:
    """A whole answer, put together from its chunks. ``tally`` has seen them before."""

    choices: list[GatheredChoice]
    tally: Tally
    upstream: msgspec.Raw = field(default_factory=lambda: NULL)

    def take(self, chunk: Chunk) -> None:
        self.upstream = self.upstream if chunk.decoding == NULL else chunk.decoding
        for part in chunk.choices:
            choice = self.choices[part.index]
            choice.text.append(part.text or "")
            choice.finish_reason = part.finish_reason or choice.finish_reason
            choice.stop_reason = _stop_string(part) or choice.stop_reason
            if part.delta != NULL:
                _merge(choice.fields, _object(part.delta))
            if part.logprobs != NULL:
                choice.logprobs = choice.logprobs or {}
                _merge(choice.logprobs, _object(part.logprobs))

    def report(self, report: RemoteReport) -> RemoteReport:
        """With what the upstream, another medusa-gateway, said of its own decoding."""
        return report if self.upstream == NULL else msgspec.structs.replace(report, upstream=self.upstream)

    def body(self, identity: Identity, report: RemoteReport) -> bytes:
        chat = identity.object == "chat.completion"
        choices = []
        for index, choice in enumerate(self.choices):
            message = {"role": "assistant", "content": "", "refusal": None, **_joined(choice.fields)}
            for call in message.get("tool_calls") or ():
                call.pop("index", None)
            answer = {"message": message} if chat else {"text": "".join(choice.text)}
            logprobs = None if choice.logprobs is None else _joined(choice.logprobs)
            ending = {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
            choices.append({"index": index, **answer, "logprobs": logprobs, **ending})
        return _encode(
            {
                "id": identity.id,
                "object": identity.object,
                "created": identity.created,
                "model": identity.model,
                "choices": choices,
                "usage": self.tally.usage,
                "decoding": report,
            }
        )


def _stop_string(choice: ChoiceChunk) -> str | None:
    """vLLM names tokens that end an answer too, by their ids."""
    return choice.stop_reason if isinstance(choice.stop_reason, str) else None


def _object(raw: msgspec.Raw) -> dict[str, Any]:
    # Whoever read the chunk has seen that it is one.
    return msgspec.json.decode(raw, type=dict[str, Any])


def _merge(into: dict[str, Any], more: dict[str, Any]) -> None:
    """Texts and lists grow from chunk to chunk; of other values the last one counts. The role is no text to grow."""
    for name, value in more.items():
        old = into.get(name)
        if isinstance(value, str) and name != "role":
            if isinstance(old, _Pieces):
                old.append(value)
            else:
                into[name] = _Pieces([value])
        elif name == "tool_calls" and isinstance(value, list):
            into[name] = _merged_calls(old or [], value)
        elif isinstance(old, list) and not isinstance(old, _Pieces) and isinstance(value, list):
            old.extend(value)
        elif value is not None or old is None:
            into[name] = value


def _merged_calls(calls: list[dict[str, Any]], more: list[Any]) -> list[dict[str, Any]]:
    """Pieces of calls, put together by their index."""
    found = {call["index"]: call for call in calls}
    for piece in more:
        if not isinstance(piece, dict):
            continue
        index = piece.get("index")
        if not isinstance(index, int):
            index = len(found)
        call = found.setdefault(index, {"index": index, "type": "function", "function": {"name": "", "arguments": ""}})
        if piece.get("id"):
            call["id"] = piece["id"]
        function = piece.get("function")
        for name, value in function.items() if isinstance(function, dict) else ():
            call["function"][name] = call["function"].get(name, "") + (value or "")
    return [found[index] for index in sorted(found)]


def _joined(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: "".join(value) if isinstance(value, _Pieces) else value for name, value in fields.items()}
