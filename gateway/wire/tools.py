"""Tools in chat requests: what clients may send of them, and the rules that span fields. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Protocol

import msgspec
from msgspec import Meta

from gateway.wire.errors import InvalidRequest
from gateway.wire.no_op import RequestStruct
from gateway.wire.tool_names import ToolName

MAX_TOOLS = 128

CallId = Annotated[str, Meta(min_length=1, max_length=256)]


class Function(RequestStruct):
    """``parameters``: a JSON schema of an object; none: no arguments. Arguments are held to it where a call is forced
    (``tool_choice``), ``strict`` or not."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(RequestStruct):
    type: Literal["function"]
    function: Function


class NamedFunction(RequestStruct):
    name: ToolName


class NamedTool(RequestStruct):
    type: Literal["function"]
    function: NamedFunction


class CalledFunction(RequestStruct):
    """``arguments``: an object, as JSON text."""

    name: ToolName
    arguments: str = "{}"


class ToolCall(RequestStruct):
    """A call in an assistant's message, as it was given out. ``index``: of its place in a stream."""

    id: CallId
    function: CalledFunction
    type: Literal["function"] = "function"
    index: Any = None


class _Message(Protocol):
    role: str
    tool_calls: list[ToolCall] | None
    tool_call_id: str | None


class _Body(Protocol):
    @property
    def messages(self) -> Sequence[Any]: ...

    @property
    def tools(self) -> list[Tool] | None: ...

    @property
    def tool_choice(self) -> Literal["none", "auto", "required"] | NamedTool | None: ...


def check_tools(body: _Body) -> None:
    """Raises :class:`InvalidRequest` naming the field."""
    tools = body.tools or []
    names = [tool.function.name for tool in tools]
    for i, (name, tool) in enumerate(zip(names, tools, strict=True)):
        if name in names[:i]:
            raise InvalidRequest(
                f"'tools[{i}].function.name' is '{name}', which another tool has; give each a name of its own.",
                param=f"tools[{i}].function.name",
            )
        kind = (tool.function.parameters or {}).get("type", "object")
        if kind != "object":
            param = f"tools[{i}].function.parameters.type"
            raise InvalidRequest(f"'{param}' must be object: arguments have names.", param=param)
    choice = body.tool_choice
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise InvalidRequest(
            f"'tool_choice' names '{choice.function.name}', which is none of 'tools'.", param="tool_choice"
        )
    if choice == "required" and not tools:
        raise InvalidRequest("'tool_choice' is required, but there are no 'tools'.", param="tool_choice")
    _check_history(body.messages)


def arguments_of(call: ToolCall) -> dict[str, Any]:
    """Raises msgspec.ValidationError or msgspec.DecodeError."""
    return msgspec.json.decode(call.function.arguments or "{}", type=dict[str, Any])


def _check_history(messages: Sequence[_Message]) -> None:
    called: set[str] = set()
    for i, message in enumerate(messages):
        for j, call in enumerate(message.tool_calls or ()):
            try:
                arguments_of(call)
            except (msgspec.DecodeError, RecursionError):
                param = f"messages[{i}].tool_calls[{j}].function.arguments"
                raise InvalidRequest(f"'{param}' must be a JSON object as text.", param=param) from None
            called.add(call.id)
        if message.role == "tool" and message.tool_call_id not in called:
            param = f"messages[{i}].tool_call_id"
            raise InvalidRequest(
                f"'{param}' is '{(message.tool_call_id or '')[:100]}', but no message before it calls a tool by that "
                "id; send the assistant's message with its tool_calls too.",
                param=param,
            )
