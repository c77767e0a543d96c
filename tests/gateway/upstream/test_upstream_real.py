"""Any real third-party server as an upstream; optional, since none is small enough to install for every test run.

MEDUSA_TEST_UPSTREAM is its URL with /v1, MEDUSA_TEST_UPSTREAM_MODEL the name it serves, MEDUSA_TEST_UPSTREAM_DIALECT
"openai" or "vllm". docs/backends.md says how to start vLLM for it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from gateway.routing.spec import HealthCheck, UpstreamSpec
from gateway.serving.targets import Backends, UpstreamTarget
from tests.support.live_gateway import LiveGateway, running_gateway

URL = os.environ.get("MEDUSA_TEST_UPSTREAM", "")
THEIRS = os.environ.get("MEDUSA_TEST_UPSTREAM_MODEL", "")
DIALECT: Any = os.environ.get("MEDUSA_TEST_UPSTREAM_DIALECT", "openai")

pytestmark = pytest.mark.skipif(not URL, reason="MEDUSA_TEST_UPSTREAM names no server")

ASK: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Count from one to ten."}],
    "temperature": 0,
    "max_tokens": 24,
    "seed": 1,
}


@pytest.fixture(scope="module")
def gateway() -> Iterator[LiveGateway]:
    # A server on a busy CPU may not answer a check while it works.
    patient = HealthCheck(timeout_s=60.0)
    backend = UpstreamTarget(
        UpstreamSpec("theirs", "ours", URL, upstream_model=THEIRS, dialect=DIALECT, health=patient)
    )
    with running_gateway(backends=Backends([backend], frozenset())) as live:
        yield live


@pytest.fixture(scope="module")
def direct() -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=URL, api_key="unused", max_retries=0) as client:
        yield client


@pytest.mark.parametrize(
    "arguments",
    [{}, {"logprobs": True, "top_logprobs": 2}, {"n": 2, "temperature": 0.7}, {"stop": ["3"]}],
    ids=["plain", "logprobs", "two choices", "stop"],
)
def test_chat_is_theirs(gateway: LiveGateway, direct: openai.OpenAI, arguments: dict[str, Any]) -> None:
    request = {**ASK, **arguments}
    ours = gateway.client.chat.completions.create(model="ours", **request)
    theirs = direct.chat.completions.create(model=THEIRS, **request)
    assert [each.message.content for each in ours.choices] == [each.message.content for each in theirs.choices]
    assert [each.finish_reason for each in ours.choices] == [each.finish_reason for each in theirs.choices]
    assert ours.usage is not None
    assert theirs.usage is not None
    assert ours.usage.completion_tokens == theirs.usage.completion_tokens
    assert ours.decoding["backend"] == "theirs"
    if "logprobs" in arguments:
        tokens = [[entry.token for entry in each.choices[0].logprobs.content] for each in (ours, theirs)]
        assert tokens[0] == tokens[1]
    texts: dict[int, str] = {}
    for chunk in gateway.client.chat.completions.create(model="ours", stream=True, **request):
        assert chunk.model == "ours"
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
    assert texts == {each.index: each.message.content for each in theirs.choices}


def test_text_completions_are_theirs(gateway: LiveGateway, direct: openai.OpenAI) -> None:
    request: dict[str, Any] = {"prompt": "One, two, three,", "temperature": 0, "max_tokens": 12}
    ours = gateway.client.completions.create(model="ours", **request)
    theirs = direct.completions.create(model=THEIRS, **request)
    assert ours.choices[0].text == theirs.choices[0].text
    assert ours.usage is not None


def test_their_refusal_comes_through(gateway: LiveGateway) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        gateway.client.chat.completions.create(model="ours", messages=ASK["messages"], max_tokens=10_000_000)
    assert "The backend 'theirs' refuses this request: " in str(caught.value)


def test_a_client_that_leaves_and_one_that_comes(gateway: LiveGateway) -> None:
    with gateway.client.chat.completions.create(**{**ASK, "model": "ours", "max_tokens": 200}, stream=True) as stream:
        next(iter(stream))
    gateway.wait_idle()
    assert gateway.client.chat.completions.create(model="ours", **ASK).choices[0].message.content
