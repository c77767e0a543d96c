"""Chunks as server-sent events. Thousands go out a second, so what is the same in all of a stream is encoded once."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Protocol

import msgspec

from backends.types import DecodingPlan, TokenChunk
from gateway.serving.generation import Generation
from gateway.serving.results import ChoiceResult, decoding_report, trace_of, usage
from gateway.wire.errors import APIError, handle_unexpected
from gateway.wire.event_stream import DONE, error_event
from gateway.wire.logprobs import CompletionLogprobsWriter, chat_logprobs

_encode = msgspec.json.encode


class ChoiceWriter(Protocol):
    """How an endpoint writes what is inside ``choices: [{"index": i, ...}]`` of a chunk."""

    def opening(self) -> bytes | None:
        """The inside of a choice's first event, if it has one of its own."""
        ...

    def deltas(self, chunk: TokenChunk, result: ChoiceResult) -> Sequence[bytes]:
        """What a chunk adds to the choice of ``result``, which may be nothing, or several events."""
        ...

    def finish(self, result: ChoiceResult) -> bytes: ...


class ChatChoiceWriter:
    """``delta`` objects of chat.completion.chunk."""

    def opening(self) -> bytes:
        return b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'

    def deltas(self, chunk: TokenChunk, result: ChoiceResult) -> Sequence[bytes]:
        if not (chunk.text or chunk.logprobs):
            return ()
        logprobs = _encode(chat_logprobs(chunk.logprobs)) if chunk.logprobs else b"null"
        return (b'"delta":{"content":%b},"logprobs":%b,"finish_reason":null' % (_encode(chunk.text), logprobs),)

    def finish(self, result: ChoiceResult) -> bytes:
        return b'"delta":{},"logprobs":null,%b' % ending(result)


class CompletionChoiceWriter:
    """``text`` of text_completion chunks."""

    def __init__(self) -> None:
        self._logprobs = CompletionLogprobsWriter()

    def opening(self) -> None:
        return None

    def deltas(self, chunk: TokenChunk, result: ChoiceResult) -> Sequence[bytes]:
        if not (chunk.text or chunk.logprobs):
            return ()
        logprobs = _encode(self._logprobs.write(chunk.logprobs)) if chunk.logprobs else b"null"
        return (b'"text":%b,"logprobs":%b,"finish_reason":null' % (_encode(chunk.text), logprobs),)

    def finish(self, result: ChoiceResult) -> bytes:
        return b'"text":"","logprobs":null,%b' % ending(result)


def ending(result: ChoiceResult) -> bytes:
    return b'"finish_reason":%b,"stop_reason":%b' % (_encode(result.finish_reason), _encode(result.stop_reason))


class StreamWriter:
    """Turns the chunks of one request into events. ``results``: of its choices, which are kept up to date and put right
    by whoever reads their text; for usage and the decoding report."""

    def __init__(
        self,
        *,
        response_id: str,
        object_name: str,
        created: int,
        model: str,
        include_usage: bool,
        continuous_usage: bool,
        prompt_tokens: int,
        prompts: int,
        plan: DecodingPlan,
        writers: list[ChoiceWriter],
        results: list[ChoiceResult],
    ) -> None:
        same = {"id": response_id, "object": object_name, "created": created, "model": model}
        self._head = b"data: " + _encode(same)[:-1] + b',"choices":['
        # With include_usage, OpenAI sends "usage": null in every event but the last; vLLM, asked for
        # continuous_usage_stats, sends what is used so far instead.
        self._constant_closing = b'}],"usage":null}\n\n' if include_usage else b"}]}\n\n"
        self._continuous_usage = continuous_usage
        self._indexed = [self._head + b'{"index":%d,' % i for i in range(len(writers))]
        self._include_usage = include_usage
        self._prompt_tokens, self._prompts = prompt_tokens, prompts
        self._plan = plan
        self._writers = writers
        self._opened = [False] * len(writers)
        self._results = results

    def event(self, index: int, chunk: TokenChunk, *, last: bool) -> bytes:
        """The events of one chunk, joined; empty if it has nothing to show. ``last``: every sequence has finished."""
        writer, head = self._writers[index], self._indexed[index]
        # Before the text that it is of; an event like that of usage, without choices.
        out = self._head + b'],"decoding":{"trace":%b}}\n\n' % _encode(trace_of(index, chunk)) if chunk.trace else b""
        if not self._opened[index]:
            self._opened[index] = True
            if (opening := writer.opening()) is not None:
                out += head + opening + self._closing()
        self._results[index].note(chunk)
        deltas = writer.deltas(chunk, self._results[index])
        closing = self._closing()
        for delta in deltas:
            out += head + delta + closing
        if chunk.finish_reason is not None:
            finish = head + writer.finish(self._results[index])
            if not last or self._include_usage:
                out += finish + closing
            else:
                out += finish + closing[:-3] + b',"decoding":%b}\n\n' % self._report()
            if last and self._include_usage:
                out += self._head + b'],"usage":%b,"decoding":%b}\n\n' % (self._usage(), self._report())
        return out

    def _closing(self) -> bytes:
        """What ends an event with a choice."""
        return b'}],"usage":%b}\n\n' % self._usage() if self._continuous_usage else self._constant_closing

    def _usage(self) -> bytes:
        return _encode(usage(self._prompt_tokens, self._results, self._prompts))

    def _report(self) -> bytes:
        return _encode(decoding_report(self._plan, self._results))


async def events(
    first: tuple[int, TokenChunk],
    rest: AsyncIterator[tuple[int, TokenChunk]],
    writer: StreamWriter,
    generation: Generation,
    ended: Callable[[], None],
) -> AsyncGenerator[bytes, None]:
    """The whole stream. ``ended`` is called before the last event is sent.

    A failure after the first byte can only be told inside it: an ``error`` event, then the end."""
    try:
        index, chunk = first
        last = generation.unfinished == 0
        out = writer.event(index, chunk, last=last)
        if last:
            ended()
        yield out
        async for index, chunk in rest:
            last = generation.unfinished == 0
            out = writer.event(index, chunk, last=last)
            if last:
                ended()
            if out:
                yield out
    except APIError as error:
        yield error_event(error)
    except Exception as error:
        yield error_event(handle_unexpected(error, "a stream"))
    finally:
        generation.close()
    yield DONE
