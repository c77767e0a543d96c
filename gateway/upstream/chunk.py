"""One event of an upstream's answer: checked, and weighed by what it says. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.upstream.errors import UpstreamFailure, error_detail
from gateway.upstream.sse import MalformedStream

NULL = msgspec.Raw(b"null")
"""Raw can't be optional; JSON's own nothing stands for nothing."""


class ChoiceChunk(msgspec.Struct):
    """One choice in a chunk: what is passed on unread stays raw, :data:`NULL` where there is none."""

    index: int = 0
    delta: msgspec.Raw = NULL
    text: str | None = None
    logprobs: msgspec.Raw = NULL
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class _Event(msgspec.Struct):
    """An event of a streamed answer of either endpoint. Unknown fields are dropped: they would be another server's
    extensions under this one's name."""

    choices: list[ChoiceChunk] | None = None
    usage: msgspec.Raw = NULL
    error: msgspec.Raw = NULL
    decoding: msgspec.Raw = NULL


class Chunk(msgspec.Struct, frozen=True):
    """``parts``: choices in it that say something, which is at least a token each; ``characters``: of all their texts.

    ``begins``: it may be the first of an answer. A role alone, empty text, no choices or a count of tokens are said by
    servers that then fail, and nobody has read anything by them.
    """

    choices: Sequence[ChoiceChunk] = ()
    usage: msgspec.Raw = NULL
    decoding: msgspec.Raw = NULL
    characters: int = 0
    parts: int = 0
    begins: bool = False


_events = msgspec.json.Decoder(_Event)
_unreadable = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def read_chunk(data: bytes, sequences: int, name: str) -> Chunk:
    """The chunk in an event of an answer of ``sequences`` choices by the backend ``name``.

    Raises :class:`MalformedStream`, or :class:`UpstreamFailure` for an event that tells of an error.
    """
    try:
        # An event of several lines: JSON has them between its tokens only, and what stays raw goes into one line.
        event = _events.decode(data.replace(b"\n", b" "))
        choices = event.choices or []
        if event.error != NULL:
            detail = error_detail(event.error)
            raise UpstreamFailure(
                f"The backend '{name}' ended the answer with an error.",
                internal=f"it said: {detail.message}" if detail else "",
            )
        weights = [_weigh(choice, sequences) for choice in choices]
    except _unreadable as error:
        raise MalformedStream(f"an event is no chunk: {error}") from None
    parts = sum(says for _, says in weights)
    return Chunk(
        choices,
        event.usage,
        event.decoding,
        characters=sum(characters for characters, _ in weights),
        parts=parts,
        begins=parts > 0 or any(choice.finish_reason is not None for choice in choices),
    )


def _weigh(choice: ChoiceChunk, sequences: int) -> tuple[int, bool]:
    """Characters of its text, and whether it says anything: text, log-probabilities, or whatever else is in a delta."""
    if not 0 <= choice.index < sequences:
        raise MalformedStream(f"it sent choice {choice.index}, which was not asked for")
    characters = len(choice.text or "")
    if choice.delta != NULL:
        delta = msgspec.json.decode(choice.delta, type=dict[str, Any])
        characters += sum(_characters(value) for field, value in delta.items() if field != "role")
    says = characters > 0
    if choice.logprobs != NULL:
        # Lists of tokens or of numbers, which are empty or absent where there is no token.
        says = any(msgspec.json.decode(choice.logprobs, type=dict[str, Any]).values()) or says
    return characters, says


def _characters(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(_characters(each) for each in value.values())
    if isinstance(value, list):
        return sum(_characters(each) for each in value)
    return 0
