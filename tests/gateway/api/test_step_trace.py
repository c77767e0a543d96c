"""``decoding.trace`` over HTTP: told where it was asked for, to whom asked for it, and kept nowhere."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from gateway.interfaces.chat import refuse_trace
from gateway.serving.controller import Controller
from gateway.upstream.payload import what_it_lacks
from gateway.wire.errors import InvalidRequest
from gateway.wire.requests import ChatCompletionRequest, DecodingOptions
from policy.runtime import PolicyRuntime
from tests.support.live_gateway import MODEL, LiveGateway, running_gateway

ASK = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "temperature": 0}
STRICT = b"version: 1\ndefaults:\n  client_override: false\n"


@pytest.fixture(scope="module")
def gateway() -> Iterator[LiveGateway]:
    with running_gateway(controller=Controller(PolicyRuntime.from_text(STRICT))) as live:
        yield live


def ask(gateway: LiveGateway, **more: Any) -> Any:
    response = gateway.http.post("/v1/chat/completions", json={**ASK, **more})
    assert response.status_code == 200, response.text
    return response.json()


def streamed(gateway: LiveGateway, **more: Any) -> list[dict[str, Any]]:
    response = gateway.http.post("/v1/chat/completions", json={**ASK, "stream": True, **more})
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_an_answer_has_a_trace_only_if_asked(gateway: LiveGateway) -> None:
    """Also where the policy leaves requests no choice: a trace chooses nothing."""
    plain, traced = ask(gateway), ask(gateway, decoding={"trace": True}, n=2)
    assert "trace" not in plain["decoding"]
    steps = traced["decoding"]["trace"]
    assert {step["choice"] for step in steps} == {0, 1}
    first = next(step for step in steps if len(step["tokens"]) > 1)
    assert first["tokens"][0]["source"] == "head 1" and first["tokens"][-1]["source"] == "model"
    assert first["tokens"][-1] == {**first["tokens"][-1], "depth": 0, "chance": None}


def test_a_stream_tells_each_step_before_its_text(gateway: LiveGateway) -> None:
    events = streamed(gateway, decoding={"trace": True}, stream_options={"include_usage": True})
    told = [event for event in events if "trace" in event.get("decoding", {})]
    assert told and all(event["choices"] == [] for event in told)
    steps = [step for event in told for step in event["decoding"]["trace"]]
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
    text = ""
    ends = 0
    for event in events:
        if event in told:
            ends = event["decoding"]["trace"][-1]["tokens"][-1]["end"]
        for choice in event["choices"]:
            text += choice["delta"].get("content") or ""
            assert len(text) <= ends
    assert "trace" not in events[-1]["decoding"]
    plain = streamed(gateway)
    assert not any("trace" in event.get("decoding", {}) for event in plain)
    assert text == "".join(choice["delta"].get("content") or "" for event in plain for choice in event["choices"])


def test_no_record_keeps_a_trace(gateway: LiveGateway) -> None:
    answer = ask(gateway, decoding={"trace": True})
    kept = gateway.http.get(f"/admin/decisions/{answer['id']}").json()
    assert kept["outcome"]["steps"] > 0 and "trace" not in kept["outcome"]


def test_decisions_are_listed_newest_first(gateway: LiveGateway) -> None:
    ids = [ask(gateway)["id"] for _ in range(3)]
    listed = gateway.http.get("/admin/decisions?limit=2").json()["decisions"]
    assert [each["request_id"] for each in listed] == [ids[2], ids[1]]
    assert listed[0]["outcome"]["steps"] > 0 and "hi" not in listed[0].values()
    for limit in ("0", "1001", "-1", "many", "²", ""):
        assert gateway.http.get("/admin/decisions", params={"limit": limit}).status_code == 400


def test_what_cannot_tell_a_trace_refuses_it_by_name(gateway: LiveGateway) -> None:
    wish = DecodingOptions(trace=True)
    body = ChatCompletionRequest(model=MODEL, messages=[], decoding=wish)
    for dialect in ("openai", "vllm", "medusa-gateway"):
        assert what_it_lacks(body, dialect) == ("decoding.trace",)
    with pytest.raises(InvalidRequest, match=r"decoding\.trace"):
        refuse_trace(wish)
    asked = {"model": MODEL, "max_tokens": 4, "decoding": {"trace": True}}
    bodies = {
        "/v1/messages": {**asked, "messages": ASK["messages"]},
        "/v1/responses": {"model": MODEL, "input": "hi", "decoding": {"trace": True}},
    }
    for path, sent in bodies.items():
        refused = gateway.http.post(path, json=sent)
        assert refused.status_code == 400 and "decoding.trace" in refused.text
