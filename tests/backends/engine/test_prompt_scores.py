"""Log-probabilities of a prompt: the model's own, and the same whatever else is in its steps."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from backends.types import DecodingPlan, GenerationRequest, PromptScore, TokenChunk
from tests.support.engine_helpers import (
    RUNNERS,
    ScriptedHeads,
    decode,
    make_core,
    one_thread,  # noqa: F401
    random_prompt,
    request,
    shared_runner,
    tiny_lm,
)

TOP = 3


def scored(name: str, prompt: tuple[int, ...], **sampling: object) -> GenerationRequest:
    return request(name, prompt, **{"logprobs": TOP, "prompt_logprobs": True, "max_tokens": 4, **sampling})


def scores_of(requests: list[GenerationRequest], kind: str, **options: Any) -> dict[str, tuple[PromptScore, ...]]:
    done = decode(requests, runner=shared_runner(kind), **options)
    for recorded in done.of.values():
        assert not any(chunk.prompt_scores for chunk in recorded.chunks[1:])
    return {name: recorded.chunks[0].prompt_scores for name, recorded in done.of.items()}


@pytest.mark.parametrize("kind", RUNNERS)
def test_they_are_those_of_the_model_itself(kind: str) -> None:
    """Of prompts longer than a step, than a page, and of a single token, which has none."""
    rng = random.Random(4)
    prompts = [random_prompt(rng, length, length) for length in (1, 2, 16, 33, 150)]
    found = scores_of([scored(str(i), prompt) for i, prompt in enumerate(prompts)], kind)
    model = tiny_lm("llama")
    for i, prompt in enumerate(prompts):
        with torch.inference_mode():
            log_p = torch.log_softmax(model(torch.tensor([prompt])).logits[0].float(), dim=-1)
        assert len(found[str(i)]) == len(prompt) - 1
        for at, score in enumerate(found[str(i)]):
            assert score.logprob == pytest.approx(float(log_p[at, prompt[at + 1]]), abs=2e-4)
            assert [value for _, value in score.top] == pytest.approx(log_p[at].topk(TOP).values.tolist(), abs=2e-4)
            assert all(value == pytest.approx(float(log_p[at, token]), abs=2e-4) for token, value in score.top)


@pytest.mark.parametrize("kind", RUNNERS)
def test_they_are_the_same_bits_beside_others(kind: str) -> None:
    """In chunks of any size, beside speculation, beside other prompts that are scored or not."""
    rng = random.Random(5)
    prompt = random_prompt(rng, 90, 90)
    alone = scores_of([scored("a", prompt)], kind)["a"]
    others = [scored("b", random_prompt(rng), max_tokens=12), request("c", random_prompt(rng, 30))]
    drafting = [replace(each, plan=DecodingPlan()) for each in (*others, scored("a", prompt))]
    found = scores_of(drafting, kind, heads=ScriptedHeads({}), join=lambda: rng.random() < 0.5)
    assert found["a"] == alone
    assert found["c"] == ()
    assert len(found["b"]) == len(others[0].prompt_token_ids) - 1


def test_the_answer_is_the_same_without() -> None:
    rng = random.Random(6)
    prompt = random_prompt(rng, 70, 70)
    with_scores, without = decode([scored("a", prompt), request("b", prompt, max_tokens=4)]).of.values()
    assert (with_scores.tokens, with_scores.logits) == (without.tokens, without.logits)


@pytest.mark.parametrize("kind", RUNNERS)
def test_they_survive_a_preemption_and_are_not_taken_from_a_cache(kind: str) -> None:
    """Of a prompt that is in the cache already, whose sequence loses its pages in the prompt and in the answer."""
    prompt = random_prompt(random.Random(7), 150, 150)
    alone = scores_of([scored("a", prompt)], kind)["a"]
    core = make_core(runner=shared_runner(kind), prefix_cache="shared")
    chunks: list[TokenChunk] = []
    for each in (request("before", prompt, max_tokens=20), scored("a", prompt, max_tokens=20)):
        core.add(each)
        steps = 0
        while core.has_work:
            chunks += [chunk for _, chunk in core.step() if each.request_id == "a"]
            steps += 1
            if each.request_id == "a" and steps in (2, 8) and core.has_work:
                core.scheduler.preempt_youngest(0.0)
    assert [chunk.prompt_scores for chunk in chunks if chunk.prompt_scores] == [alone]
    assert core.load().preemptions == 2
