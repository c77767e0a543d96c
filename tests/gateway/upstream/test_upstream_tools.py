"""Tools and their calls on the way to an upstream and back, streamed and gathered."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.routing.spec import HealthCheck, UpstreamSpec
from gateway.serving.targets import Backends, UpstreamTarget
from tests.support.live_gateway import running_gateway
from tests.support.scripted_upstream import DONE, ScriptedUpstream, scripted_upstream, stream

TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}, "strict": True}}
CALL: Any = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"at":1}'}}
CHOICE: Any = {"type": "function", "function": {"name": "look"}}
HISTORY: list[Any] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "a hall"},
]


def delta(finish: str | None = None, **fields: Any) -> bytes:
    choice = {"index": 0, "delta": fields, "finish_reason": finish}
    return b"data: " + json.dumps({"id": "x", "model": "theirs", "choices": [choice]}).encode() + b"\n\n"


def part(index: int, arguments: str, **begins: Any) -> dict[str, Any]:
    function = {"arguments": arguments, **({"name": begins.pop("name")} if begins else {})}
    return {"index": index, "function": function, **begins}


def begun(index: int, name: str) -> dict[str, Any]:
    return part(index, "", id=f"call_{index}", type="function", name=name)


CALLS = stream(
    delta(role="assistant", content=None),
    delta(reasoning_content="hm"),
    delta(tool_calls=[begun(0, "look")]),
    delta(tool_calls=[part(0, '{"at"')]),
    delta(tool_calls=[part(0, ":1}"), begun(1, "see")]),
    delta(tool_calls=[part(1, "{}")]),
    delta("tool_calls"),
    DONE,
)


def target(upstream: ScriptedUpstream, dialect: Any = "openai") -> UpstreamTarget:
    health = HealthCheck(every_s=60.0)
    return UpstreamTarget(
        UpstreamSpec("there", "ours", f"{upstream.url}/v1", dialect=dialect, upstream_model="theirs", health=health)
    )


@pytest.mark.parametrize("streamed", [False, True])
def test_tools_go_there_and_calls_come_back(streamed: bool) -> None:
    with scripted_upstream() as upstream:
        upstream.script = lambda: CALLS
        with running_gateway(backends=Backends([target(upstream)], frozenset())) as live:
            asked: dict[str, Any] = {
                "model": "ours",
                "messages": HISTORY,
                "tools": [TOOL],
                "tool_choice": CHOICE,
                "parallel_tool_calls": False,
                "reasoning_effort": "low",
            }
            if streamed:
                with live.client.chat.completions.stream(**asked) as events:
                    choice: Any = events.get_final_completion().choices[0]
            else:
                choice = live.client.chat.completions.create(**asked).choices[0]
        sent = upstream.requests[-1][0]
    for name in ("messages", "tools", "tool_choice", "parallel_tool_calls", "reasoning_effort"):
        assert sent[name] == asked[name]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.reasoning_content == "hm"
    assert [
        (each.id, each.type, each.function.name, each.function.arguments) for each in choice.message.tool_calls
    ] == [
        ("call_0", "function", "look", '{"at":1}'),
        ("call_1", "function", "see", "{}"),
    ]


def test_calls_that_make_no_sense_are_no_failure() -> None:
    with scripted_upstream() as upstream:
        upstream.script = lambda: stream(
            delta(tool_calls=[5, {"index": [], "id": "a", "function": 7}]), delta("tool_calls"), DONE
        )
        with running_gateway(backends=Backends([target(upstream)], frozenset())) as live:
            asked = {"model": "ours", "messages": HISTORY}
            answer = live.http.post("/v1/chat/completions", json=asked).json()
    assert answer["choices"][0]["message"]["tool_calls"][0]["id"] == "a"


@pytest.mark.parametrize(("dialect", "passes"), [("openai", False), ("vllm", True), ("medusa-gateway", True)])
def test_fields_of_templates_go_to_servers_that_have_them(dialect: str, passes: bool) -> None:
    fields: dict[str, Any] = {
        "messages": [*HISTORY[:1], {"role": "assistant", "content": "so"}],
        "chat_template_kwargs": {"enable_thinking": False},
        "continue_final_message": True,
        "add_generation_prompt": False,
    }
    with scripted_upstream() as upstream:
        with running_gateway(backends=Backends([target(upstream, dialect)], frozenset())) as live:
            response = live.http.post("/v1/chat/completions", json={"model": "ours", **fields})
        assert (response.status_code == 200) == passes, response.text
        if passes:
            sent = upstream.requests[-1][0]
            assert {name: sent[name] for name in fields} == fields
        else:
            assert "chat_template_kwargs" in response.json()["error"]["message"]
