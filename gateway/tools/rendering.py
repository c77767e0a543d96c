"""Messages with tools as a chat template takes them, whether it knows tools or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.tools.template import TemplateFacts
from gateway.wire.prompts import plain_message
from gateway.wire.requests import ChatMessage
from gateway.wire.tools import Tool, arguments_of

_PREFACE = """You can call these functions. Each is described by a JSON schema of its parameters:

{functions}

To call one, write nothing but this, with the function's name and an object of arguments:
<tool_call>
{{"name": "...", "arguments": {{...}}}}
</tool_call>"""


def template_messages(
    messages: Sequence[ChatMessage], tools: Sequence[Tool], facts: TemplateFacts
) -> list[dict[str, Any]]:
    """As ``facts``'s template takes them. Where it knows no tools, they are told in words that it knows: the functions
    in the system message, calls in the assistant's text, results as the user's."""
    if facts.knows_tools:
        return [_known(each) for each in messages]
    told = [_told(each) for each in messages]
    if tools:
        preface = _PREFACE.format(functions="\n".join(_json(msgspec.to_builtins(each.function)) for each in tools))
        if told[0]["role"] == "system":
            told[0] = {**told[0], "content": f"{told[0]['content']}\n\n{preface}"}
        else:
            told.insert(0, {"role": "system", "content": preface})
    return told


def template_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """As templates that know tools take them: OpenAI's form, without what was left out."""
    return [{"type": "function", "function": _without_nulls(each)} for each in tools]


def _without_nulls(tool: Tool) -> dict[str, Any]:
    given = {"name": tool.function.name, "description": tool.function.description or ""}
    return given | {"parameters": tool.function.parameters or {"type": "object", "properties": {}}}


def _known(message: ChatMessage) -> dict[str, Any]:
    told = plain_message(message)
    if message.tool_calls:
        # Templates write arguments as JSON themselves.
        told["tool_calls"] = [
            {
                "id": each.id,
                "type": "function",
                "function": {"name": each.function.name, "arguments": arguments_of(each)},
            }
            for each in message.tool_calls
        ]
    if message.tool_call_id is not None:
        told["tool_call_id"] = message.tool_call_id
    if message.role == "assistant" and isinstance(message.reasoning_content, str):
        told["reasoning_content"] = message.reasoning_content
    return told


def _told(message: ChatMessage) -> dict[str, Any]:
    told = plain_message(message)
    if message.role == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message.text}\n</tool_response>"}
    for call in message.tool_calls or ():
        written = _json({"name": call.function.name, "arguments": arguments_of(call)})
        told["content"] = f"{told['content']}\n<tool_call>\n{written}\n</tool_call>".lstrip("\n")
    return told


def _json(value: Any) -> str:
    if isinstance(value, dict):
        value = {name: each for name, each in value.items() if each is not None}
    return msgspec.json.encode(value).decode()
