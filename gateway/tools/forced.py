"""Calls that must come (``tool_choice`` required, or a named function): what the answer has to look like. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from backends.grammar.schema import checked_schema
from backends.grammar.spec import GrammarRefused, GrammarSpec
from gateway.wire.errors import InvalidRequest
from gateway.wire.requests import ChatCompletionRequest
from gateway.wire.tools import NamedTool, Tool

_MAPS = frozenset(("properties", "patternProperties", "$defs", "definitions"))
_VALUES = frozenset(("const", "enum"))
_COMPOSED = frozenset(("patternProperties", "$ref", "allOf", "anyOf", "oneOf"))
"""Where other names may come from."""


def is_forced(body: ChatCompletionRequest) -> bool:
    return body.tool_choice == "required" or isinstance(body.tool_choice, NamedTool)


def forced_call(body: ChatCompletionRequest) -> GrammarSpec | None:
    """One call as JSON, ``{"name": ..., "arguments": {...}}``; None where none is forced.

    Raises :class:`InvalidRequest` for parameters that can't be enforced, naming the tool and the keyword.
    """
    if not is_forced(body):
        return None
    choice = body.tool_choice
    name = choice.function.name if isinstance(choice, NamedTool) else None
    asked = [(i, each) for i, each in enumerate(body.tools or ()) if name in (None, each.function.name)]
    alone = len(asked) == 1
    calls = [_call_schema(each, i, "#" if alone else f"#/anyOf/{place}") for place, (i, each) in enumerate(asked)]
    return GrammarSpec("json", msgspec.json.encode(calls[0] if alone else {"anyOf": calls}).decode(), "tools")


def _call_schema(tool: Tool, index: int, place: str) -> dict[str, Any]:
    """``place``: where this schema will stand, as references name it."""
    return {
        "type": "object",
        "properties": {
            "name": {"const": tool.function.name},
            "arguments": _parameters(tool, f"tools[{index}].function.parameters", f"{place}/properties/arguments"),
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _parameters(tool: Tool, param: str, place: str) -> Mapping[str, Any]:
    if tool.function.parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    try:
        read = checked_schema(msgspec.json.encode(tool.function.parameters).decode(), param)
    except GrammarRefused as error:
        raise InvalidRequest(str(error), param=error.param, code=error.code) from None
    found = {"type": "object", **_moved(msgspec.json.decode(read), place)}
    if "properties" in found and not _COMPOSED & found.keys():
        # As functions take them: a name that isn't listed is none of their arguments.
        found.setdefault("additionalProperties", False)
    return found


def _moved(schema: Any, place: str) -> Any:
    """``schema``, whose references are from its own root, as it is read inside another at ``place``."""
    if isinstance(schema, list):
        return [_moved(each, place) for each in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {}
    for name, value in schema.items():
        if name == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
            moved[name] = place + value[1:]
        elif name in _MAPS and isinstance(value, dict):
            moved[name] = {key: _moved(each, place) for key, each in value.items()}
        else:
            moved[name] = value if name in _VALUES else _moved(value, place)
    return moved
