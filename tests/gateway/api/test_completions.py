"""Text completions through the official client."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from backends.types import PositionLogprobs, TokenLogprob
from gateway.wire.logprobs import LOWEST, CompletionLogprobsWriter, chat_logprobs
from tests.support.live_gateway import MODEL, LiveGateway, running_gateway


@pytest.fixture(scope="module")
def gateway() -> Iterator[LiveGateway]:
    with running_gateway() as live:
        yield live


@pytest.fixture(scope="module")
def client(gateway: LiveGateway) -> openai.OpenAI:
    return gateway.client


def test_an_answer(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="once", temperature=0, max_tokens=6)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].logprobs is None
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 6)


@pytest.mark.parametrize(
    ("prompt", "count"),
    [("ab", 1), (["ab"], 1), ([97, 98], 1), ([[97, 98]], 1), (["ab", "cd"], 2), ([[97, 98], [99, 100]], 2)],
)
def test_forms_of_a_prompt(client: openai.OpenAI, prompt: str | list[str], count: int) -> None:
    answer = client.completions.create(model=MODEL, prompt=prompt, temperature=0)
    alone = [
        client.completions.create(model=MODEL, prompt=text, temperature=0).choices[0].text for text in ("ab", "cd")
    ]
    assert [choice.text for choice in answer.choices] == alone[:count]


def test_a_text_goes_on_from_its_prompt_and_a_chat_answer_does_not(gateway: LiveGateway, client: openai.OpenAI) -> None:
    """Tokens that begin with a space keep it in the first case only."""
    client.completions.create(model=MODEL, prompt="once", n=2, max_tokens=2)
    assert [request.continues for request in gateway.decoder.submitted[-2:]] == [True, True]
    client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "once"}], max_tokens=2)
    assert gateway.decoder.submitted[-1].continues is False


def test_prompts_and_choices_are_numbered_prompt_by_prompt(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=["ab", "cd"], n=2, seed=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    for number, prompt in enumerate(("ab", "cd")):
        alone = client.completions.create(model=MODEL, prompt=prompt, n=2, seed=3)
        together = answer.choices[2 * number : 2 * number + 2]
        assert [choice.text for choice in together] == [choice.text for choice in alone.choices]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 4


def test_without_a_seed_the_same_prompt_twice_is_two_samples(gateway: LiveGateway, client: openai.OpenAI) -> None:
    """All answers of a request are independent, unless the client has asked for repeatable ones by a seed."""

    def seeds(n: int, **seed: int) -> list[int]:
        before = len(gateway.decoder.submitted)
        client.completions.create(model=MODEL, prompt=["ab"] * 4, n=n, max_tokens=1, **seed)
        return [each.sampling.seed for each in gateway.decoder.submitted[before:]]

    for n in (1, 3):
        assert len(set(seeds(n))) == 4 * n
        assert len(set(seeds(n, seed=7))) == n
    assert seeds(1, seed=7) == [7] * 4


def test_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="once", temperature=0, logprobs=2, max_tokens=20)
    text, logprobs = answer.choices[0].text, answer.choices[0].logprobs
    assert logprobs is not None
    assert len(logprobs.tokens or []) == len(logprobs.token_logprobs or []) == len(logprobs.top_logprobs or []) == 20
    for token, offset in zip(logprobs.tokens or [], logprobs.text_offset or [], strict=True):
        if token != "�":  # part of a character
            assert text[offset : offset + len(token)] == token
    assert (logprobs.text_offset or [])[0] == 0


def test_streamed_logprobs_are_the_same(client: openai.OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt="once", temperature=0, logprobs=2).choices[0].logprobs
    assert whole is not None
    offsets: list[int] = []
    tokens: list[str] = []
    for chunk in client.completions.create(model=MODEL, prompt="once", temperature=0, logprobs=2, stream=True):
        if chunk.choices[0].logprobs is not None:
            offsets += chunk.choices[0].logprobs.text_offset or []
            tokens += chunk.choices[0].logprobs.tokens or []
    assert (tokens, offsets) == (whole.tokens, whole.text_offset)


def entry(token: str, logprob: float) -> TokenLogprob:
    return TokenLogprob(0, token, logprob, token.encode())


def test_what_json_cannot_say_becomes_the_lowest_logprob() -> None:
    position = PositionLogprobs(entry("a", float("-inf")), (entry("b", float("nan")), entry("c", -1.0)))
    content = chat_logprobs([position]).content[0]
    assert content.logprob == LOWEST
    assert [top.logprob for top in content.top_logprobs] == [LOWEST, -1.0]


def test_alternatives_that_read_the_same_keep_the_likelier() -> None:
    position = PositionLogprobs(entry("�", -1.0), (entry("�", -1.0), entry("�", -2.0), entry("x", -3.0)))
    assert CompletionLogprobsWriter().write([position]).top_logprobs == [{"�": -1.0, "x": -3.0}]


def test_the_chosen_token_is_among_the_alternatives() -> None:
    position = PositionLogprobs(entry("rare", -9.0), (entry("a", -1.0),))
    assert CompletionLogprobsWriter().write([position]).top_logprobs == [{"a": -1.0, "rare": -9.0}]
