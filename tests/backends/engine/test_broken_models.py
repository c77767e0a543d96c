"""Models whose logits are no numbers, and drafts deeper than there is room for: never more than one request's error."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from backends.runners.base import ModelRunner, Proposals, best_guesses
from backends.sampling.rows import NO_TOKEN
from backends.speculation.tree_builder import Draft
from backends.speculation.verify import VerifyRequest, verify
from backends.types import DecodingPlan, SamplingParams
from tests.support.engine_helpers import (
    RUNNERS,
    ScriptedHeads,
    any_runner,
    decode,
    make_runner,
    random_prompt,
    request,
    tiny_lm,
)

BROKEN = 5  # the id whose embedding is no number


def broken_runner(kind: str) -> ModelRunner:
    model = tiny_lm("llama")
    runner = make_runner(kind, model)  # the transformers runner compares itself with the model when it is made
    embeddings = runner.embeddings if kind == "native" else model.model.embed_tokens.weight  # type: ignore[union-attr]
    with torch.no_grad():
        embeddings[BROKEN] = torch.nan
    return runner


@pytest.mark.parametrize("kind", RUNNERS)
def test_logits_of_no_number_end_their_request_alone(kind: str) -> None:
    runner = broken_runner(kind)
    settings: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 1.0, "min_p": 0.05},
        {"temperature": 1.0, "min_p": 0.05, "top_p": 0.9},
        {"temperature": 1.0, "top_k": 7, "frequency_penalty": 0.5, "logprobs": 2},
    ]
    prompt = (40, 41, 60)
    alone = decode([request("good", prompt, max_tokens=8, ignore_eos=True, seed=3)], runner=runner)["good"]
    for sampling in settings:
        bad = request("bad", (40, BROKEN, 60), max_tokens=8, ignore_eos=True, **sampling)
        good = request("good", prompt, max_tokens=8, ignore_eos=True, seed=3)
        found = decode([bad, good], runner=runner)
        assert found["bad"].last.finish_reason == "error"
        assert found["bad"].sent_ids in ([], [NO_TOKEN])
        assert found["good"].tokens == alone.tokens


def test_typical_acceptance_follows_no_row_of_no_number() -> None:
    logits, draft = torch.full((3, 20), torch.nan), Draft([4, 7], [0, 1])
    params = SamplingParams(temperature=1.0, max_tokens=8)
    [found] = verify(any_runner(), logits, [VerifyRequest(0, 9, params, None, draft, acceptance="typical")])
    assert (found.tokens, found.rows) == ([NO_TOKEN], [0])


def test_heads_of_no_number_guess_nothing() -> None:
    logits = torch.stack([torch.full((20,), torch.nan), torch.full((20,), -torch.inf), torch.zeros(20)])
    tokens, probabilities = best_guesses(logits, 3)
    assert ((tokens >= 0) & (tokens < 20)).all()
    assert probabilities.tolist() == [[0.0] * 3, [0.0] * 3, pytest.approx([0.05] * 3)]


class SureHeads(ScriptedHeads):
    """Guesses that the planner follows to the bottom."""

    def _guesses(self, rest: Any, k: int) -> Proposals:
        found = super()._guesses(rest, k)
        return Proposals(found.tokens, np.full(found.tokens.shape, 0.99, np.float32))


@pytest.mark.parametrize("levels", [16, 18, 24])
def test_drafts_go_as_deep_as_there_is_room_for(levels: int) -> None:
    """18 levels and more once wrote past the kernels' scratch memory, and answers differed."""
    rng, runner = random.Random(3), any_runner()
    prompts = [random_prompt(rng, 10, 40) for _ in range(3)]
    sampling: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True, "temperature": 0.9, "seed": 5}
    truth = {prompt: decode([request("v", prompt, **sampling)], runner=runner)["v"].tokens for prompt in prompts}
    heads = SureHeads(truth, num_heads=levels, hit_rate=1.0, ranks=1)
    plan = DecodingPlan(num_heads=levels, max_nodes=64, lookup=False)
    found = decode([request(str(p), p, plan, **sampling) for p in prompts], runner=runner, heads=heads)
    for prompt in prompts:
        assert found[str(prompt)].tokens == truth[prompt]
        stats = found[str(prompt)].last.stats
        assert stats is not None
        assert stats.max_nodes == 16
