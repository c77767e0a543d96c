"""Forced calls: the grammar lets through what is a call of a tool that was offered, and nothing else."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from gateway.tools.forced import forced_call
from gateway.wire.requests import ChatCompletionRequest
from tests.support.grammars import accepts, tiny_grammars

PLACE = {"$defs": {"place": {"enum": ["hall", "yard"]}}, "properties": {"at": {"$ref": "#/$defs/place"}}}
TREE = {"properties": {"more": {"type": "array", "items": {"$ref": "#"}}}, "additionalProperties": False}
TOOLS: dict[str, Any] = {"look": {**PLACE, "required": ["at"]}, "grow": TREE, "wait": None, "any": {}}


def grammar(choice: Any, *names: str) -> Any:
    functions = ({"name": name, "parameters": TOOLS[name]} for name in names)
    tools = [{"type": "function", "function": each} for each in functions]
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": tools, "tool_choice": choice}
    spec = forced_call(msgspec.convert(body, ChatCompletionRequest))
    assert spec is not None
    return tiny_grammars().open(spec)


def call(name: str, arguments: Any) -> str:
    return json.dumps({"name": name, "arguments": arguments}, separators=(",", ":"))


@pytest.mark.parametrize(
    ("name", "arguments", "fits"),
    [
        ("look", {"at": "hall"}, True),
        ("look", {"at": "sea"}, False),
        ("look", {}, False),
        ("look", {"at": "hall", "by": 1}, False),
        ("grow", {"more": [{"more": []}, {}]}, True),
        ("grow", {"more": [{"less": 1}]}, False),
        ("wait", {}, True),
        ("wait", {"a": 1}, False),
        ("any", {"a": [1]}, True),
        ("any", [], False),
        ("none", {}, False),
    ],
)
def test_only_calls_of_tools_pass(name: str, arguments: Any, fits: bool) -> None:
    assert accepts(grammar("required", *TOOLS), call(name, arguments)) == fits
    if name in TOOLS:
        chosen = {"type": "function", "function": {"name": name}}
        assert accepts(grammar(chosen, *TOOLS), call(name, arguments)) == fits
        other = {"type": "function", "function": {"name": next(each for each in TOOLS if each != name)}}
        assert not accepts(grammar(other, *TOOLS), call(name, arguments))
