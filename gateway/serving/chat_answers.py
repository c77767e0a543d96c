"""Choices of a chat whose text may hold thoughts and calls of tools."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from backends.types import TokenChunk
from gateway.serving.results import ChoiceResult
from gateway.serving.streaming import ending
from gateway.tools.reader import AnswerForm, AnswerReader, Piece
from gateway.wire.logprobs import chat_logprobs
from gateway.wire.responses import AssistantMessage, FunctionOut, ToolCallOut

_encode = msgspec.json.encode


class ThoughtCounter:
    """Tokens up to the end of an answer's thoughts. ``end_id``: the token that is the mark of their end; None: it is
    made of several, and then the step is counted to its end in which it was complete."""

    def __init__(self, end_id: int | None) -> None:
        self._end_id = end_id
        self._end: int | None = None
        self._ids = 0

    def take(self, chunk: TokenChunk) -> None:
        # Text may come later than its token: what may be a stop string is held back.
        if self._end is None and self._end_id in chunk.token_ids:
            self._end = self._ids + chunk.token_ids.index(self._end_id) + 1
        self._ids += len(chunk.token_ids)

    def count(self, chunk: TokenChunk) -> int:
        """``chunk``: in whose text the thoughts ended."""
        return chunk.num_tokens if self._end is None else min(self._end, chunk.num_tokens)


class ReadChoice:
    """One choice, read as its chunks come."""

    def __init__(self, form: AnswerForm, new_id: Callable[[], str], end_id: int | None) -> None:
        self._form = form
        self._reader = AnswerReader(form, new_id)
        self._counter = ThoughtCounter(end_id)

    def take(self, chunk: TokenChunk, result: ChoiceResult) -> Piece:
        """What ``chunk`` adds. ``result`` has noted it already, and is put right: its thoughts, and why it ended."""
        over = self._reader.thought
        piece = self._reader.feed(chunk.text)
        if chunk.finish_reason is not None:
            piece = _joined(piece, self._reader.finish(complete=chunk.finish_reason == "stop"))
            if self._reader.calls and not self._reader.is_cut and chunk.finish_reason == "stop":
                result.finish_reason = "tool_calls"
        if self._form.thinks:
            self._counter.take(chunk)
            if self._reader.thinking:
                result.reasoning_tokens = chunk.num_tokens
            elif self._reader.thought and not over:
                result.reasoning_tokens = self._counter.count(chunk)
            result.reasoning_tokens = result.reasoning_tokens or 0
        return piece


def message_of(
    result: ChoiceResult, form: AnswerForm, new_id: Callable[[], str], end_id: int | None
) -> AssistantMessage:
    """A whole answer. ``result`` is put right as by :meth:`ReadChoice.take`."""
    choice = ReadChoice(form, new_id, end_id)
    piece = Piece()
    for chunk in result.chunks:
        piece = _joined(piece, choice.take(chunk, result))
    calls: list[ToolCallOut] = []
    for _, begins, arguments in piece.calls or ():
        if begins is not None:
            calls.append(ToolCallOut(begins[0], FunctionOut(begins[1], "")))
        calls[-1].function.arguments += arguments
    message = AssistantMessage(piece.text if piece.text or not calls else None)
    if piece.thoughts:
        message.reasoning_content = piece.thoughts
    if calls:
        message.tool_calls = calls
    return message


class ReadChoiceWriter:
    """``delta`` objects of chat.completion.chunk, with thoughts and calls."""

    def __init__(self, form: AnswerForm, new_id: Callable[[], str], end_id: int | None) -> None:
        self._choice = ReadChoice(form, new_id, end_id)
        # To some clients an empty text is one.
        self._content = b"null" if form.forced else b'""'

    def opening(self) -> bytes:
        return b'"delta":{"role":"assistant","content":%b},"logprobs":null,"finish_reason":null' % self._content

    def deltas(self, chunk: TokenChunk, result: ChoiceResult) -> Sequence[bytes]:
        piece = self._choice.take(chunk, result)
        found: list[dict[str, Any]] = []
        if piece.thoughts:
            found.append({"reasoning_content": piece.thoughts})
        if piece.text:
            found.append({"content": piece.text})
        for index, begins, arguments in piece.calls or ():
            call: dict[str, Any] = {"index": index, "function": {"arguments": arguments}}
            if begins is not None:
                call |= {"id": begins[0], "type": "function", "function": {"name": begins[1], "arguments": arguments}}
            found.append({"tool_calls": [call]})
        if chunk.logprobs and not found:
            found.append({})
        logprobs = _encode(chat_logprobs(chunk.logprobs)) if chunk.logprobs else b"null"
        # Log probabilities are those of the chunk, and stand in its first event.
        return [
            b'"delta":%b,"logprobs":%b,"finish_reason":null' % (_encode(each), b"null" if i else logprobs)
            for i, each in enumerate(found)
        ]

    def finish(self, result: ChoiceResult) -> bytes:
        return b'"delta":{},"logprobs":null,%b' % ending(result)


def _joined(first: Piece, second: Piece) -> Piece:
    calls = [*(first.calls or ()), *(second.calls or ())]
    return Piece(first.text + second.text, first.thoughts + second.thoughts, calls or None)
