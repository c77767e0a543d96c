"""Agents' clients, unmodified, on the demo model: calls that are forced are always valid, beside candidate trees."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import jsonschema
import openai
import pydantic
import pytest

from tests.e2e.conftest import ANSWER_S

pytestmark = pytest.mark.model

MODEL = "smollm2-135m-instruct"
ASK: list[Any] = [{"role": "user", "content": "What is the weather in Paris? Use a tool."}]
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
ROUTE = {
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
    "type": "object",
    "properties": {"stops": {"type": "array", "items": {"$ref": "#/$defs/place"}, "minItems": 1, "maxItems": 2}},
    "required": ["stops"],
    "additionalProperties": False,
}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"get_weather": WEATHER, "plan_route": ROUTE, "stop": NOTHING}


def tool(name: str) -> Any:
    return {"type": "function", "function": {"name": name, "description": f"{name} now", "parameters": SCHEMAS[name]}}


TOOLS = [tool(name) for name in SCHEMAS]
THEIR_TOOLS: list[Any] = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]


@pytest.fixture(scope="module")
def theirs(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key="unused", timeout=ANSWER_S, max_retries=0) as opened:
        yield opened


def named(name: str) -> Any:
    return {"type": "function", "function": {"name": name}}


def valid(name: str, arguments: str) -> bool:
    jsonschema.validate(json.loads(arguments), SCHEMAS[name])
    return True


@pytest.mark.parametrize("choice", ["required", *map(named, SCHEMAS)], ids=["required", *SCHEMAS])
def test_forced_calls_are_valid_and_the_same_without_trees(client: openai.OpenAI, choice: Any) -> None:
    for sampling in ({"temperature": 0}, {"temperature": 1.0, "seed": 7}):
        asked: dict[str, Any] = {"model": MODEL, "messages": ASK, "tools": TOOLS, "tool_choice": choice, **sampling}
        answers = [
            client.chat.completions.create(**asked, max_tokens=120, extra_body={"decoding": {"method": method}})
            for method in ("medusa", "vanilla")
        ]
        calls = [answer.choices[0].message.tool_calls for answer in answers]
        assert all(answer.choices[0].finish_reason == "tool_calls" for answer in answers)
        [[drafted], [vanilla]] = calls
        assert drafted.function == vanilla.function
        assert answers[0].usage.completion_tokens == answers[1].usage.completion_tokens
        assert valid(drafted.function.name, drafted.function.arguments)
        if choice != "required":
            assert drafted.function.name == choice["function"]["name"]


def test_a_loop_with_tools_streamed(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "tools": TOOLS, "temperature": 0}
    with client.chat.completions.stream(
        **asked, messages=ASK, tool_choice=named("get_weather"), max_tokens=80
    ) as events:
        kinds = [event.type for event in events]
        message = events.get_final_completion().choices[0].message
    assert "tool_calls.function.arguments.delta" in kinds
    [call] = message.tool_calls or []
    assert valid("get_weather", call.function.arguments)
    whole = client.chat.completions.create(**asked, messages=ASK, tool_choice=named("get_weather"), max_tokens=80)
    [same] = whole.choices[0].message.tool_calls or []
    assert same.function.arguments == call.function.arguments
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": '{"degrees": 21}'}
    history = [*ASK, message.model_dump(exclude_unset=True, exclude={"parsed"}), result]
    for choice in ("auto", "none"):
        final = client.chat.completions.create(**asked, messages=history, tool_choice=choice, max_tokens=24)
        assert final.choices[0].message.content
        assert final.choices[0].finish_reason in ("stop", "length")


def test_a_cut_call_says_length(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=ASK, tools=TOOLS, tool_choice=named("get_weather"), max_tokens=12, temperature=0
    )
    assert answer.choices[0].finish_reason == "length"


class Answer(pydantic.BaseModel):
    city: str = pydantic.Field(max_length=20)
    sunny: bool


def test_parse_with_pydantic(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(
        model=MODEL, messages=ASK, response_format=Answer, max_tokens=80, temperature=0
    )
    assert isinstance(parsed.choices[0].message.parsed, Answer)


def test_a_message_goes_on_as_if_it_had_not_stopped(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=24, temperature=0)
    text = whole.choices[0].message.content or ""
    split = text.index(" ", len(text) // 2)
    rest = client.chat.completions.create(
        model=MODEL,
        messages=[*ASK, {"role": "assistant", "content": text[:split]}],
        max_tokens=24,
        temperature=0,
        extra_body={"continue_final_message": True, "add_generation_prompt": False},
    )
    assert (rest.choices[0].message.content or "").startswith(text[split:])


@pytest.mark.parametrize(
    "choice",
    [{"type": "any"}, {"type": "tool", "name": "plan_route"}],
    ids=["any", "tool"],
)
def test_messages_with_tools(theirs: anthropic.Anthropic, choice: Any) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": ASK, "tools": THEIR_TOOLS, "tool_choice": choice}
    asked |= {"max_tokens": 120, "extra_body": {"temperature": 0}}
    message = theirs.messages.create(**asked)
    assert message.stop_reason == "tool_use"
    [block] = message.content
    assert isinstance(block, anthropic.types.ToolUseBlock)
    assert valid(block.name, json.dumps(block.input))
    with theirs.messages.stream(**asked) as stream:
        kinds = {event.type for event in stream}
        [again] = stream.get_final_message().content
    assert "input_json" in kinds
    assert isinstance(again, anthropic.types.ToolUseBlock)
    assert (again.name, again.input) == (block.name, block.input)
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "done"}
    history: list[Any] = [*ASK, {"role": "assistant", "content": [block.model_dump()]}]
    history.append({"role": "user", "content": [result]})
    final = theirs.messages.create(model=MODEL, messages=history, tools=THEIR_TOOLS, max_tokens=16)
    assert final.content


def test_a_cut_call_has_no_place_in_messages(theirs: anthropic.Anthropic) -> None:
    message = theirs.messages.create(
        model=MODEL,
        messages=ASK,
        tools=THEIR_TOOLS,
        tool_choice={"type": "tool", "name": "plan_route"},
        max_tokens=16,
    )
    assert message.stop_reason == "max_tokens"
    assert [block.type for block in message.content] == ["text"]


def test_responses_with_a_function(client: openai.OpenAI) -> None:
    function: Any = {"type": "function", "name": "get_weather", "parameters": WEATHER, "strict": True}
    asked: dict[str, Any] = {"model": MODEL, "tools": [function], "store": False, "temperature": 0}
    forced = {"tool_choice": "required", "max_output_tokens": 80}
    response = client.responses.create(**asked, **forced, input="What is the weather in Paris?")
    [call] = response.output
    assert call.type == "function_call"
    assert valid(call.name, call.arguments)
    with client.responses.stream(**asked, **forced, input="What is the weather in Paris?") as stream:
        kinds = {event.type for event in stream}
        [again] = stream.get_final_response().output
    assert "response.function_call_arguments.delta" in kinds
    assert again.type == "function_call"
    assert again.arguments == call.arguments
    items: list[Any] = [
        {"role": "user", "content": "What is the weather in Paris?"},
        call.model_dump(),
        {"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees"},
    ]
    final = client.responses.create(**asked, input=items, max_output_tokens=16)
    assert final.output_text
