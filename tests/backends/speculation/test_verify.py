"""Acceptance: sample-and-match is token-by-token decoding whatever the tree; typical acceptance obeys its formula."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.runners.base import ModelRunner
from backends.sampling.sampler import LogitProcessor, Visit, draw_tokens
from backends.speculation.tree_builder import Draft
from backends.speculation.verify import AcceptResult, VerifyRequest, verify
from backends.types import Acceptance, SamplingParams
from tests.support.engine_helpers import any_runner, one_thread, path_rows, random_parents  # noqa: F401

SMALL_VOCAB = 6
seeds = st.integers(0, 2**32).map(random.Random)


def model_logits(history: tuple[int, ...]) -> torch.Tensor:
    """A language model that is a table: logits depend on the whole history, with ties now and then."""
    rng = random.Random(repr(history))
    return torch.tensor([rng.choice([rng.gauss(0, 2), 1.0]) for _ in range(SMALL_VOCAB)])


def random_sampling(rng: random.Random) -> SamplingParams:
    sampled, penalised = rng.random() < 0.6, rng.random() < 0.5
    return SamplingParams(
        temperature=rng.choice([0.4, 1.0, 3.0]) if sampled else 0.0,
        top_k=rng.choice([0, 0, 3]),
        top_p=rng.choice([1.0, 1.0, 0.8]),
        presence_penalty=rng.choice([0.5, -0.5]) if penalised else 0.0,
        frequency_penalty=rng.choice([0.3, 0.0]) if penalised else 0.0,
        repetition_penalty=rng.choice([1.0, 1.4]) if penalised else 1.0,
        min_tokens=rng.choice([0, 4]) if penalised else 0,
        seed=rng.getrandbits(64),
    )


class Decoded:
    """One sequence over the table model, decoded by :func:`verify` with a new random tree every step."""

    def __init__(self, rng: random.Random, params: SamplingParams, *, acceptance: Acceptance = "exact") -> None:
        self.prompt = tuple(rng.randrange(SMALL_VOCAB) for _ in range(rng.randint(1, 4)))
        self.answer: list[int] = []
        self.params, self.acceptance = params, acceptance
        self.processor = (
            LogitProcessor(params, np.unique(np.array(self.prompt, np.int64)), np.array([0], np.int64))
            if LogitProcessor.wanted(params)
            else None
        )
        self._rng = rng

    def draft(self, most: int) -> Draft:
        """Few tokens, many nodes: most walks get somewhere, and equal siblings occur."""
        parents = random_parents(self._rng, self._rng.randint(0, most), depth=4)
        return Draft([self._rng.randrange(SMALL_VOCAB) for _ in parents], parents)

    def rows(self, draft: Draft) -> list[torch.Tensor]:
        history = (*self.prompt, *self.answer)
        paths = [path_rows(draft.parents, row) for row in range(len(draft.tokens) + 1)]
        return [model_logits(history + tuple(draft.tokens[row - 1] for row in path)) for path in paths]

    def candidate(self, draft: Draft, first_row: int) -> VerifyRequest:
        position = len(self.prompt) + len(self.answer)
        return VerifyRequest(first_row, position, self.params, self.processor, draft, self.acceptance)

    def extend(self, tokens: list[int]) -> None:
        self.answer += tokens
        if self.processor is not None:
            self.processor.counts.update(tokens)


def step(runner: ModelRunner, sequences: list[Decoded], most_nodes: int) -> list[tuple[Draft, AcceptResult]]:
    rows: list[torch.Tensor] = []
    candidates = []
    for sequence in sequences:
        draft = sequence.draft(most_nodes)
        candidates.append(sequence.candidate(draft, len(rows)))
        rows += sequence.rows(draft)
    results = verify(runner, torch.stack(rows), candidates)
    for sequence, result in zip(sequences, results, strict=True):
        sequence.extend(result.tokens)
    return [(candidate.draft, result) for candidate, result in zip(candidates, results, strict=True)]


def vanilla_answer(runner: ModelRunner, sequence: Decoded, length: int) -> list[int]:
    """Token by token from the same prompt, without :func:`verify`."""
    fresh = Decoded(random.Random(0), sequence.params)
    fresh.prompt = sequence.prompt
    if fresh.processor is not None:
        fresh.processor.prompt_ids = np.unique(np.array(sequence.prompt, np.int64))
    while len(fresh.answer) < length:
        history = (*fresh.prompt, *fresh.answer)
        visit = Visit(0, len(history), fresh.params, fresh.processor, ())
        fresh.extend(draw_tokens(runner, model_logits(history)[None], [visit]))
    return fresh.answer


@settings(max_examples=60)
@given(seeds, st.integers(1, 4), st.sampled_from([0, 3, 12, 40]))
def test_any_trees_give_the_vanilla_answer(rng: random.Random, count: int, most_nodes: int) -> None:
    runner = any_runner()
    sequences = [Decoded(rng, random_sampling(rng)) for _ in range(count)]
    for _ in range(5):
        for draft, result in step(runner, sequences, most_nodes):
            check_walk(draft, result)
    for sequence in sequences:
        assert sequence.answer == vanilla_answer(runner, sequence, len(sequence.answer))


def check_walk(draft: Draft, result: AcceptResult) -> None:
    """Rows lead from the root down through nodes that hold the tokens, until no child holds the last one."""
    assert len(result.tokens) == len(result.rows) >= 1
    assert result.rows[0] == 0
    for above, row, token in zip(result.rows, result.rows[1:], result.tokens, strict=False):
        assert (draft.parents[row - 1], draft.tokens[row - 1]) == (above, token)
    below = [token for token, parent in zip(draft.tokens, draft.parents, strict=True) if parent == result.rows[-1]]
    assert result.tokens[-1] not in below, "a candidate that was right has been left out"


def test_long_walks_happen() -> None:
    """The property above is worth nothing if no candidate is ever accepted."""
    rng, lengths = random.Random(5), Counter[int]()
    sequences = [Decoded(rng, random_sampling(rng)) for _ in range(8)]
    for _ in range(10):
        lengths.update(len(result.tokens) for _, result in step(any_runner(), sequences, 40))
    assert lengths[1] < 60
    assert lengths[3] > 3


def test_greedy_sequences_with_equal_rows_do_not_disturb_each_other() -> None:
    logits = torch.tensor([[0.0, 5.0, 1.0], [9.0, 0.0, 0.0], [0.0, 0.0, 3.0], [0.0, 7.0, 0.0]])
    greedy = SamplingParams(temperature=0.0)
    found = verify(
        any_runner(),
        logits,
        [
            VerifyRequest(0, 10, greedy, None, Draft([1, 0], [0, 1])),
            VerifyRequest(3, 4, greedy, None, Draft()),
        ],
    )
    assert found == [AcceptResult([1, 0, 2], [0, 1, 2]), AcceptResult([1], [0])]


def likely_enough(row: torch.Tensor, temperature: float, token: int) -> bool:
    """Medusa's typical acceptance with epsilon 0.09 and alpha 0.3, in plain arithmetic."""
    weights = [math.exp(value / temperature) for value in row.tolist()]
    chances = [weight / sum(weights) for weight in weights]
    entropy = -sum(chance * math.log(chance) for chance in chances)
    return chances[token] > min(0.09, 0.3 * math.exp(-entropy))


