"""Anthropic's Messages API through its official client, against a real server; and its events, one by one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import msgspec
import pytest

from gateway.api.messages import message_call
from gateway.interfaces.messages_answer import MessagesWriter, whole
from gateway.interfaces.messages_request import MessagesRequest, as_chat
from gateway.tools.asked import template_input
from gateway.tools.template import CallStyle, TemplateFacts
from gateway.wire.requests import ChatCompletionRequest
from tests.support.chat_chunks import THOUGHTS_TEXT_AND_CALLS, chunk, translated
from tests.support.live_gateway import MODEL, LiveGateway, running_gateway

HI: list[Any] = [{"role": "user", "content": "hi"}]
GREEDY = {"temperature": 0}
"""Newer clients have no parameter for it; older ones send it."""


@pytest.fixture(scope="module")
def gateway() -> Iterator[LiveGateway]:
    with running_gateway() as live:
        yield live


@pytest.fixture(scope="module")
def client(gateway: LiveGateway) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=gateway.url, api_key="none", max_retries=0)


def chat_answer(gateway: LiveGateway, **fields: Any) -> Any:
    return gateway.client.chat.completions.create(model=MODEL, seed=1, **fields)


def test_an_answer_is_the_chat_completions(gateway: LiveGateway, client: anthropic.Anthropic) -> None:
    chat = chat_answer(
        gateway, messages=[{"role": "system", "content": "be brief"}, *HI], max_tokens=300, temperature=0.5
    )
    message = client.messages.create(
        model=MODEL, max_tokens=300, messages=HI, system="be brief", extra_body={"seed": 1, "temperature": 0.5}
    )
    assert message.id.startswith("msg_")
    assert (message.role, message.type, message.model) == ("assistant", "message", MODEL)
    assert [(each.type, each.text) for each in message.content if each.type == "text"] == [
        ("text", chat.choices[0].message.content)
    ]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.usage.input_tokens == chat.usage.prompt_tokens
    assert message.usage.output_tokens == chat.usage.completion_tokens
    assert message.model_extra is not None
    assert message.model_extra["decoding"]["reason"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_stream_says_the_same(client: anthropic.Anthropic, temperature: float) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 300,
        "messages": HI,
        "extra_body": {"seed": 3, "temperature": temperature},
    }
    message = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert len(pieces) > 1
    for each in (final, message):
        assert [block.text for block in each.content if block.type == "text"] == ["".join(pieces)]
    assert final.usage == message.usage
    assert (final.stop_reason, final.stop_sequence) == (message.stop_reason, message.stop_sequence)


def test_limits_and_stops(gateway: LiveGateway, client: anthropic.Anthropic) -> None:
    cut = client.messages.create(model=MODEL, max_tokens=2, messages=HI, extra_body=GREEDY)
    assert cut.stop_reason == "max_tokens"
    text = chat_answer(gateway, messages=HI, temperature=0).choices[0].message.content
    assert text
    stopped = client.messages.create(
        model=MODEL, max_tokens=300, messages=HI, stop_sequences=["no such", text[4:6]], extra_body=GREEDY
    )
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", text[4:6])
    assert [each.text for each in stopped.content if each.type == "text"] == [text[: text.index(text[4:6])]]


def test_tokens_are_counted(client: anthropic.Anthropic) -> None:
    message = client.messages.create(model=MODEL, max_tokens=2, messages=HI, system="be brief")
    counted = client.messages.count_tokens(model=MODEL, messages=HI, system="be brief")
    assert counted.input_tokens == message.usage.input_tokens


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"max_tokens": None}, "'max_tokens'"),
        ({"messages": []}, "'messages'"),
        ({"temperature": 1.5}, "'temperature' must be"),
        ({"messages": [{"role": "system", "content": "x"}]}, "'messages[0].role' must be one of"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "'messages[0].content[0].type' must be one"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "'messages[0].content[0].text' is required"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id' is required"),
        ({"stop_sequences": [""]}, "'stop_sequences[0]' must be"),
        ({"max_tokens": 10**7}, "'max_tokens'"),
        ({"container": "c"}, "'container' is not supported"),
        ({"surprise": 1}, "'surprise' is not a known field"),
        ({"tool_choice": {"type": "tool"}}, "'tool_choice.name' is required"),
    ],
    ids=str,
)
def test_bad_input_is_named_in_this_apis_words(gateway: LiveGateway, body: dict[str, Any], says: str) -> None:
    asked = {"model": MODEL, "max_tokens": 5, "messages": HI} | body
    response = httpx.post(f"{gateway.url}/v1/messages", json=asked)
    told = response.json()
    assert (response.status_code, told["type"]) == (400, "error")
    assert told["error"]["type"] == "invalid_request_error"
    assert says in told["error"]["message"]


def test_an_unknown_model(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="is not served here"):
        client.messages.create(model="nobody", max_tokens=5, messages=HI)


def events_of(*chunks: Any) -> list[dict[str, Any]]:
    events = []
    for block in translated(MessagesWriter(), *chunks):
        name, data = block.split(b"\n")
        event = msgspec.json.decode(data.removeprefix(b"data: "))
        assert event["type"] == name.removeprefix(b"event: ").decode()
        events.append(event)
    return events


def test_thoughts_text_and_calls_are_blocks() -> None:
    events = events_of(*THOUGHTS_TEXT_AND_CALLS)
    assert [event["type"] for event in events if event["type"] != "content_block_delta"] == [
        "message_start",
        *["content_block_start", "content_block_stop"] * 4,
        "message_delta",
        "message_stop",
    ]
    starts = [event for event in events if event["type"] == "content_block_start"]
    assert [event["index"] for event in starts] == [0, 1, 2, 3]
    assert [event["content_block"]["type"] for event in starts] == ["thinking", "text", "tool_use", "tool_use"]
    assert starts[2]["content_block"] == {"type": "tool_use", "id": "call_0", "name": "look", "input": {}}
    pieces = [(e["index"], *e["delta"].values()) for e in events if e["type"] == "content_block_delta"]
    assert pieces == [
        (0, "thinking_delta", "hm"),
        (1, "text_delta", "Let me "),
        (1, "text_delta", "see."),
        (2, "input_json_delta", '{"at":'),
        (2, "input_json_delta", "1}"),
        (3, "input_json_delta", "{}"),
    ]
    ending = events[-2]
    assert ending["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert (ending["usage"]["input_tokens"], ending["usage"]["output_tokens"]) == (3, 9)


def test_a_failure_ends_the_stream() -> None:
    told = {"message": "The engine failed.", "type": "server_error", "param": None, "code": "engine_error"}
    events = events_of(chunk({"content": "a"}), {"error": told}, b"[DONE]")
    assert events[-1] == {"type": "error", "error": {"type": "api_error", "message": "The engine failed."}}
    assert "message_stop" not in [event["type"] for event in events]


def test_a_whole_answer_with_calls() -> None:
    function = {"name": "look", "arguments": '{"at": 1}'}
    message = {"content": None, "tool_calls": [{"id": "call_0", "type": "function", "function": function}]}
    chat = {"id": "msg_1", "model": "m", "choices": [{"message": message, "finish_reason": "tool_calls"}]}
    answer = msgspec.json.decode(whole(msgspec.json.encode(chat)))
    assert answer["content"] == [{"type": "tool_use", "id": "call_0", "name": "look", "input": {"at": 1}}]
    assert answer["stop_reason"] == "tool_use"


def test_half_a_call_is_text() -> None:
    function = {"name": "look", "arguments": '{"at": '}
    message = {"content": None, "tool_calls": [{"id": "call_0", "type": "function", "function": function}]}
    chat = {"id": "msg_1", "model": "m", "choices": [{"message": message, "finish_reason": "length"}]}
    answer = msgspec.json.decode(whole(msgspec.json.encode(chat)))
    assert answer["content"] == [{"type": "text", "text": '{"at": '}]
    assert answer["stop_reason"] == "max_tokens"


@pytest.mark.parametrize(("asked", "told"), [("enabled", True), ("adaptive", True), ("disabled", False)])
def test_thinking_is_for_a_template_that_takes_it(asked: str, told: bool) -> None:
    body = {"model": "m", "max_tokens": 9, "messages": HI, "thinking": {"type": asked}}
    call = message_call(msgspec.json.encode(body))
    assert call.thinking is told
    facts = TemplateFacts(frozenset({"enable_thinking"}), False, CallStyle.TAGGED, True)
    assert isinstance(call.body, ChatCompletionRequest)
    assert template_input(call.body, facts, thinking=call.thinking).variables == {"enable_thinking": told}
    plain = TemplateFacts(frozenset(), False, CallStyle.TAGGED, False)
    assert template_input(call.body, plain, thinking=call.thinking).variables == {}


def test_a_conversation_with_tools_as_chat_has_it() -> None:
    asked = {
        "model": "m",
        "max_tokens": 9,
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "where?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "x"},
                    {"type": "text", "text": "one moment"},
                    {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "here"}]},
                    {"type": "text", "text": "so?"},
                ],
            },
        ],
        "tools": [{"name": "look", "description": "looks", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "metadata": {"user_id": "u"},
    }
    chat = as_chat(msgspec.json.decode(msgspec.json.encode(asked), type=MessagesRequest))
    function = {"name": "look", "arguments": '{"at":1}'}
    assert chat == {
        "model": "m",
        "max_tokens": 9,
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "where?"},
            {
                "role": "assistant",
                "content": "one moment",
                "reasoning_content": "hm",
                "tool_calls": [{"id": "t1", "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": "t1", "content": "here"},
            {"role": "user", "content": "so?"},
        ],
        "tools": [
            {
                "type": "function",
                "function": {"name": "look", "description": "looks", "parameters": {"type": "object"}},
            }
        ],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "user": "u",
    }
