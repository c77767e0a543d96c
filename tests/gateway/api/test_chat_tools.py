"""Chat's fields for tools, thoughts and continued messages on a server whose model says what a test wants."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import openai
import pytest

from backends.types import DecodingPlan, TokenChunk
from gateway.api.completions import chat_call
from gateway.serving.call import Answer
from gateway.serving.chat_answers import ReadChoice, ReadChoiceWriter, message_of
from gateway.serving.engine_answer import EngineAnswer
from gateway.serving.results import ChoiceResult, usage
from gateway.tools.reader import AnswerForm
from gateway.tools.template import CallStyle
from telemetry.request import RequestRecord
from tests.support.fakes import FakeTokenizer
from tests.support.live_gateway import MODEL, LiveGateway, running_gateway

HI: list[Any] = [{"role": "user", "content": "hi"}]
TAGGED = AnswerForm(frozenset({"look"}), CallStyle.TAGGED)
THINKING = AnswerForm(frozenset({"look"}), CallStyle.TAGGED, thinks=True, thinking=True)
CALL = '<tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>'
END = 7
"""The token that is the mark of the end of thoughts."""


@pytest.fixture(scope="module")
def gateway() -> Iterator[LiveGateway]:
    with running_gateway() as live:
        yield live


def chunks_of(*steps: tuple[str, Sequence[int]], finish: Any = "stop") -> list[TokenChunk]:
    chunks, count = [], 0
    for position, (text, ids) in enumerate(steps):
        count += len(ids)
        last = position == len(steps) - 1
        chunks.append(TokenChunk(text, tuple(ids), num_tokens=count, finish_reason=finish if last else None))
    return chunks


def gathered(form: AnswerForm, chunks: list[TokenChunk], end_id: int | None = None) -> tuple[Any, ChoiceResult]:
    result = ChoiceResult()
    for chunk in chunks:
        result.keep(chunk)
    return message_of(result, form, lambda: "0", end_id), result


def streamed(form: AnswerForm, chunks: list[TokenChunk], end_id: int | None = None) -> tuple[list[Any], ChoiceResult]:
    writer, result = ReadChoiceWriter(form, lambda: "0", end_id), ChoiceResult()
    deltas = []
    for chunk in chunks:
        result.note(chunk)
        deltas += [json.loads(b"{%b}" % each)["delta"] for each in writer.deltas(chunk, result)]
    return deltas, result


class _Said:
    """A generation that has given these chunks."""

    def __init__(self, chunks: list[TokenChunk]) -> None:
        self._left, self.unfinished = chunks, 1

    async def chunks(self) -> AsyncIterator[tuple[int, TokenChunk]]:
        for chunk in self._left:
            self.unfinished = int(chunk.finish_reason is None)
            yield 0, chunk

    def close(self) -> None:
        pass


@pytest.mark.parametrize("stream", [False, True])
def test_telemetry_has_the_finish_reason_that_the_client_has(stream: bool) -> None:
    body: Any = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": stream}
    call = chat_call(json.dumps(body).encode())
    call._form = TAGGED
    record = RequestRecord("chat", "/v1/chat/completions", 0.0, content={})
    prepared: Any = SimpleNamespace(
        call=call, record=record, settle=lambda report, saved_s: None, telemetry=SimpleNamespace(clock=lambda: 0.0)
    )
    answer = EngineAnswer(Answer("0", 0, MODEL, 1, DecodingPlan()), cast(Any, _Said(chunks_of((CALL, [1])))), prepared)

    async def told() -> str:
        if stream:
            await answer.begin()
            return b"".join([event async for event in answer.events()]).decode()
        await answer.gather()
        return (await answer.body()).decode()

    assert '"finish_reason":"tool_calls"' in asyncio.run(told())
    assert record.finish_reasons == ("tool_calls",)
    assert record.content["gen_ai.output.messages"] == [CALL]
    assert record.completed


def test_a_call_and_text() -> None:
    chunks = chunks_of(("So", [1]), (CALL[:20], [2, 3]), (CALL[20:], [4]))
    message, result = gathered(TAGGED, chunks)
    assert message.content == "So"
    assert [(each.id, each.function.name, each.function.arguments) for each in message.tool_calls] == [
        ("call_0", "look", '{"at": 1}')
    ]
    deltas, written = streamed(TAGGED, chunks)
    function = {"name": "look", "arguments": '{"at": 1}'}
    assert deltas == [
        {"content": "So"},
        {"tool_calls": [{"index": 0, "id": "call_0", "type": "function", "function": function}]},
    ]
    assert result.finish_reason == written.finish_reason == "tool_calls"


def test_a_call_alone_has_no_content_and_a_cut_one_is_text() -> None:
    assert gathered(TAGGED, chunks_of((CALL, [1])))[0].content is None
    message, result = gathered(TAGGED, chunks_of((CALL[:-20], [1]), finish="length"))
    assert (message.content, message.tool_calls or None) == (CALL[:-20], None)
    assert result.finish_reason == "length"


def test_a_forced_call_that_is_cut_says_length() -> None:
    form = AnswerForm(frozenset({"look"}), forced=True)
    for finish in ("length", "stop"):
        message, result = gathered(form, chunks_of(('{"name":"look","arguments":{"at":', [1]), finish=finish))
        assert [each.function.arguments for each in message.tool_calls] == ['{"at":']
        assert result.finish_reason == finish


@pytest.mark.parametrize(
    ("steps", "end_id", "thoughts"),
    [
        ([("a", [1]), ("b</think>c", [2, END, 3]), ("d", [4])], END, 3),
        ([("a", [1]), ("b</think>c", [2, 5, 6, 3]), ("d", [4])], None, 5),
        ([("a", [1, 2, END, 3]), ("</think>d", [4])], END, 3),
        ([("a", [1, 2]), ("b", [3])], END, 3),
        ([("</think>b", [END, 3])], END, 1),
        ([("a</think>", [1, END]), ("b", [3]), ("</think>", [END])], END, 2),
    ],
)
def test_tokens_of_thoughts_are_counted(steps: Any, end_id: int | None, thoughts: int) -> None:
    chunks = chunks_of(*steps)
    for _, result in (gathered(THINKING, chunks, end_id), streamed(THINKING, chunks, end_id)):
        assert result.reasoning_tokens == thoughts
        told = usage(5, [result], 1)
        assert told.completion_tokens_details is not None
        assert told.completion_tokens_details.reasoning_tokens <= told.completion_tokens


def test_an_answer_without_thoughts_has_none_of_their_tokens() -> None:
    form = AnswerForm(thinks=True)
    _, result = gathered(form, chunks_of(("a", [1]), ("b", [2])))
    assert result.reasoning_tokens == 0
    assert usage(1, [gathered(TAGGED, chunks_of(("a", [1])))[1]], 1).completion_tokens_details is None


def test_thoughts_that_begin_in_pieces_are_counted() -> None:
    form = AnswerForm(thinks=True)
    choice, result = ReadChoice(form, lambda: "0", END), ChoiceResult()
    for chunk in chunks_of(("<th", [1]), ("ink>a</think>b", [2, 3, END, 4])):
        result.note(chunk)
        choice.take(chunk, result)
    assert result.reasoning_tokens == 4


def test_a_message_is_continued(gateway: LiveGateway) -> None:
    messages: list[Any] = [*HI, {"role": "assistant", "content": "so far"}]
    for extra, continues in (({}, False), ({"continue_final_message": True, "add_generation_prompt": False}, True)):
        gateway.client.chat.completions.create(model=MODEL, messages=messages, max_tokens=4, extra_body=extra)
        prompt = FakeTokenizer().encode_chat(messages, continues=continues)
        assert gateway.decoder.submitted[-1].prompt_token_ids == tuple(prompt)


def test_tools_are_told_and_results_come_back(gateway: LiveGateway) -> None:
    tools: list[Any] = [{"type": "function", "function": {"name": "look", "description": "looks around"}}]
    call: Any = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
    history: list[Any] = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "a hall"},
    ]
    gateway.client.chat.completions.create(model=MODEL, messages=history, tools=tools, max_tokens=4)
    prompt = bytes(each for each in gateway.decoder.submitted[-1].prompt_token_ids if each < 256).decode()
    assert "looks around" in prompt
    assert '<tool_call>\n{"name":"look","arguments":{"at":1}}\n</tool_call>' in prompt
    assert "a hall" in prompt


def test_a_forced_call_asks_for_a_grammar(gateway: LiveGateway) -> None:
    tools: list[Any] = [{"type": "function", "function": {"name": "look"}}]
    choices: list[tuple[Any, bool]] = [("auto", False), ("none", False), ("required", True)]
    for choice, forced in choices:
        gateway.client.chat.completions.create(
            model=MODEL,
            messages=HI,
            tools=tools,
            tool_choice=choice,
            max_tokens=4,
        )
        assert (gateway.decoder.submitted[-1].grammar is not None) == forced


def test_a_forced_call_has_no_text_for_a_format(gateway: LiveGateway) -> None:
    tools: list[Any] = [{"type": "function", "function": {"name": "look"}}]
    with gateway.client.chat.completions.create(
        model=MODEL,
        messages=HI,
        tools=tools,
        tool_choice="required",
        response_format={"type": "json_object"},
        max_tokens=4,
        stream=True,
    ) as stream:
        assert next(iter(stream)).choices[0].delta.content is None
    assert gateway.decoder.submitted[-1].grammar is not None


def test_a_tool_that_is_named_twice_is_refused(gateway: LiveGateway) -> None:
    tool: Any = {"type": "function", "function": {"name": "look"}}
    with pytest.raises(openai.BadRequestError, match="which another tool has"):
        gateway.client.chat.completions.create(model=MODEL, messages=HI, tools=[tool, tool])
