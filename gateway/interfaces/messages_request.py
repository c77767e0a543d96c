"""What clients of Anthropic's Messages API may send, and the chat completion that it asks for."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from gateway.interfaces.chat import refuse_trace
from gateway.wire.no_op import RequestStruct, no_op
from gateway.wire.requests import DecodingOptions, ModelName, Probability, Seed, StopString, TokenCount
from gateway.wire.tool_names import ToolName
from gateway.wire.tools import CallId

CHAT_NAMES = {
    "messages": "messages",
    "stop": "stop_sequences",
    "max_completion_tokens": "max_tokens",
    "response_format": "output_config.format",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "reasoning_effort": "output_config.effort",
    "continue_final_message": "messages",
}
"""What a chat completion calls a field, and what it is called here."""

_TEXT_ONLY = "only text is"


class TextBlock(RequestStruct):
    """``cache_control`` and ``citations`` change no answer."""

    type: Literal["text"]
    text: str
    cache_control: Any = None
    citations: Any = None


class Block(RequestStruct):
    """One part of a message's content. Which fields it needs depends on its ``type``."""

    type: Literal["text", "tool_use", "tool_result", "thinking", "redacted_thinking"]
    text: str | None = None
    id: CallId | None = None
    name: ToolName | None = None
    input: dict[str, Any] | None = None
    tool_use_id: CallId | None = None
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    cache_control: Any = None
    citations: Any = None
    caller: Any = None

    def __post_init__(self) -> None:
        needed = {"text": ("text",), "tool_use": ("id", "name", "input"), "tool_result": ("tool_use_id",)}
        for name in needed.get(self.type, ()):
            if getattr(self, name) is None:
                raise ValueError(f"Object missing required field `{name}`")


class InputMessage(RequestStruct):
    role: Literal["user", "assistant"]
    content: str | list[Block]


class Tool(RequestStruct):
    name: ToolName
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: Any = None
    eager_input_streaming: Any = None
    input_examples: Any = None


class ToolChoice(RequestStruct):
    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None

    def __post_init__(self) -> None:
        if self.type == "tool" and self.name is None:
            raise ValueError("Object missing required field `name`")


class Thinking(RequestStruct):
    """How much a model may think. One that doesn't think needs no telling."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Meta(ge=1)] | None = None
    display: Any = None


class OutputFormat(RequestStruct):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(RequestStruct):
    format: OutputFormat | None = None
    effort: str | None = None


class Metadata(RequestStruct):
    user_id: str | None = None


class CountTokensRequest(RequestStruct, kw_only=True):
    """The part of a request that makes its prompt."""

    model: ModelName
    messages: Annotated[list[InputMessage], Meta(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    mcp_servers: Annotated[Any, no_op([], why="none")] = None
    context_management: Annotated[Any, no_op({}, why="none")] = None
    cache_control: Any = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """``decoding`` and ``seed`` are extensions, as in chat completions."""

    max_tokens: TokenCount
    stop_sequences: Annotated[list[StopString], Meta(max_length=16)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    metadata: Metadata | None = None
    seed: Seed | None = None
    decoding: DecodingOptions | None = None
    service_tier: Annotated[Any, no_op("auto", "standard_only")] = None
    container: Annotated[Any, no_op()] = None
    inference_geo: Annotated[Any, no_op()] = None


def as_chat(body: CountTokensRequest) -> dict[str, Any]:
    """The chat completion that ``body`` asks for, as a client would send it."""
    chat: dict[str, Any] = {"model": body.model, "messages": _messages(body)}
    if body.messages[-1].role == "assistant":
        # Anthropic's servers go on from a last message of the assistant's.
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    if body.tools:
        chat["tools"] = [_tool(each) for each in body.tools]
    if body.tool_choice is not None:
        chat["tool_choice"] = _tool_choice(body.tool_choice)
        if body.tool_choice.disable_parallel_tool_use:
            chat["parallel_tool_calls"] = False
    config = body.output_config or OutputConfig()
    if (wanted := config.format or body.output_format) is not None:
        schema = {"name": "output", "schema": wanted.schema, "strict": True}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    if config.effort is not None:
        chat["reasoning_effort"] = config.effort
    if isinstance(body, MessagesRequest):
        chat |= _generation(body)
    return chat


def _generation(body: MessagesRequest) -> dict[str, Any]:
    refuse_trace(body.decoding)
    asked: dict[str, Any] = {
        "max_tokens": body.max_tokens,
        "stop": body.stop_sequences or None,
        "stream": body.stream,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "seed": body.seed,
        "user": None if body.metadata is None else body.metadata.user_id,
        "decoding": body.decoding,
        # The prompt's tokens are told at the start of a stream.
        "stream_options": {"include_usage": True, "continuous_usage_stats": True} if body.stream else None,
    }
    return {name: value for name, value in asked.items() if value is not None}


def _messages(body: CountTokensRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": _text(body.system)})
    for message in body.messages:
        messages += _turn(message)
    return messages


def _turn(message: InputMessage) -> list[dict[str, Any]]:
    """One message of theirs may be several of chat's: each tool's result is one."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    blocks = message.content
    results = [
        {"role": "tool", "tool_call_id": each.tool_use_id, "content": _text(each.content or "")}
        for each in blocks
        if each.type == "tool_result"
    ]
    text = "\n".join(each.text or "" for each in blocks if each.type == "text")
    turn: dict[str, Any] = {"role": message.role, "content": text}
    if calls := [_call(each) for each in blocks if each.type == "tool_use"]:
        turn["tool_calls"] = calls
    if thoughts := "\n".join(each.thinking or "" for each in blocks if each.type == "thinking"):
        turn["reasoning_content"] = thoughts
    # Results alone make no turn of the user's own.
    return [*results, turn] if text or not results else results


def _call(block: Block) -> dict[str, Any]:
    arguments = msgspec.json.encode(block.input).decode()
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _tool(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _tool_choice(choice: ToolChoice) -> Any:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return {"auto": "auto", "any": "required", "none": "none"}[choice.type]


def _text(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(each.text for each in content)
