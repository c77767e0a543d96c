"""What clients of OpenAI's Responses API may send, and the chat completion that it asks for.

Stateless: nothing is stored, so nothing stored can be named; a conversation is sent as a whole.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from gateway.interfaces.chat import refuse_trace
from gateway.wire.no_op import RequestStruct, no_op
from gateway.wire.requests import (
    MAX_LOGPROBS,
    DecodingOptions,
    ModelName,
    Probability,
    Seed,
    StopString,
    Temperature,
    TokenCount,
)
from gateway.wire.tool_names import ToolName
from gateway.wire.tools import CallId

CHAT_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "verbosity": "text.verbosity",
    "reasoning_effort": "reasoning.effort",
}
"""What a chat completion calls a field, and what it is called here."""

_SEND_ALL = "nothing is stored here: send the whole conversation in input"


class Part(RequestStruct):
    """One part of a message, as clients send it or as it was given out."""

    type: Literal["input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"]
    text: str | None = None
    refusal: str | None = None
    annotations: Any = None
    logprobs: Any = None

    def __post_init__(self) -> None:
        name = "refusal" if self.type == "refusal" else "text"
        if getattr(self, name) is None:
            raise ValueError(f"Object missing required field `{name}`")


class Item(RequestStruct):
    """A message, a call of a function, its output, or thoughts. Without a ``type`` it is a message."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[Part] | None = None
    call_id: CallId | None = None
    name: ToolName | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None
    summary: list[Part] | None = None
    encrypted_content: Annotated[Any, no_op(instead="send the content of thoughts, or leave them out")] = None
    id: str | None = None
    status: Any = None
    phase: Any = None

    def __post_init__(self) -> None:
        needed = {
            "message": ("role", "content"),
            "function_call": ("call_id", "name", "arguments"),
            "function_call_output": ("call_id", "output"),
        }
        for name in needed.get(self.type, ()):
            if getattr(self, name) is None:
                raise ValueError(f"Object missing required field `{name}`")


class FunctionTool(RequestStruct):
    type: Literal["function"]
    name: ToolName
    parameters: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class NamedFunction(RequestStruct):
    type: Literal["function"]
    name: ToolName


class TextFormat(RequestStruct):
    type: Literal["text", "json_object", "json_schema"]
    name: ToolName | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None

    def __post_init__(self) -> None:
        for name in ("name", "schema") if self.type == "json_schema" else ():
            if getattr(self, name) is None:
                raise ValueError(f"Object missing required field `{name}`")


class TextOptions(RequestStruct):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(RequestStruct):
    """``summary``: thoughts are given as they are, where the model gives them; there is no other summary."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class EventOptions(RequestStruct):
    include_obfuscation: Annotated[Any, no_op(False, why="off")] = None


class ResponsesRequest(RequestStruct, kw_only=True):
    """``decoding``, ``seed`` and ``stop`` are extensions, as in chat completions."""

    model: ModelName
    input: str | Annotated[list[Item], Meta(min_length=1)]
    instructions: str | None = None
    max_output_tokens: TokenCount | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    stream: bool | None = None
    stream_options: EventOptions | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    seed: Seed | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=16)] | None = None
    decoding: DecodingOptions | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    store: Annotated[Any, no_op(False, instead="nothing is stored here; send false")] = None
    previous_response_id: Annotated[Any, no_op(instead=_SEND_ALL)] = None
    conversation: Annotated[Any, no_op(instead=_SEND_ALL)] = None
    prompt: Annotated[Any, no_op(instead="send its text in instructions and input")] = None
    background: Annotated[Any, no_op(False, instead="stream instead")] = None
    truncation: Annotated[Any, no_op("disabled", instead="shorten the input")] = None
    max_tool_calls: Annotated[Any, no_op()] = None
    context_management: Annotated[Any, no_op()] = None
    service_tier: Annotated[Any, no_op("auto", "default")] = None
    prompt_cache_retention: Annotated[Any, no_op()] = None

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())


def as_chat(body: ResponsesRequest) -> dict[str, Any]:
    """The chat completion that ``body`` asks for, as a client would send it."""
    refuse_trace(body.decoding)
    text, reasoning = body.text or TextOptions(), body.reasoning or Reasoning()
    asked: dict[str, Any] = {
        "model": body.model,
        "messages": _messages(body),
        "max_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "logprobs": True if body.wants_logprobs else None,
        "top_logprobs": body.top_logprobs if body.wants_logprobs else None,
        "stream": body.stream,
        "stream_options": {"include_usage": True} if body.stream else None,
        "tools": None if body.tools is None else [_tool(each) for each in body.tools],
        "tool_choice": _tool_choice(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": None if text.format is None else _format(text.format),
        "verbosity": text.verbosity,
        "reasoning_effort": reasoning.effort,
        "seed": body.seed,
        "stop": body.stop,
        "decoding": body.decoding,
        "user": body.user,
        "metadata": body.metadata,
        "safety_identifier": body.safety_identifier,
        "prompt_cache_key": body.prompt_cache_key,
    }
    return {name: value for name, value in asked.items() if value is not None}


def _messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.instructions is not None:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    for item in body.input:
        _add(messages, item)
    return messages


def _add(messages: list[dict[str, Any]], item: Item) -> None:
    """What an assistant thinks, says and calls in a row is one message of chat's."""
    if item.type == "function_call_output":
        messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
        return
    if item.type == "message" and item.role != "assistant":
        messages.append({"role": item.role, "content": _text(item.content)})
        return
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    turn = messages[-1]
    if item.type == "message":
        said = _text(item.content)
        turn["content"] = f"{turn['content']}\n{said}" if turn["content"] else said
    elif item.type == "function_call":
        function = {"name": item.name, "arguments": item.arguments}
        turn.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
    elif thoughts := _text(item.content) or _text(item.summary):
        turn["reasoning_content"] = thoughts


def _text(content: str | list[Part] | None) -> str:
    if isinstance(content, str):
        return content
    return "\n".join((each.refusal if each.type == "refusal" else each.text) or "" for each in content or ())


def _tool(tool: FunctionTool) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "parameters": tool.parameters,
        "description": tool.description,
        "strict": tool.strict,
    }
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _tool_choice(choice: str | NamedFunction | None) -> Any:
    return {"type": "function", "function": {"name": choice.name}} if isinstance(choice, NamedFunction) else choice


def _format(wanted: TextFormat) -> dict[str, Any]:
    if wanted.type != "json_schema":
        return {"type": wanted.type}
    schema = {
        "name": wanted.name,
        "schema": wanted.schema,
        "description": wanted.description,
        "strict": wanted.strict,
    }
    kept = {name: value for name, value in schema.items() if value is not None}
    return {"type": "json_schema", "json_schema": kept}
