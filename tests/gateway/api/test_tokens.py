"""``/tokenize`` and ``/detokenize``, as vLLM has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.live_gateway import MODEL, LiveGateway, running_gateway


@pytest.fixture(scope="module")
def gateway() -> Iterator[LiveGateway]:
    with running_gateway() as live:
        yield live


def post(gateway: LiveGateway, path: str, **body: Any) -> Any:
    return httpx.post(f"{gateway.url}{path}", json=body)


def test_there_and_back(gateway: LiveGateway) -> None:
    @settings(max_examples=20)
    @given(text=st.text(alphabet=st.characters(codec="utf-8"), max_size=30))
    def run(text: str) -> None:
        told = post(gateway, "/tokenize", prompt=text, model=MODEL).json()
        assert told["count"] == len(told["tokens"])
        assert post(gateway, "/detokenize", tokens=told["tokens"]).json() == {"prompt": text}

    run()


def test_messages_are_counted_as_a_chat_completion_counts_them(gateway: LiveGateway) -> None:
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    answer = gateway.client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1)
    told = post(gateway, "/tokenize", messages=messages, return_token_strs=True).json()
    assert answer.usage is not None
    assert told["count"] == answer.usage.prompt_tokens
    assert len(told["token_strs"]) == told["count"]
    assert told["max_model_len"] == 512


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/tokenize", {}, 400, "either prompt or messages"),
        (
            "/tokenize",
            {"prompt": "a", "messages": [{"role": "user", "content": "b"}]},
            400,
            "either prompt or messages",
        ),
        ("/tokenize", {"prompt": "a", "model": "nobody"}, 404, "is not served here"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": False}, 400, "'add_special_tokens' is not supported"),
        ("/detokenize", {"tokens": [10**6]}, 400, "'tokens' has token id 1000000"),
        ("/detokenize", {"tokens": [-1]}, 400, "'tokens[0]' must be"),
        ("/detokenize", {}, 400, "'tokens' is required"),
    ],
    ids=str,
)
def test_bad_input(gateway: LiveGateway, path: str, body: dict[str, Any], status: int, says: str) -> None:
    response = post(gateway, path, **body)
    assert response.status_code == status
    assert says in response.json()["error"]["message"]
