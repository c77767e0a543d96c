"""The seam of grammars: a mask by row and path gives, beside trees, what it gives beside vanilla decoding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from backends.engine.loading import EngineOptions, LoadedCore, build_core, load_parts
from backends.models.tiny import TINY_MODEL_NAME
from backends.proof.lossless import verify_lossless
from backends.sampling.sampler import LogitProcessor, Visit, draw_tokens
from backends.tree import CandidateTree
from backends.types import DecodingPlan, GenerationRequest, SamplingParams, TokenChunk
from tests.support.engine_helpers import one_thread  # noqa: F401

VOCAB = 260


class EvenAfterOdd:
    """After an odd token id only even ones may come, and the end never. ``breaks_after``: so many tokens, then it
    fails."""

    is_document = False

    def __init__(self, breaks_after: float = math.inf) -> None:
        self.seen: list[int] = []
        self.calls: list[str] = []
        self._breaks_after = breaks_after

    @property
    def error(self) -> str | None:
        return "it has had enough" if len(self.seen) >= self._breaks_after else None

    complete_after: int | None = None

    def outlook(self) -> None:
        return None

    def allows(self, token: int) -> bool:
        self.calls.append("allows")
        row = np.zeros(VOCAB, np.float32)
        self._forbid(row)
        return bool(np.isfinite(row[token]))

    def prepare(self) -> None:
        self.calls.append("prepare")

    def mask(self, row: Any) -> None:
        self.calls.append("mask")
        self._forbid(row)

    def _forbid(self, row: Any) -> None:
        if self.error is not None:
            row[:] = -np.inf
        row[0] = -np.inf
        if self.seen and self.seen[-1] % 2:
            row[1::2] = -np.inf

    def advance(self, token: int) -> None:
        self.calls.append("advance")
        self.seen.append(token)


@pytest.fixture(scope="module", params=["native", "transformers"])
def loaded(request: pytest.FixtureRequest) -> LoadedCore:
    options = EngineOptions(model=TINY_MODEL_NAME, dtype="float32", threads=1, runner=request.param)
    try:
        return build_core(load_parts(options), options)
    except ValueError as error:
        pytest.skip(str(error))


PROMPTS = [tuple(range(5 + i, 12 + i)) for i in range(40)]


def test_a_masked_answer_is_the_same_with_trees_and_without(loaded: LoadedCore) -> None:

    report = verify_lossless(
        loaded,
        PROMPTS,
        seed=3,
        max_tokens=24,
        # Every third request goes without, in the same batches.
        open_grammar=lambda number: EvenAfterOdd() if number % 3 else None,
    )
    assert report.lossless, report
    assert report.accepted > 100


def decode(loaded: LoadedCore, *requests: GenerationRequest) -> dict[str, list[TokenChunk]]:
    chunks: dict[str, list[TokenChunk]] = {request.request_id: [] for request in requests}
    for request in requests:
        loaded.core.add(request)
    while loaded.core.has_work:
        for name, chunk in loaded.core.step():
            chunks[name].append(chunk)
    loaded.core.check_integrity()
    return chunks


def request_for(name: str, grammar: Any, **sampling: Any) -> GenerationRequest:
    tree = CandidateTree.parse("3x2x1")
    params = SamplingParams(**{"max_tokens": 30, "temperature": 0.0, **sampling})
    plan = DecodingPlan(num_heads=3, tree=tree, max_nodes=len(tree))
    return GenerationRequest(name, PROMPTS[0], params, plan, grammar=grammar)


def tokens_of(chunks: Sequence[TokenChunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


@pytest.mark.parametrize("acceptance", ["exact", "typical"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_mask_holds_on_every_path(loaded: LoadedCore, acceptance: Any, temperature: float) -> None:
    grammar = EvenAfterOdd()
    asked = request_for("a", grammar, temperature=temperature, repetition_penalty=1.1)
    chunks = decode(loaded, replace(asked, plan=replace(asked.plan, acceptance=acceptance)))["a"]
    tokens = tokens_of(chunks)
    assert len(tokens) == 30
    assert any(token % 2 for token in tokens)
    assert all(after % 2 == 0 for token, after in pairwise(tokens) if token % 2)


def test_the_state_is_asked_as_vanilla_decoding_asks_it(loaded: LoadedCore) -> None:
    grammar = EvenAfterOdd()
    tokens = tokens_of(decode(loaded, request_for("a", grammar))["a"])
    # Visited rows alone are asked about, and accepted tokens alone move it on: so its own limits are met at the same
    # token. Greedy rows need a mask at most where the best tokens are forbidden.
    vanilla = EvenAfterOdd()
    plain = replace(request_for("a", vanilla), plan=DecodingPlan(method="vanilla", num_heads=0))
    assert tokens_of(decode(loaded, plain)["a"]) == tokens
    assert grammar.calls[: len(vanilla.calls)] == vanilla.calls
    assert grammar.calls.count("mask") < grammar.calls.count("allows") / 4
    assert grammar.seen[: len(tokens)] == tokens


def test_masks_of_drawn_roots_are_computed_beside_the_forward(loaded: LoadedCore) -> None:
    grammar, greedy = EvenAfterOdd(), EvenAfterOdd()
    decode(loaded, request_for("a", grammar, temperature=1.0), request_for("b", greedy))
    calls = grammar.calls
    prepared = [at for at, call in enumerate(calls) if call == "prepare"]
    assert prepared
    assert all(calls[at + 1] == "mask" for at in prepared)
    assert "prepare" not in greedy.calls


@given(
    rows=arrays(np.float32, (3, 8), elements=st.sampled_from([-1.0, 0.0, 0.5, 2.0, 3.0, -np.inf, np.nan])),
    allowed=st.lists(st.sets(st.integers(0, 7), min_size=1), min_size=3, max_size=3),
)
def test_greedy_rows_have_the_token_that_a_mask_would_give(
    loaded: LoadedCore, rows: np.ndarray, allowed: list[set[int]]
) -> None:
    """Also of ties, and of broken rows as long as what is broken is masked or is not."""
    logits = torch.full((3, VOCAB), -np.inf)
    logits[:, :8] = torch.from_numpy(rows)
    visits, masked = [], logits.clone()
    for row, ids in enumerate(allowed):
        grammar = _Only(ids)
        processor = LogitProcessor(SamplingParams(), np.array([], np.int64), np.array([0]), grammar=grammar)
        visits.append(Visit(row, row, SamplingParams(temperature=0.0), processor, ()))
        grammar.mask(masked[row].numpy())
    expected = loaded.core.runner.argmax(masked, [0, 1, 2])
    assert draw_tokens(loaded.core.runner, logits, visits) == expected


def test_a_grammar_that_fails_ends_its_own_request_alone(loaded: LoadedCore) -> None:
    failing, plain = request_for("failing", EvenAfterOdd(breaks_after=7)), request_for("plain", None)
    alone = tokens_of(decode(loaded, plain)["plain"])
    chunks = decode(loaded, failing, plain)
    last = chunks["failing"][-1]
    assert (last.finish_reason, last.error) == ("error", "it has had enough")
    assert len(tokens_of(chunks["failing"])) == 7
    assert chunks["plain"][-1].finish_reason in ("stop", "length")
    assert tokens_of(chunks["plain"]) == alone


class _Only(EvenAfterOdd):
    """Allows some tokens, for ever."""

    def __init__(self, allowed: set[int]) -> None:
        super().__init__()
        self._allowed = sorted(allowed)

    def _forbid(self, row: Any) -> None:
        kept = row[self._allowed]
        row.fill(-np.inf)
        row[self._allowed] = kept


class _Closing(EvenAfterOdd):
    """Complete after five tokens."""

    is_document = True

    complete_after = 5


def test_a_complete_grammar_ends_the_answer_and_stop_strings_cut_no_document(loaded: LoadedCore) -> None:
    free = tokens_of(decode(loaded, request_for("a", EvenAfterOdd()))["a"])
    stop = tuple({loaded.tokenizer.decode([token]) for token in free[:4]} - {""})
    assert stop
    last = decode(loaded, request_for("a", _Closing(), stop=stop, max_tokens=5))["a"]
    assert tokens_of(last) == free[:5]
    # Not "length", though that is reached too: nothing is missing.
    assert (last[-1].finish_reason, last[-1].stop_match) == ("stop", None)
    cut = decode(loaded, request_for("a", EvenAfterOdd(), stop=stop))["a"]
    assert cut[-1].stop_match in stop


def test_log_probabilities_are_those_before_the_mask(loaded: LoadedCore) -> None:
    def logprobs(plan: DecodingPlan) -> list[tuple[int, float]]:
        asked = replace(request_for("a", EvenAfterOdd(), logprobs=2), plan=plan)
        chunks = decode(loaded, asked)["a"]
        return [(each.chosen.token_id, each.chosen.logprob) for chunk in chunks for each in chunk.logprobs]

    with_trees = logprobs(request_for("a", None).plan)
    assert with_trees == logprobs(DecodingPlan(method="vanilla", num_heads=0))
    # The model's own first choice is sometimes forbidden; what is said of the chosen one is still the model's.
    assert any(value < -1 for _, value in with_trees)
    assert all(math.isfinite(value) for _, value in with_trees)


def test_what_was_told_along_a_path_is_not_told_again() -> None:
    grammar = EvenAfterOdd()
    processor = LogitProcessor(SamplingParams(), np.array([], np.int64), np.array([0]), grammar=grammar)
    row = np.zeros(VOCAB, np.float32)
    processor.apply(row, [])
    processor.apply(row, [3])
    processor.apply(row, [3, 4])
    for token in (3, 4, 9):
        processor.accept(token)
    assert grammar.seen == [3, 4, 9]
    processor.apply(row, [])
    assert np.isneginf(row[1::2]).all()
