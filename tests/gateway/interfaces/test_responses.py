"""OpenAI's Responses API through its official client, against a real server; and its events, one by one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import httpx
import msgspec
import openai
import pytest
from openai.types.responses import ResponseStreamEvent

from gateway.interfaces.responses_answer import ResponsesWriter, whole
from gateway.interfaces.responses_request import ResponsesRequest, as_chat
from tests.support.chat_chunks import THOUGHTS_TEXT_AND_CALLS, chunk, translated
from tests.support.live_gateway import MODEL, LiveGateway, running_gateway

KNOWN: dict[str, Any] = {
    get_args(each.model_fields["type"].annotation)[0]: each for each in get_args(get_args(ResponseStreamEvent)[0])
}
"""The official client's type of each event."""


@pytest.fixture(scope="module")
def gateway() -> Iterator[LiveGateway]:
    with running_gateway() as live:
        yield live


@pytest.fixture(scope="module")
def client(gateway: LiveGateway) -> openai.OpenAI:
    return gateway.client


def test_an_answer_is_the_chat_completions(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}],
        temperature=0.5,
        seed=1,
    )
    response = client.responses.create(
        model=MODEL, input="hi", instructions="be brief", temperature=0.5, store=False, extra_body={"seed": 1}
    )
    assert response.id.startswith("resp_")
    assert (response.status, response.model) == ("completed", MODEL)
    assert response.output_text == chat.choices[0].message.content
    assert chat.usage is not None
    assert response.usage is not None
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.usage.output_tokens == chat.usage.completion_tokens
    assert response.model_extra is not None
    assert response.model_extra["decoding"]["reason"]


@pytest.mark.parametrize("most", [None, 20])
def test_a_stream_says_the_same(client: openai.OpenAI, most: int | None) -> None:
    asked: dict[str, Any] = {"model": MODEL, "input": "hi", "extra_body": {"seed": 3}, "max_output_tokens": most}
    response = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        events: list[Any] = list(stream)
    assert [event.sequence_number for event in events if hasattr(event, "sequence_number")]
    ending = events[-1]
    assert ending.type == ("response.completed" if most is None else "response.incomplete")
    assert ending.response.output_text == response.output_text
    assert ending.response.usage == response.usage
    assert ending.response.status == response.status == ("completed" if most is None else "incomplete")
    assert ending.response.incomplete_details == response.incomplete_details
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == response.output_text


def test_log_probabilities(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "input": "hi",
        "temperature": 0,
        "max_output_tokens": 5,
        "top_logprobs": 2,
        "include": ["message.output_text.logprobs"],
    }
    message = client.responses.create(**asked).output[0]
    assert message.type == "message"
    part = message.content[0]
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert [len(each.top_logprobs) for each in part.logprobs] == [2] * 5
    with client.responses.stream(**asked) as stream:
        last: Any = list(stream)[-1]
    assert last.response.output[0].content[0].logprobs == part.logprobs


def test_what_was_given_out_is_taken_back(client: openai.OpenAI) -> None:
    response = client.responses.create(model=MODEL, input="hi", temperature=0)
    turns: list[Any] = [{"role": "user", "content": "hi"}, *response.output, {"role": "user", "content": "more"}]
    again = client.responses.create(model=MODEL, input=turns, temperature=0, max_output_tokens=9)
    chat = client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": response.output_text},
            {"role": "user", "content": "more"},
        ],
        temperature=0,
        max_tokens=9,
    )
    assert again.output_text == chat.choices[0].message.content


@pytest.mark.parametrize(
    ("body", "says", "param"),
    [
        ({"input": []}, "'input' must be", "input"),
        ({"input": [{"role": "user"}]}, "'input[0].content' is required", "input[0].content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "'input[0].content[0].type' must be one of",
            "input[0].content[0].type",
        ),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "call_id' is required", "input[0].call_id"),
        ({"max_output_tokens": 10**6}, "'max_output_tokens' is 1000000", "max_output_tokens"),
        ({"store": True}, "'store' is not supported", "store"),
        ({"previous_response_id": "resp_1"}, "send the whole conversation", "previous_response_id"),
        ({"background": True}, "'background' is not supported", "background"),
        ({"truncation": "auto"}, "shorten the input", "truncation"),
        ({"tools": [{"type": "web_search"}]}, "'tools[0].type' must be one of: function", "tools[0].type"),
        ({"text": {"format": {"type": "json_schema"}}}, "'text.format.name' is required", "text.format.name"),
        ({"text": {"verbosity": "low"}}, "'text.verbosity' is not supported", "text.verbosity"),
        ({"include": ["file_search_call.results"]}, "must be one of", "include[0]"),
    ],
    ids=str,
)
def test_bad_input_is_named_in_this_apis_words(gateway: LiveGateway, body: Any, says: str, param: str) -> None:
    response = httpx.post(f"{gateway.url}/v1/responses", json={"model": MODEL, "input": "hi"} | body)
    error = response.json()["error"]
    assert response.status_code == 400
    assert says in error["message"]
    assert error["param"] == param


