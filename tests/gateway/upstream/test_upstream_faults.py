"""A remote upstream and its failures, each typed, over real sockets and with the official client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import openai
import pytest

from gateway.admission import Places
from gateway.api.completions import CHAT_BODIES
from gateway.routing.circuit_breaker import BreakerSettings
from gateway.routing.spec import HealthCheck, Placement, Timeouts, UpstreamSpec
from gateway.serving.backend import Backend
from gateway.serving.call import ServedModel
from gateway.serving.targets import Backends, EngineBackend, UpstreamTarget
from gateway.upstream.payload import payload
from tests.support.fakes import FakeDecoder, FakeTokenizer
from tests.support.live_gateway import LiveGateway, running_gateway
from tests.support.scripted_upstream import (
    DONE,
    GOOD,
    HANG,
    MODELS,
    ScriptedUpstream,
    answer,
    event,
    scripted_upstream,
    stream,
)

MODEL = "ours"
HI: list[Any] = [{"role": "user", "content": "hi"}]
SHORT = Timeouts(connect_s=0.5, first_byte_s=0.3, between_bytes_s=0.3, total_s=20.0)
NO_CHECKS = HealthCheck(every_s=3600.0)


def spec(name: str, url: str, **changes: Any) -> UpstreamSpec:
    settings = {"upstream_model": "theirs", "timeouts": SHORT, "health": NO_CHECKS, **changes}
    return UpstreamSpec(name, MODEL, url, **settings)


@pytest.fixture(scope="module")
def first() -> Iterator[ScriptedUpstream]:
    with scripted_upstream() as upstream:
        yield upstream


@pytest.fixture(scope="module")
def second() -> Iterator[ScriptedUpstream]:
    with scripted_upstream() as upstream:
        yield upstream


@pytest.fixture(scope="module")
def backends(first: ScriptedUpstream, second: ScriptedUpstream) -> Backends:
    patient = BreakerSettings(failures=1000)
    dead = "http://127.0.0.1:9/v1"
    made: list[Backend] = [
        UpstreamTarget(spec("first", first.url, breaker=patient)),
        UpstreamTarget(spec("second", second.url, breaker=patient, placement=Placement(priority=1))),
        UpstreamTarget(UpstreamSpec("dead", "nowhere", dead, health=NO_CHECKS, breaker=patient)),
        EngineBackend("engine", ServedModel(FakeDecoder(name="local"), FakeTokenizer()), Places(8)),
    ]
    return Backends(made, frozenset({"local"}))


@pytest.fixture(scope="module")
def gateway(backends: Backends) -> Iterator[LiveGateway]:
    with running_gateway(backends=backends) as live:
        yield live


@pytest.fixture(autouse=True)
def well(first: ScriptedUpstream, second: ScriptedUpstream, backends: Backends) -> None:
    for backend in backends.upstreams:
        backend._busy_until = 0.0
    for each in (first, second):
        each.script = lambda: GOOD
        each.requests.clear()


def both(first: ScriptedUpstream, second: ScriptedUpstream, script: list[bytes]) -> None:
    for each in (first, second):
        each.script = lambda: script


def ask(gateway: LiveGateway, **arguments: Any) -> Any:
    return gateway.client.chat.completions.create(**{"model": MODEL, "messages": HI, **arguments})


def streamed(gateway: LiveGateway, **arguments: Any) -> tuple[str, list[Any]]:
    chunks = list(ask(gateway, stream=True, **arguments))
    return "".join(each.choices[0].delta.content or "" for each in chunks if each.choices), chunks


def test_a_stream_is_passed_on_under_our_name(gateway: LiveGateway, first: ScriptedUpstream) -> None:
    usage = {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    last = b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\r\n\r\n"
    folded = event("lo").replace(b", ", b",\r\ndata: ")
    first.script = lambda: stream(
        b": a comment\n\n" + event("Hel")[:20], event("Hel")[20:] + folded, event(None, "stop"), last, DONE
    )
    text, chunks = streamed(gateway, stream_options={"include_usage": True}, temperature=0, seed=5, user="me")
    assert text == "Hello"
    assert {each.model for each in chunks} == {MODEL}
    assert len({each.id for each in chunks}) == 1
    assert chunks[0].id.startswith("chatcmpl-")
    assert chunks[-1].usage.to_dict() == usage
    decoding = chunks[-1].decoding
    assert (decoding["method"], decoding["backend"], decoding["upstream_model"]) == ("remote", "first", "theirs")
    assert "upstream 'first'" in decoding["reason"]
    assert "priority 0 comes first" in decoding["reason"]
    (body, headers) = first.requests[0]
    assert body == {
        "model": "theirs",
        "messages": HI,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.0,
        "seed": 5,
    }
    assert headers["x-medusa-hops"] == "1"
    assert "authorization" not in headers, "our client's own key is not the upstream's business"
    record = gateway.http.get(f"/admin/decisions/{chunks[0].id}").json()
    assert record["outcome"]["backend"] == "first"


def test_usage_so_far_is_passed_on(gateway: LiveGateway, first: ScriptedUpstream) -> None:
    def counted(tokens: int, content: str | None, finish: str | None = None) -> bytes:
        usage = {"prompt_tokens": 3, "completion_tokens": tokens, "total_tokens": 3 + tokens}
        return event(content, finish, usage=usage)

    first.script = lambda: stream(event("Hel"), counted(2, "lo"), counted(3, None, "stop"), DONE)
    options: Any = {"continuous_usage_stats": True}
    _, chunks = streamed(gateway, stream_options=options)
    assert [each.usage and each.usage.completion_tokens for each in chunks] == [None, 2, 3]
    assert first.requests[0][0]["stream_options"] == {"include_usage": True}, "OpenAI's own refuse what they don't know"
    body = CHAT_BODIES.decode(
        json.dumps({"model": MODEL, "messages": HI, "stream": True, "stream_options": options}).encode()
    )
    assert payload(body, HI, "vllm", "theirs", None)[1]["stream_options"] == {"include_usage": True, **options}


@pytest.mark.parametrize("added", [{"reasoning_content": "hm"}, {"refusal": "I can not"}, {"annotations": [{"a": 1}]}])
def test_what_an_upstream_adds_to_a_message_is_taken_back(
    gateway: LiveGateway, first: ScriptedUpstream, added: dict[str, Any]
) -> None:
    choice = {"index": 0, "delta": {"role": "assistant", **added, "of_its_own": 1}, "finish_reason": None}
    piece = b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"
    first.script = lambda: stream(piece, event("hello"), event(None, "stop"), DONE)
    message = ask(gateway).choices[0].message
    assert message.to_dict().items() >= added.items()
    for said in (message, message.model_dump()):
        assert ask(gateway, messages=[*HI, said, *HI]).choices[0].message.content == "hello"
    assert first.requests[-1][0]["messages"][1] == {"role": "assistant", "content": "hello"}


def test_a_whole_answer_is_gathered_from_the_stream(gateway: LiveGateway, first: ScriptedUpstream) -> None:
    def with_logprobs(text: str, finish: str | None) -> bytes:
        entry = {"token": text, "logprob": -1.0, "bytes": None, "top_logprobs": []}
        choice = {"index": 0, "delta": {"role": "assistant", "content": text}, "logprobs": {"content": [entry]}}
        return b"data: " + json.dumps({"choices": [{**choice, "finish_reason": finish}]}).encode() + b"\n\n"

    usage = b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":2,"total_tokens":3}}\n\n'
    first.script = lambda: stream(with_logprobs("Hel", None), with_logprobs("lo", "length"), usage, DONE)
    answered = ask(gateway, logprobs=True)
    assert answered.choices[0].message.content == "Hello"
    assert answered.choices[0].message.role == "assistant"
    assert answered.choices[0].finish_reason == "length"
    assert [each.token for each in answered.choices[0].logprobs.content] == ["Hel", "lo"]
    assert answered.usage.total_tokens == 3
    assert answered.decoding["method"] == "remote"


def test_text_completions(gateway: LiveGateway, first: ScriptedUpstream) -> None:
    piece = b'data: {"choices":[{"index":%d,"text":"%b","finish_reason":%b}]}\n\n'
    parts = [piece % (0, b"a", b"null"), piece % (1, b"x", b'"stop"'), piece % (0, b"b", b'"length"'), DONE]
    first.script = lambda: stream(*parts)
    answered = gateway.client.completions.create(model=MODEL, prompt=["p", "q"], max_tokens=2)
    assert [(each.text, each.finish_reason) for each in answered.choices] == [("ab", "length"), ("x", "stop")]
    assert first.requests[0][0]["prompt"] == ["p", "q"]
    assert answered.usage is None, "what the upstream did not count is not made up"


@pytest.mark.parametrize(
    "script",
    [
        answer(429, b'{"error":{"message":"slow down"}}', extra="retry-after: 7\r\n"),
        answer(500, b"oops", "text/plain"),
        answer(503, b""),
        answer(401, b'{"error":{"message":"bad key sk-123"}}'),
        answer(404, b'{"detail":"Not Found"}'),
        answer(200, b"<html>", "text/html"),
        stream(b"data: not json\n\n"),
        stream(b'data: {"error":{"message":"cuda out of memory","type":"x"}}\n\n'),
        stream(DONE),
        stream(),
        stream(HANG),
        [HANG],
        [],
    ],
    ids=["429", "500", "503", "401", "404", "html", "junk", "error", "done", "nothing", "silent", "hangs", "closes"],
)
@pytest.mark.parametrize("streaming", [True, False], ids=["streamed", "whole"])
def test_a_failure_before_the_first_byte_goes_elsewhere(
    gateway: LiveGateway, first: ScriptedUpstream, script: list[bytes], streaming: bool
) -> None:
    first.script = lambda: script
    if streaming:
        text, chunks = streamed(gateway)
        decoding = next(each.decoding for each in chunks if getattr(each, "decoding", None))
    else:
        answered = ask(gateway)
        text, decoding = answered.choices[0].message.content, answered.decoding
    assert text == "Hello"
    assert decoding["backend"] == "second"
    assert "first failed on this request" in decoding["reason"]


@pytest.mark.parametrize(
    ("script", "status", "code"),
    [
        (answer(500, b"oops"), 502, "upstream_error"),
        (answer(503, b""), 503, "upstream_unavailable"),
        (answer(429, b"", extra="retry-after: 7\r\n"), 429, "upstream_busy"),
        ([HANG], 504, "upstream_timeout"),
        (stream(DONE), 502, "upstream_error"),
    ],
    ids=["500", "503", "429", "hangs", "empty"],
)
def test_when_all_fail_the_last_failure_is_told(
    gateway: LiveGateway, first: ScriptedUpstream, second: ScriptedUpstream, script: list[bytes], status: int, code: str
) -> None:
    both(first, second, script)
    with pytest.raises(openai.APIStatusError) as caught:
        ask(gateway, stream=True)
    assert (caught.value.status_code, caught.value.code) == (status, code)
    assert "'second'" in str(caught.value) or "'first'" in str(caught.value)
    if status == 429:
        assert caught.value.response.headers["retry-after"] == "7"
        # Both are believed to be busy for as long as they said; the next one goes all the same, as there is no other.
        both(first, second, GOOD)
        assert streamed(gateway)[0] == "Hello"


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_refusal_of_the_request_is_passed_on_and_tried_nowhere_else(
    gateway: LiveGateway, first: ScriptedUpstream, second: ScriptedUpstream, status: int
) -> None:
    body = b'{"error":{"message":"context is 8 tokens","param":"messages","code":"context_length_exceeded"}}'
    both(first, second, answer(status, body))
    with pytest.raises(openai.APIStatusError) as caught:
        ask(gateway)
    assert (caught.value.status_code, caught.value.code) == (status, "context_length_exceeded")
    assert "context is 8 tokens" in str(caught.value)
    assert len(first.requests) + len(second.requests) == 1


def test_no_secret_of_the_upstream_reaches_a_client(gateway: LiveGateway, first: ScriptedUpstream,
                                                    second: ScriptedUpstream) -> None:  # fmt: skip
    both(first, second, answer(401, b'{"error":{"message":"bad key sk-123"}}'))
    with pytest.raises(openai.APIStatusError) as caught:
        ask(gateway)
    assert "sk-123" not in str(caught.value)
    assert "credentials" in str(caught.value)


@pytest.mark.parametrize(
    ("script", "code"),
    [
        (stream(event("Hel"), ended=False), "upstream_error"),
        (stream(event("Hel")), "upstream_error"),
        (stream(event("Hel"), DONE), "upstream_error"),
        (stream(event("Hel"), HANG), "upstream_timeout"),
        (stream(event("Hel"), b'data: {"error":{"message":"gpu lost"}}\n\n'), "upstream_error"),
        (stream(event("Hel"), b"data: {]\n\n"), "upstream_error"),
    ],
    ids=["cut", "ended", "done too soon", "hangs", "error event", "junk"],
)
def test_a_failure_after_the_first_byte_is_an_error_event(
    gateway: LiveGateway, first: ScriptedUpstream, script: list[bytes], code: str
) -> None:
    first.script = lambda: script
    seen = []
    with pytest.raises(openai.APIError) as caught:
        seen.extend(chunk.choices[0].delta.content for chunk in ask(gateway, stream=True))
    assert seen == ["Hel"]
    assert caught.value.code == code
    assert "first" in str(caught.value)
    raw = gateway.http.post("/v1/chat/completions", json={"model": MODEL, "messages": HI, "stream": True}).text
    assert raw.endswith("data: [DONE]\n\n")
    # Not streamed, nothing has been sent to the client yet: another backend may still answer.
    assert ask(gateway).choices[0].message.content == "Hello"


def test_a_client_that_leaves_is_felt_upstream(gateway: LiveGateway, first: ScriptedUpstream) -> None:
    first.script = lambda: stream(event("Hel"), HANG)
    with ask(gateway, stream=True) as answered:
        next(iter(answered))
    first.wait_left()
    first.script = lambda: [HANG]
    with pytest.raises(httpx.ReadTimeout):
        body = {"model": MODEL, "messages": HI}
        httpx.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=httpx.Timeout(5, read=0.1))
    first.wait_left()
    gateway.wait_idle()


def test_a_deadline_cuts_the_answer_and_says_so(gateway: LiveGateway, first: ScriptedUpstream) -> None:
    first.script = lambda: stream(event("Hel"), HANG)
    text, chunks = streamed(gateway, extra_body={"decoding": {"deadline_ms": 100}})
    assert text == "Hel"
    assert chunks[-1].choices[0].finish_reason == "length"
    assert "cut at its deadline" in chunks[-1].decoding["reason"]
    answered = ask(gateway, extra_body={"decoding": {"deadline_ms": 100}})
    assert (answered.choices[0].message.content, answered.choices[0].finish_reason) == ("Hel", "length")
    first.wait_left()


def test_what_an_upstream_cannot_do_is_refused_by_name(gateway: LiveGateway, first: ScriptedUpstream) -> None:
    for extra, param in (
        ({"decoding": {"method": "vanilla"}}, "decoding.method"),
        ({"decoding": {"tree": "2x2"}}, "decoding.tree"),
        ({"decoding": {"acceptance": "exact"}}, "decoding.acceptance"),
        ({"top_k": 3}, "top_k"),
        ({"min_tokens": 3}, "min_tokens"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(gateway, extra_body=extra)
        assert (caught.value.param, caught.value.code) == (param, "unsupported_parameter")
    assert not first.requests
    ask(gateway, extra_body={"top_k": 0, "min_tokens": 0, "decoding": {"class": "code"}})
    assert "top_k" not in first.requests[0][0]


def test_an_upstream_that_is_not_there_hurts_nobody_else(gateway: LiveGateway) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        ask(gateway, model="nowhere")
    assert (caught.value.status_code, caught.value.code) == (503, "upstream_unavailable")
    assert ask(gateway, model="local").decoding["method"] == "medusa"
    assert gateway.http.get("/readyz").status_code == 200


def test_models_and_backends_are_listed(gateway: LiveGateway) -> None:
    models = {each.id: each.to_dict() for each in gateway.client.models.list()}
    assert set(models) == {MODEL, "nowhere", "local"}
    with pytest.raises(openai.NotFoundError) as caught:
        ask(gateway, model="theirs")
    assert caught.value.code == "model_not_found"
    shown = gateway.http.get("/admin/backends").json()
    by_name = {each["name"]: each for each in shown["backends"]}
    assert list(by_name) == ["first", "second", "dead", "engine"]
    assert by_name["dead"]["counts"]["upstream_unavailable"] >= 1
    assert "ConnectError" in by_name["dead"]["last_error"]
    assert shown["required"] == ["local"]
    assert all(each["in_flight"] == 0 for each in shown["backends"])


def test_explain_names_the_candidates(gateway: LiveGateway) -> None:
    told = gateway.http.post("/v1/decoding/explain", json={"model": MODEL, "messages": HI}).json()
    assert told["routing"]["backend"] == "first"
    assert [each["backend"] for each in told["routing"]["candidates"]] == ["first", "second"]
    assert told["plan"]["method"] == "remote"
    local = gateway.http.post("/v1/decoding/explain", json={"model": "local", "messages": HI}).json()
    assert local["routing"] == {
        "backend": "engine",
        "reason": "the model's only backend",
        "candidates": [{"backend": "engine", "reason": "load 0.00"}],
    }


def test_two_gateways_that_name_each_other_let_go(gateway: LiveGateway, first: ScriptedUpstream) -> None:
    body = {"model": MODEL, "messages": HI}
    refused = gateway.http.post("/v1/chat/completions", json=body, headers={"x-medusa-hops": "4"})
    assert refused.status_code == 400
    assert "one gateway too many" in refused.json()["error"]["message"]
    assert gateway.http.post("/v1/chat/completions", json=body, headers={"x-medusa-hops": "junk"}).status_code == 200


def test_breaker_health_and_key(tmp_path: Any, first: ScriptedUpstream) -> None:
    """Opened by failures and closed by an answer; unhealthy by checks, and well again by one; the key is rotated."""
    key = tmp_path / "key"
    key.write_text("secret-1\n")
    checks = HealthCheck(every_s=0.02, failures=1)
    backend = UpstreamTarget(
        spec("only", first.url, api_key_file=str(key), health=checks, breaker=BreakerSettings(2, open_s=0.2))
    )
    with ExitStack() as stack:
        live = stack.enter_context(running_gateway(backends=Backends([backend], frozenset({MODEL}))))
        first.script = lambda: answer(500, b"")
        for _ in range(2):
            with pytest.raises(openai.InternalServerError):
                ask(live)
        assert backend.breaker.tripped
        with pytest.raises(openai.InternalServerError) as caught:
            ask(live)
        assert (caught.value.status_code, caught.value.code) == (503, "upstream_unavailable")
        assert "circuit open" in str(caught.value)
        assert live.http.get("/readyz").status_code == 503
        assert len(first.requests) == 2, "an open circuit asks nobody"
        first.script = lambda: GOOD
        until(lambda: backend.healthy)
        assert streamed(live)[0] == "Hello"
        assert not backend.breaker.tripped
        assert first.requests[-1][1]["authorization"] == "Bearer secret-1"
        key.write_text("secret-2\n")
        until(lambda: backend.headers() == {"authorization": "Bearer secret-2"})
        assert live.client.models.list().data[0].to_dict()["max_model_len"] == 77
        first.health = lambda: answer(200, MODELS.replace(b"theirs", b"others"))
        until(lambda: not backend.healthy)
        assert "does not serve 'theirs'; it serves others" in (backend.health.error or "")
        assert "secret" not in json.dumps(live.http.get("/admin/backends").json())
        first.health = lambda: answer(200, MODELS)
        until(lambda: backend.healthy)
        kinds = [each["kind"] for each in live.http.get("/admin/stats").json()["events"]]
        assert [each for each in kinds if each.startswith("backend")] == ["backend_down", "backend_up"] * 2


def until(condition: Any) -> None:
    """For what a background task does in its own time."""
    import time

    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
