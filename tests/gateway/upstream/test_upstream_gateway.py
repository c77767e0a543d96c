"""A second gateway, in a process of its own, as an upstream of this one: streamed, and killed, stopped and refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from gateway.admission import Places
from gateway.routing.circuit_breaker import BreakerSettings
from gateway.routing.spec import HealthCheck, Placement, Timeouts, UpstreamSpec
from gateway.serving.call import ServedModel
from gateway.serving.targets import Backends, EngineBackend, UpstreamTarget
from tests.support.fakes import FakeDecoder, FakeTokenizer
from tests.support.live_gateway import LiveGateway, running_gateway
from tests.support.upstream_process import UpstreamProcess

MODEL = "fake-model"
HI: list[Any] = [{"role": "user", "content": "hi"}]
REQUEST: dict[str, Any] = {"model": MODEL, "messages": HI, "temperature": 0.7, "seed": 4, "max_tokens": 60}


@pytest.fixture(scope="module")
def upstream() -> Iterator[UpstreamProcess]:
    process = UpstreamProcess()
    yield process
    process.kill()


def remote(upstream: UpstreamProcess, **changes: Any) -> UpstreamTarget:
    settings = {
        "dialect": "medusa-gateway",
        "upstream_model": MODEL,
        "timeouts": Timeouts(connect_s=1.0, first_byte_s=5.0, between_bytes_s=5.0),
        "health": HealthCheck(every_s=0.05, timeout_s=10.0, failures=2),
        **changes,
    }
    return UpstreamTarget(UpstreamSpec("there", MODEL, f"{upstream.url}/v1", **settings))


@pytest.fixture
def gateway(upstream: UpstreamProcess) -> Iterator[LiveGateway]:
    upstream.order("fail")
    upstream.order("release")
    with running_gateway(backends=Backends([remote(upstream)], frozenset())) as live:
        yield live


@pytest.fixture(scope="module")
def direct(upstream: UpstreamProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{upstream.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"logprobs": True, "top_logprobs": 2},
        {"n": 3},
        {"stop": ["fox"], "extra_body": {"min_tokens": 3, "decoding": {"method": "vanilla"}}},
    ],
    ids=["plain", "logprobs", "three choices", "extensions"],
)
def test_the_answer_is_the_upstreams_own(
    gateway: LiveGateway, direct: openai.OpenAI, arguments: dict[str, Any]
) -> None:
    ours, theirs = (client.chat.completions.create(**REQUEST, **arguments) for client in (gateway.client, direct))
    assert [each.model_dump() for each in ours.choices] == [each.model_dump() for each in theirs.choices]
    assert ours.usage == theirs.usage
    assert ours.decoding["method"] == "remote"
    assert ours.decoding["backend"] == "there"
    assert ours.decoding["upstream"]["method"] == theirs.decoding["method"]
    streamed = gateway.client.chat.completions.create(
        **REQUEST, **arguments, stream=True, stream_options={"include_usage": True}
    )
    texts: dict[int, str] = {}
    chunks = list(streamed)
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
    assert texts == {each.index: each.message.content for each in theirs.choices}
    assert chunks[-1].usage == theirs.usage
    assert chunks[-1].decoding["upstream"]["rule"] == theirs.decoding["rule"]
    # Without usage for the client, too: what the upstream says comes after the last word.
    *_, last = gateway.client.chat.completions.create(**REQUEST, **arguments, stream=True)
    assert last.choices[0].finish_reason is not None
    assert last.decoding["upstream"]["rule"] == theirs.decoding["rule"]


def test_text_completions_are_the_upstreams_own(gateway: LiveGateway, direct: openai.OpenAI) -> None:
    request: dict[str, Any] = {"model": MODEL, "prompt": ["one", "two"], "max_tokens": 9, "seed": 1, "logprobs": 1}
    ours, theirs = (client.completions.create(**request) for client in (gateway.client, direct))
    assert [each.model_dump() for each in ours.choices] == [each.model_dump() for each in theirs.choices]
    ids = gateway.client.completions.create(model=MODEL, prompt=[104, 105], max_tokens=5, temperature=0)
    assert (
        ids.choices[0].text
        == direct.completions.create(model=MODEL, prompt="hi", max_tokens=5, temperature=0).choices[0].text
    )


def test_a_client_that_leaves_frees_the_upstreams_engine(gateway: LiveGateway, upstream: UpstreamProcess) -> None:
    upstream.order("hold 2")
    with gateway.client.chat.completions.create(**REQUEST, stream=True) as stream:
        assert next(iter(stream)).choices
    upstream.aborted()
    gateway.wait_idle()


def test_its_engine_fails_half_way(gateway: LiveGateway, upstream: UpstreamProcess) -> None:
    upstream.order("fail 2")
    with pytest.raises(openai.APIError) as caught:
        list(gateway.client.chat.completions.create(**REQUEST, stream=True))
    assert caught.value.code == "upstream_error"
    assert "The backend 'there' ended the answer with an error." in str(caught.value)
    shown = gateway.http.get("/admin/backends").json()["backends"][0]
    assert "the engine failed" in shown["last_error"], "its words are for the operator"


def test_it_is_killed_in_mid_stream_and_comes_back() -> None:
    """The stream ends with a typed error, another backend takes over, and the first comes back by its checks."""
    process = UpstreamProcess()
    local = FakeDecoder(name=MODEL, natural_length=120)
    backends = Backends(
        [
            remote(process, placement=Placement(priority=0), breaker=BreakerSettings(failures=1, open_s=0.1)),
            EngineBackend("here", ServedModel(local, FakeTokenizer()), Places(8), Placement(priority=1)),
        ],
        frozenset({MODEL}),
    )
    with running_gateway(backends=backends, decoder=local) as live:
        expected = live.client.chat.completions.create(**REQUEST)
        assert expected.decoding["backend"] == "there"
        process.order("hold 2")
        seen: list[str] = []
        with pytest.raises(openai.APIError) as caught:
            for chunk in live.client.chat.completions.create(**REQUEST, stream=True):
                seen.append(chunk.choices[0].delta.content or "")
                if len(seen) == 2:
                    process.kill()
        assert caught.value.code == "upstream_error"
        assert "'there' broke the connection" in str(caught.value)
        whole = expected.choices[0].message.content
        assert 0 < len("".join(seen)) < len(whole)
        assert whole.startswith("".join(seen)), "what did come was right"
        # A dead backend hurts nobody else, whether its circuit is open already or a request finds out.
        for _ in range(3):
            answered = live.client.chat.completions.create(**REQUEST)
            assert answered.choices[0].message.content == whole
            assert answered.decoding["method"] == "medusa"
            assert "backend here: " in answered.decoding["reason"]
        assert live.http.get("/readyz").status_code == 200
        again = UpstreamProcess(process.port)
        try:
            until_backend_is(live, healthy=True)
            assert live.client.chat.completions.create(**REQUEST).decoding["backend"] == "there"
        finally:
            again.kill()


def test_it_hangs() -> None:
    """Stopped, not dead: its kernel still accepts connections."""
    process = UpstreamProcess()
    quick = Timeouts(connect_s=1.0, first_byte_s=0.3, between_bytes_s=0.3)
    backend = remote(process, timeouts=quick, health=HealthCheck(every_s=3600.0))
    with running_gateway(backends=Backends([backend], frozenset())) as live:
        assert live.client.chat.completions.create(**REQUEST).decoding["backend"] == "there"
        process.stop_running()
        with pytest.raises(openai.APIStatusError) as caught:
            live.client.chat.completions.create(**REQUEST, stream=True)
        assert (caught.value.status_code, caught.value.code) == (504, "upstream_timeout")
        assert "waited 0.3 s for its first byte" in str(caught.value)
        process.go_on()
        process.order("hold 2")
        with pytest.raises(openai.APIError) as broken:
            list(live.client.chat.completions.create(**REQUEST, stream=True))
        assert broken.value.code == "upstream_timeout"
        assert "waited 0.3 s for its next bytes" in str(broken.value)
    process.kill()


def until_backend_is(live: LiveGateway, *, healthy: bool) -> None:
    import time

    deadline = time.monotonic() + 20
    while live.http.get("/admin/backends").json()["backends"][0]["healthy"] is not healthy:
        assert time.monotonic() < deadline
        time.sleep(0.01)