def asking(**fields: Any) -> ResponsesRequest:
    return msgspec.json.decode(msgspec.json.encode({"model": "m", "input": "hi", **fields}), type=ResponsesRequest)


def events_of(*chunks: Any) -> list[dict[str, Any]]:
    events = [
        msgspec.json.decode(block.split(b"\ndata: ")[1]) for block in translated(ResponsesWriter(asking()), *chunks)
    ]
    for event in events:
        KNOWN[event["type"]].model_validate(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def test_thoughts_text_and_calls_are_items() -> None:
    events = events_of(*THOUGHTS_TEXT_AND_CALLS)
    of_part = ["content_part.added", "{}.delta", "{}.done", "content_part.done"]
    of_text = ["output_item.added", *of_part, "output_item.done"]
    of_call = ["output_item.added", "{}.delta", "{}.done", "output_item.done"]
    kinds: list[str] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if not kinds or kinds[-1] != kind:
            kinds.append(kind)
    assert kinds == [
        "created",
        "in_progress",
        *[each.format("reasoning_text") for each in of_text],
        *[each.format("output_text") for each in of_text],
        *[each.format("function_call_arguments") for each in of_call] * 2,
        "completed",
    ]
    output = events[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call", "function_call"]
    assert output[1]["content"][0]["text"] == "Let me see."
    assert (output[2]["call_id"], output[2]["name"], output[2]["arguments"]) == ("call_0", "look", '{"at":1}')
    assert len({item["id"] for item in output}) == 4
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == output
    assert events[-1]["response"]["usage"]["output_tokens"] == 9


def test_an_answer_of_no_text_is_an_empty_message() -> None:
    events = events_of(chunk({"role": "assistant", "content": ""}), chunk({}, "stop"), b"[DONE]")
    assert [item["type"] for item in events[-1]["response"]["output"]] == ["message"]


def test_a_failure_ends_the_stream() -> None:
    told = {"message": "The engine failed.", "type": "server_error", "param": None, "code": "engine_error"}
    events = events_of(chunk({"content": "a"}), {"error": told}, b"[DONE]")
    assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
    assert events[-1]["response"]["error"]["message"] == "The engine failed."


def test_a_whole_answer_with_calls() -> None:
    function = {"name": "look", "arguments": '{"at": 1}'}
    message = {"content": None, "tool_calls": [{"id": "call_0", "type": "function", "function": function}]}
    chat: dict[str, Any] = {
        "id": "resp_1",
        "model": "m",
        "choices": [{"message": message, "finish_reason": "tool_calls"}],
    }
    chat["usage"] = {"prompt_tokens": 5, "completion_tokens": 9, "total_tokens": 14}
    chat["usage"]["completion_tokens_details"] = {"reasoning_tokens": 4}
    response = msgspec.json.decode(whole(msgspec.json.encode(chat), asking()))
    [item] = response["output"]
    assert (item["type"], item["call_id"], item["arguments"]) == ("function_call", "call_0", '{"at": 1}')
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 4}


def test_a_conversation_with_tools_as_chat_has_it() -> None:
    body = asking(
        input=[
            {"role": "developer", "content": "d"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "where?"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "look", "arguments": "{}"},
            {"type": "function_call", "id": "fc_2", "call_id": "c2", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "here"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "there"}]},
        ],
        tools=[{"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": True}],
        tool_choice={"type": "function", "name": "look"},
        text={"format": {"type": "json_schema", "name": "o", "schema": {}, "strict": True}},
        max_output_tokens=9,
    )
    function = {"name": "look", "arguments": "{}"}
    assert as_chat(body) == {
        "model": "m",
        "max_tokens": 9,
        "messages": [
            {"role": "developer", "content": "d"},
            {"role": "user", "content": "where?"},
            {
                "role": "assistant",
                "content": "",
                "reasoning_content": "hm",
                "tool_calls": [{"id": each, "type": "function", "function": function} for each in ("c1", "c2")],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "here"},
            {"role": "tool", "tool_call_id": "c2", "content": "there"},
        ],
        "tools": [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}, "strict": True}}],
        "tool_choice": {"type": "function", "function": {"name": "look"}},
        "response_format": {"type": "json_schema", "json_schema": {"name": "o", "schema": {}, "strict": True}},
    }