@settings(max_examples=60)
@given(seeds, st.sampled_from([0.0, 0.5, 1.0, 4.0]))
def test_typical_acceptance_takes_what_the_formula_allows(rng: random.Random, temperature: float) -> None:
    sequence = Decoded(rng, SamplingParams(temperature=temperature, seed=rng.getrandbits(40)), acceptance="typical")
    draft = sequence.draft(20)
    rows = sequence.rows(draft)
    [result] = verify(any_runner(), torch.stack(rows), [sequence.candidate(draft, 0)])
    assert len(result.tokens) == len(result.rows)
    for above, row, token in zip(result.rows, result.rows[1:], result.tokens, strict=False):
        assert (draft.parents[row - 1], draft.tokens[row - 1]) == (above, token)
        children = {t for t, parent in zip(draft.tokens, draft.parents, strict=True) if parent == above}
        allowed = {child for child in children if likely_enough(rows[above], temperature or 1.0, child)}
        if allowed:
            assert float(rows[above][token]) == max(float(rows[above][child]) for child in allowed)
    last = result.rows[-1]
    below = [token for token, parent in zip(draft.tokens, draft.parents, strict=True) if parent == last]
    assert not any(likely_enough(rows[last], temperature or 1.0, token) for token in below)


def test_typical_acceptance_respects_bans_and_history() -> None:
    """The ban on ending early and the penalties come before the judgement of what is likely."""
    params = SamplingParams(temperature=1.0, min_tokens=1, frequency_penalty=2.0)
    processor = LogitProcessor(params, np.array([], np.int64), np.array([0], np.int64))
    sure_of_the_end = torch.tensor([9.0, 4.0, 0.0])
    draft = Draft([0, 1, 1, 1], [0, 0, 2, 3])
    candidate = VerifyRequest(0, 5, params, processor, draft, "typical")
    [result] = verify(any_runner(), sure_of_the_end.expand(5, -1).contiguous(), [candidate])
    assert result.tokens[0] == 1, "the end is banned as the first token, however likely"
    assert result.rows[1] == 2
    exact = verify(any_runner(), sure_of_the_end.expand(5, -1).contiguous(), [replace(candidate, acceptance="exact")])
    assert exact[0].tokens[0] == 1
    assert result.tokens[1] == 0, "after one token the end may come, and two penalties have made 1 unlikely"


@pytest.mark.parametrize("temperature", [0.0, 1e-40])
def test_typical_acceptance_at_no_temperature_is_defined(temperature: float) -> None:
    candidate = VerifyRequest(0, 3, SamplingParams(temperature=temperature), None, Draft([1], [0]), "typical")
    [result] = verify(any_runner(), torch.tensor([[0.0, 4.0], [5.0, 0.0]]), [candidate])
    assert result == AcceptResult([1, 0], [0, 1])
