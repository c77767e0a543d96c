"""Structured output over HTTP, on a real engine of the tiny model; and what upstreams of each dialect are sent."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from llguidance import LLParserLimits

from backends.engine.loading import EngineOptions, OpenedEngine, open_engine
from backends.models.tiny import TINY_MODEL_NAME
from gateway.api.completions import chat_call, completion_call
from gateway.routing.spec import Dialect
from gateway.serving.call import ServedModel
from gateway.serving.targets import Backends
from gateway.upstream.payload import payload, what_it_lacks
from tests.support.live_gateway import LiveGateway, running_gateway

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["red", "green"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "n"],
    "additionalProperties": False,
}
HELLO = {"messages": [{"role": "user", "content": "hi"}]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}


@pytest.fixture(scope="module")
def engine() -> Iterator[OpenedEngine]:
    opened = open_engine(EngineOptions(model=TINY_MODEL_NAME, dtype="float32", threads=1))
    yield opened
    opened.decoder.close()


@pytest.fixture(scope="module")
def gateway(engine: OpenedEngine) -> Iterator[LiveGateway]:
    served = ServedModel(engine.decoder, engine.tokenizer, engine.grammars)
    with running_gateway(backends=Backends.of_engines({TINY_MODEL_NAME: served}, 8)) as live:
        yield live


def ask(gateway: LiveGateway, path: str = CHAT, **fields: Any) -> Any:
    prompt = {"prompt": "hi"} if path == TEXT else {"messages": [{"role": "user", "content": "hi"}]}
    body = {"model": TINY_MODEL_NAME, "max_tokens": 80, "seed": 5, **prompt, **fields}
    response = gateway.http.post(path, json=body)
    return response.json() if response.status_code == 200 else response.json()["error"]


def content(choice: Any) -> str:
    return choice["message"]["content"] if "message" in choice else choice["text"]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    ("fields", "fits"),
    [
        ({"response_format": FORMAT}, r'\{"kind":"(red|green)","n":\d{1,2}\}'),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, r'\{"kind":"(red|green)","n":\d{1,2}\}'),
        ({"structured_outputs": {"json": SCHEMA}}, r'\{"kind":"(red|green)","n":\d{1,2}\}'),
        ({"structured_outputs": {"choice": ["a", "b"], "disable_fallback": True}}, "a|b"),
        ({"guided_json": json.dumps(SCHEMA)}, r'\{"kind":"(red|green)","n":\d{1,2}\}'),
        ({"json_schema": SCHEMA}, r'\{"kind":"(red|green)","n":\d{1,2}\}'),
        ({"guided_regex": "[a-c]{3}x"}, "[a-c]{3}x"),
        ({"regex": "(ab){2,4}"}, "(ab){2,4}"),
        ({"guided_choice": ["yes", "no", "é"]}, "yes|no|é"),
        ({"guided_grammar": 'start: "x" /[0-9]{2}/'}, r"x\d\d"),
        ({"ebnf": 'root ::= "p" | "q"'}, "p|q"),
        ({"grammar": "root ::= [a-b] [c-d]"}, "[ab][cd]"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_every_way_of_asking(gateway: LiveGateway, path: str, fields: dict[str, Any], fits: str) -> None:
    answer = ask(gateway, path, n=2, temperature=1.2, **fields)
    for choice in answer["choices"]:
        assert re.fullmatch(fits, content(choice)), content(choice)
        assert choice["finish_reason"] == "stop"


def test_the_same_with_speculation_and_without_log_probabilities_too(gateway: LiveGateway) -> None:
    answers = [
        ask(
            gateway,
            response_format=FORMAT,
            temperature=temperature,
            logprobs=True,
            top_logprobs=2,
            decoding={"method": method},
        )
        for temperature in (0, 1.0)
        for method in ("medusa", "vanilla")
    ]
    for medusa, vanilla in zip(answers[::2], answers[1::2], strict=True):
        assert medusa["choices"] == vanilla["choices"]
        assert medusa["usage"] == vanilla["usage"]
        assert medusa["decoding"]["accepted_grammar_tokens"] > 5
        assert vanilla["decoding"]["drafted_grammar_tokens"] == 0


def test_a_stream_says_the_same(gateway: LiveGateway) -> None:
    whole = ask(gateway, response_format=FORMAT)
    stream = gateway.http.post(
        CHAT,
        json={
            "model": TINY_MODEL_NAME,
            "messages": [{"role": "user", "content": "hi"}],
            "seed": 5,
            "stream": True,
            "max_tokens": 80,
            "response_format": FORMAT,
        },
    )
    events = [json.loads(line[6:]) for line in stream.text.splitlines() if line.startswith("data: {")]
    text = "".join(each["choices"][0]["delta"].get("content") or "" for each in events if each["choices"])
    assert text == whole["choices"][0]["message"]["content"]


def test_max_tokens_cuts_and_says_so(gateway: LiveGateway) -> None:
    choice = ask(gateway, response_format=FORMAT, max_tokens=4)["choices"][0]
    assert choice["finish_reason"] == "length"
    assert content(choice) == '{"ki'


def test_stop_strings_cut_a_choice_but_no_document(gateway: LiveGateway) -> None:
    document = ask(gateway, response_format=FORMAT, stop=["kind", "n", "}"])["choices"][0]
    assert json.loads(content(document))["kind"] in ("red", "green")
    cut = ask(gateway, guided_choice=["one,two"], stop=[","])["choices"][0]
    assert (content(cut), cut["finish_reason"]) == ("one", "stop")


def test_an_answer_whose_grammar_asks_for_too_much_ends_alone(
    gateway: LiveGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = LLParserLimits(max_lexer_states=50, verbose_errors=False)
    monkeypatch.setattr("backends.grammar.compiler._limits", lambda: few)
    asked = {"guided_regex": "[a-z]{100,300}X", "max_tokens": 150}
    refused = ask(gateway, **asked)
    assert refused["code"] == "grammar_failed", refused
    assert "No answer: the grammar asks for more work" in refused["message"]
    texts = []
    for method in ("medusa", "vanilla"):
        body = {"model": TINY_MODEL_NAME, **HELLO, "stream": True, "seed": 5, "decoding": {"method": method}, **asked}
        lines = gateway.http.post(CHAT, json=body).text.splitlines()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert events[-1]["error"]["code"] == "grammar_failed"
        texts.append("".join(each["choices"][0]["delta"].get("content") or "" for each in events[:-1]))
    # By speculation and without, it has come as far.
    assert 20 < len(texts[0]) < 100
    assert texts[0] == texts[1]
    monkeypatch.undo()
    assert ask(gateway, response_format=FORMAT)["choices"][0]["finish_reason"] == "stop"


def test_an_end_that_is_forbidden_is_said_to_be_so(gateway: LiveGateway) -> None:
    refused = ask(gateway, guided_choice=[""], min_tokens=3)
    assert refused["code"] == "grammar_failed"
    assert "nothing that the model could say next fits the grammar" in refused["message"]
    # A complete answer ends, whatever min_tokens says.
    assert content(ask(gateway, guided_choice=["ab"], min_tokens=30)["choices"][0]) == "ab"


def test_explain_refuses_what_the_routes_refuse(gateway: LiveGateway) -> None:
    body = {"model": TINY_MODEL_NAME, "messages": [{"role": "user", "content": "hi"}]}
    for fields, status in (({"response_format": FORMAT}, 200), ({"guided_json": {"if": {}}}, 400)):
        assert gateway.http.post("/v1/decoding/explain", json=body | fields).status_code == status


BODY = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
STRUCTURED = {"structured_outputs": {"regex": "a"}}


@pytest.mark.parametrize(
    ("dialect", "fields", "lacks", "sent"),
    [
        ("openai", {"response_format": FORMAT}, (), {"response_format": FORMAT}),
        ("openai", {"response_format": {"type": "text"}}, (), {}),
        (
            "openai",
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            (),
            {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}},
        ),
        ("openai", STRUCTURED, ("structured_outputs",), None),
        ("openai", {"guided_choice": ["a"]}, ("guided_choice",), None),
        ("openai", {"grammar": ""}, (), {}),
        ("vllm", STRUCTURED, (), STRUCTURED),
        ("vllm", {"guided_json": SCHEMA}, (), {"guided_json": SCHEMA}),
        ("vllm", {"grammar": 'root ::= "a"'}, ("grammar",), None),
        ("medusa-gateway", {"grammar": 'root ::= "a"'}, (), {"grammar": 'root ::= "a"'}),
        ("medusa-gateway", {"regex": "a"}, (), {"regex": "a"}),
    ],
)
def test_what_an_upstream_is_sent(
    dialect: Dialect, fields: dict[str, Any], lacks: tuple[str, ...], sent: dict[str, Any] | None
) -> None:
    body = chat_call(json.dumps(BODY | fields).encode()).body
    assert what_it_lacks(body, dialect) == lacks
    if sent is not None:
        _, found = payload(body, [], dialect, "m", None)
        names = set(found) - {"model", "stream", "stream_options", "messages"}
        assert {name: found[name] for name in names} == sent


def test_openai_has_no_response_format_for_text() -> None:
    body = completion_call(json.dumps({"model": "m", "prompt": "x", "response_format": FORMAT}).encode()).body
    assert what_it_lacks(body, "openai") == ("response_format",)
    assert what_it_lacks(body, "vllm") == ()
