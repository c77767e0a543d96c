"""Echoed prompts and their log-probabilities, as lm-eval asks for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.support.live_gateway import MODEL, running_gateway


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with running_gateway() as live:
        yield live.client


def ask(client: openai.OpenAI, prompt: Any, **more: Any) -> Any:
    return client.completions.create(model=MODEL, prompt=prompt, temperature=0, **{"max_tokens": 4, **more})


def test_the_text_begins_with_each_prompt(client: openai.OpenAI) -> None:
    plain, echoed = (ask(client, ["ab", "c\u00e9"], n=2, best_of=2, echo=echo) for echo in (False, True))
    for choice, prompt, same in zip(echoed.choices, ("ab", "ab", "c\u00e9", "c\u00e9"), plain.choices, strict=True):
        assert choice.text == prompt + same.text
        assert choice.logprobs is None
    assert echoed.usage == plain.usage
    assert ask(client, [97, 98], echo=True).choices[0].text == plain.choices[0].text.join(("ab", ""))


def test_log_probabilities_begin_with_the_prompts(client: openai.OpenAI) -> None:
    plain, echoed = (ask(client, "abc", logprobs=2, echo=echo).choices[0] for echo in (False, True))
    found = echoed.logprobs
    assert found.tokens == ["a", "b", "c", *plain.logprobs.tokens]
    assert found.text_offset == list(range(len(echoed.text)))
    assert (found.token_logprobs[0], found.top_logprobs[0]) == (None, None)
    assert found.token_logprobs[3:] == plain.logprobs.token_logprobs
    assert found.top_logprobs[3:] == plain.logprobs.top_logprobs
    assert found.top_logprobs[1]["b"] == found.token_logprobs[1] < 0


def test_nothing_but_the_prompt(client: openai.OpenAI) -> None:
    answer = ask(client, [[97, 98], [99]], logprobs=1, echo=True, max_tokens=0)
    assert [choice.text for choice in answer.choices] == ["ab", "c"]
    assert [choice.logprobs.tokens for choice in answer.choices] == [["a", "b"], ["c"]]
    assert [choice.finish_reason for choice in answer.choices] == ["length", "length"]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 0)


def test_no_upstream_is_asked_to_echo() -> None:
    from gateway.upstream.payload import what_it_lacks
    from gateway.wire.requests import CompletionRequest

    assert what_it_lacks(CompletionRequest(model=MODEL, prompt="a", echo=True), "vllm") == ("echo",)
    assert what_it_lacks(CompletionRequest(model=MODEL, prompt="a", echo=False), "vllm") == ()
