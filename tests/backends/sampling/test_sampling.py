"""Drawing tokens: keyed random numbers, both samplers against each other and against theory, and logit processors."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from backends.runners.base import ModelRunner
from backends.sampling.rows import NO_TOKEN, RowSampling
from backends.sampling.sampler import LogitProcessor, Visit, draw_tokens, keyed_uniform
from backends.sampling.torch_sampler import draw_rows
from backends.types import SamplingParams
from tests.support.engine_helpers import EOS, RUNNERS, VOCAB, any_runner, one_thread, shared_runner  # noqa: F401

seeds = st.integers(0, 2**32).map(random.Random)


def row_sampling(count: int, uniform: np.ndarray | None = None, **values: float) -> RowSampling:
    """The same parameters for ``count`` rows."""
    columns = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **values}
    return RowSampling(
        **{
            name: np.full(count, columns[name], np.int32 if name == "top_k" else np.float32)
            for name in ("temperature", "top_k", "top_p", "min_p")
        },
        uniform=np.linspace(0, 1, count, endpoint=False) if uniform is None else uniform,
    )


def kept_tokens(row: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> dict[int, float]:
    """Tokens and probabilities after temperature, top-k, top-p of what is left, and min-p, from the definitions."""
    weights = np.exp((row.astype(np.float64) - row.max()) / temperature)
    order = np.lexsort((np.arange(len(row)), -weights))
    if top_k:
        order = order[:top_k]
    mass = weights[order].sum()
    if top_p < 1:
        before = np.cumsum(weights[order]) - weights[order]
        order = order[: max(int((before < np.float32(top_p) * mass).sum()), 1)]
    order = np.array([i for place, i in enumerate(order) if place == 0 or weights[i] >= min_p])
    total = weights[order].sum()
    return {int(i): weights[i] / total for i in order}


class TestKeyedUniform:
    def test_is_a_function_of_seed_and_position(self) -> None:
        assert keyed_uniform(7, 100) == keyed_uniform(7, 100)
        assert len({keyed_uniform(seed, position) for seed in range(50) for position in range(50)}) == 2500

    @pytest.mark.parametrize("seed", [0, -1, 2**63, 2**64 + 5, -(2**70)])
    def test_any_integer_is_a_seed(self, seed: int) -> None:
        assert 0.0 <= keyed_uniform(seed, 3) < 1.0

    def test_known_values_never_change(self) -> None:
        """A seed must give the same answer after an upgrade; SplitMix64's first output for 0 is published."""
        mixed = 0xE220A8397B1DCDAF  # SplitMix64(0)
        state = (mixed + 0x9E3779B97F4A7C15) % 2**64
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
        assert keyed_uniform(0, 0) == ((state ^ (state >> 31)) >> 11) / 2**53

    @pytest.mark.parametrize("vary", ["position", "seed"])
    def test_is_uniform_and_neighbours_are_independent(self, vary: str) -> None:
        size = 40_000
        numbers = np.array([keyed_uniform(5, i) if vary == "position" else keyed_uniform(i, 5) for i in range(size)])
        cells = np.histogram(numbers, bins=64, range=(0, 1))[0]
        assert stats.chisquare(cells).pvalue > 1e-4
        pairs = np.histogram2d(numbers[:-1], numbers[1:], bins=8, range=[[0, 1], [0, 1]])[0]
        assert stats.chisquare(pairs.ravel()).pvalue > 1e-4


@pytest.mark.parametrize("kind", RUNNERS)
class TestSampler:
    """Each runner's sampler against the definitions."""

    @settings(max_examples=200)
    @given(
        seeds,
        st.sampled_from([1e-4, 0.3, 1.0, 2.0, 100.0]),
        st.sampled_from([0, 1, 3, 20, 10_000]),
        st.sampled_from([1.0, 0.0, 0.3, 0.9, 0.9999]),
        st.sampled_from([0.0, 0.02, 0.4, 1.0]),
    )
    def test_draws_follow_the_definition(
        self, kind: str, rng: random.Random, temperature: float, top_k: int, top_p: float, min_p: float
    ) -> None:
        size = rng.choice([1, 5, 16, 70, 300])
        # Few distinct values: ties everywhere, also at the filters' edges.
        values = rng.choice([[0.0], [0.0, 1.0], [-2.0, 0.0, 0.5, 3.0], [rng.gauss(0, 3) for _ in range(size)]])
        row = np.array([rng.choice(values) for _ in range(size)], np.float32)
        expected = kept_tokens(row, temperature, top_k, top_p, min_p)
        if top_p < 1 and not stable_cut(row, temperature, top_k, top_p):
            return
        filtered = bool(top_k or top_p < 1 or min_p)
        ids = list(expected) if filtered else sorted(expected)
        edges = np.cumsum([expected[i] for i in ids])
        middles = edges - np.array([expected[i] for i in ids]) / 2
        wide = [(i, middle) for i, middle in zip(ids, middles, strict=True) if expected[i] > 1e-4][:40]
        uniform = np.array([middle for _, middle in wide])
        params = row_sampling(len(wide), uniform, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        logits = torch.from_numpy(np.tile(row, (len(wide) + 2, 1)))
        drawn = shared_runner(kind).sample(logits, list(range(1, len(wide) + 1)), params)
        if len(set(row.tolist())) * 4 > size > 5 and temperature >= 100:
            # Nearly equal weights may swap places: only membership and chance are defined then.
            assert set(drawn) <= set(expected)
        else:
            assert drawn == [i for i, _ in wide]

    def test_frequencies_match_softmax(self, kind: str) -> None:
        generator = torch.Generator().manual_seed(1)
        row = torch.randn(50, generator=generator) * 2
        size, temperature = 20_000, 0.8
        uniform = np.array([keyed_uniform(11, i) for i in range(size)])
        params = row_sampling(size, uniform, temperature=temperature)
        drawn = shared_runner(kind).sample(row.expand(size, -1).contiguous(), list(range(size)), params)
        expected = torch.softmax(row.double() / temperature, 0).numpy() * size
        counts = np.bincount(drawn, minlength=50)
        common = expected >= 5
        observed = [*counts[common], counts[~common].sum()]
        wanted = [*expected[common], expected[~common].sum()]
        assert stats.chisquare(observed, np.array(wanted) * (size / sum(wanted))).pvalue > 1e-4

    @pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.5}, {"top_p": 0.0}])
    def test_extreme_uniforms_and_temperatures_stay_inside(self, kind: str, filters: dict[str, float]) -> None:
        row = torch.tensor([[-1e30, 2.0, 5.0, -math.inf, 4.5, 5.0, -3e38]])
        for temperature in (1e-5, 1e-3, 1.0, 2.0):
            params = row_sampling(2, np.array([0.0, np.nextafter(1.0, 0.0)]), temperature=temperature, **filters)
            low, high = shared_runner(kind).sample(row.expand(2, -1).contiguous(), [0, 1], params)
            assert {low, high} <= {1, 2, 4, 5}
            if temperature <= 1e-3:
                assert low == 2
                assert high == (5 if filters.get("top_p") != 0.0 else 2)

    def test_a_row_does_not_depend_on_the_others(self, kind: str) -> None:
        rng = random.Random(3)
        logits = torch.randn(40, VOCAB, generator=torch.Generator().manual_seed(2)) * 3
        params = RowSampling(
            temperature=np.array([rng.uniform(0.2, 2) for _ in range(40)], np.float32),
            top_k=np.array([rng.choice([0, 7, 50]) for _ in range(40)], np.int32),
            top_p=np.array([rng.choice([1.0, 0.8]) for _ in range(40)], np.float32),
            min_p=np.array([rng.choice([0.0, 0.05]) for _ in range(40)], np.float32),
            uniform=np.array([rng.random() for _ in range(40)]),
        )
        together = shared_runner(kind).sample(logits, list(range(40)), params)
        for i in range(40):
            one = RowSampling(*(getattr(params, name)[i : i + 1].copy() for name in RowSampling.__slots__))
            assert shared_runner(kind).sample(logits[i : i + 1].clone(), [0], one) == [together[i]]

    def test_argmax_takes_the_lowest_of_equals(self, kind: str) -> None:
        logits = torch.full((6, 100), -1.0)
        best = {0: [0], 1: [99], 2: [3, 4, 98], 3: [15, 16], 4: [97, 99], 5: list(range(100))}
        for row, ids in best.items():
            logits[row, ids] = 7.0
        assert shared_runner(kind).argmax(logits, [5, 2, 0, 1, 3, 4]) == [0, 3, 0, 99, 15, 97]

    @pytest.mark.parametrize("size", [33, VOCAB])
    def test_rows_of_no_number_give_no_token_and_change_no_other_row(self, kind: str, size: int) -> None:
        """Every combination of filters; what is wrong may stand anywhere in a row."""
        good = torch.linspace(-3, 3, size)
        rows = []
        for bad in (math.nan, math.inf):
            for at in (0, 5, 17, size - 1):
                row = good.clone()
                row[at] = bad
                rows.append(row)
        rows += [torch.full((size,), bad) for bad in (math.nan, math.inf, -math.inf)]
        mixed = torch.full((size,), -math.inf)
        mixed[3] = math.nan
        rows += [mixed, good]
        logits, runner = torch.stack(rows), shared_runner(kind)
        index = list(range(len(rows)))
        assert runner.argmax(logits, index) == [NO_TOKEN] * (len(rows) - 1) + [size - 1]
        filters = itertools.product((0, 1, 7, 10_000), (1.0, 0.9, 0.0), (0.0, 0.05, 1.0), (1e-6, 1.0, 2.0))
        for top_k, top_p, min_p, temperature in filters:
            uniform = np.full(len(rows), 0.5)
            params = row_sampling(len(rows), uniform, top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature)
            *none, one = runner.sample(logits, index, params)
            assert none == [NO_TOKEN] * (len(rows) - 1)
            assert kept_tokens(good.numpy(), temperature, top_k, top_p, min_p).get(one)

    def test_a_token_of_minus_infinity_is_never_drawn(self, kind: str) -> None:
        row = torch.full((1, 40), -math.inf)
        row[0, [7, 21]] = -50.0
        runner = shared_runner(kind)
        assert runner.argmax(row, [0]) == [7]
        for filters in ({}, {"top_k": 30}, {"top_p": 0.999}, {"min_p": 0.2}, {"top_k": 30, "top_p": 0.999}):
            params = row_sampling(2, np.array([0.0, np.nextafter(1.0, 0.0)]), **filters)
            assert runner.sample(row.expand(2, -1).contiguous(), [0, 1], params) == [7, 21]


def stable_cut(row: np.ndarray, temperature: float, top_k: int, top_p: float) -> bool:
    """Whether no token lies within rounding of the place where top-p cuts."""
    weights = np.sort(np.exp((row.astype(np.float64) - row.max()) / temperature))[::-1]
    weights = weights[:top_k] if top_k else weights
    before = np.cumsum(weights) - weights
    return bool(np.all(np.abs(before / weights.sum() - top_p) > 1e-5) or top_p == 0.0)


@settings(max_examples=60)
@given(seeds)
def test_both_samplers_draw_the_same_tokens(rng: random.Random) -> None:
    """Random rows, parameters and numbers: the C kernel and the torch operations are one rule."""
    native = shared_runner("native")
    rows = 12
    scale = rng.choice([0.5, 3.0, 20.0])
    logits = torch.tensor([[rng.gauss(0, scale) for _ in range(VOCAB)] for _ in range(rows)])
    params = RowSampling(
        temperature=np.array([rng.choice([1e-3, 0.5, 1.0, 2.0]) for _ in range(rows)], np.float32),
        top_k=np.array([rng.choice([0, 1, 5, 40]) for _ in range(rows)], np.int32),
        top_p=np.array([rng.choice([1.0, 0.95, 0.6, 0.1]) for _ in range(rows)], np.float32),
        min_p=np.array([rng.choice([0.0, 0.01, 0.1]) for _ in range(rows)], np.float32),
        uniform=np.array([rng.random() for _ in range(rows)]),
    )
    assert native.sample(logits, list(range(rows)), params) == draw_rows(logits, params)


def naive_processed(
    row: np.ndarray, params: SamplingParams, prompt: list[int], answer: list[int], ending: set[int]
) -> np.ndarray:
    """The processors' definitions, one token at a time, in float64."""
    result = row.astype(np.float64)
    for token in range(len(row)):
        result[token] += params.logit_bias.get(token, 0.0)
        if token in prompt or token in answer:
            penalty = params.repetition_penalty
            result[token] = result[token] / penalty if result[token] > 0 else result[token] * penalty
        count = answer.count(token)
        result[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
        if token in ending and len(answer) < params.min_tokens:
            result[token] = -math.inf
    return result


random_params = st.builds(
    SamplingParams,
    temperature=st.just(0.0),
    presence_penalty=st.sampled_from([0.0, 1.5, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.7, -0.3]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.5]),
    logit_bias=st.dictionaries(st.integers(0, 19), st.sampled_from([-100.0, -1.0, 2.5, 100.0]), max_size=4),
    min_tokens=st.integers(0, 6),
)


def processor_for(params: SamplingParams, prompt: list[int], done: list[int], ending: set[int]) -> LogitProcessor:
    return LogitProcessor(
        params,
        prompt_ids=np.unique(np.array(prompt, np.int64)),
        ending_ids=np.array(sorted(ending), np.int64),
        counts=Counter(done),
    )


tokens_of_20 = st.lists(st.integers(0, 19), max_size=6)


@given(random_params, tokens_of_20, tokens_of_20, tokens_of_20, st.sets(st.integers(0, 19), max_size=3), seeds)
def test_processors_match_their_formulas_and_see_the_walk(
    params: SamplingParams, prompt: list[int], done: list[int], ahead: list[int], ending: set[int], rng: random.Random
) -> None:
    row = np.array([rng.choice([-3.0, 0.0, 0.25, 4.0]) for _ in range(20)], np.float32)
    expected = naive_processed(row, params, prompt, done + ahead, ending)
    processor = processor_for(params, prompt, done, ending)
    processor.apply(row, ahead)
    np.testing.assert_allclose(row, expected, rtol=1e-5, atol=1e-5)
    assert processor.counts == Counter(done), "the walk must not change the history"


@pytest.mark.parametrize("penalty", [1e-300, 1e-40, 1e-30])
def test_a_tiny_repetition_penalty_leaves_a_best_token(penalty: float) -> None:
    row = np.array([1.0, 5e8, -2.0, 0.0], np.float32)
    processor_for(SamplingParams(repetition_penalty=penalty), [0, 1, 2, 3], [], set()).apply(row, ())
    assert np.isfinite(row).all()
    assert row[1] == row.max() > 1e29, "the best stays the best"


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, False),
        ({"temperature": 0.3, "top_k": 4, "top_p": 0.5, "min_p": 0.1, "stop": ("x",), "logprobs": 3}, False),
        ({"presence_penalty": -0.1}, True),
        ({"frequency_penalty": 0.1}, True),
        ({"repetition_penalty": 0.9}, True),
        ({"logit_bias": {3: 0.0}}, True),
        ({"min_tokens": 1}, True),
    ],
)
def test_a_processor_is_made_only_where_it_changes_something(changes: dict[str, object], wanted: bool) -> None:
    assert LogitProcessor.wanted(SamplingParams(**changes)) is wanted  # type: ignore[arg-type]


def naive_draw(runner: ModelRunner, row: torch.Tensor, visit: Visit) -> int:
    """One visit on its own, with the processor's formulas in place of the processor."""
    params, processor = visit.params, visit.processor
    values = row.numpy().copy()
    if processor is not None:
        answer = [*processor.counts.elements(), *visit.ahead]
        prompt, ending = processor.prompt_ids.tolist(), set(processor.ending_ids.tolist())
        values = naive_processed(values, params, prompt, answer, ending).astype(np.float32)
    if params.temperature == 0:
        return int(np.argmax(values))
    uniform = np.array([keyed_uniform(params.seed, visit.position)])
    filters = {name: getattr(params, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    return runner.sample(torch.from_numpy(values)[None], [0], row_sampling(1, uniform, **filters))[0]


@settings(max_examples=40)
@given(seeds, st.lists(random_params, min_size=1, max_size=6))
def test_mixed_visits_are_drawn_each_by_its_own_rules(rng: random.Random, params: list[SamplingParams]) -> None:
    from dataclasses import replace

    runner = any_runner()
    logits = torch.tensor([[rng.gauss(0, 2) for _ in range(VOCAB)] for _ in range(9)])
    before = logits.clone()
    visits = []
    for each in params:
        if rng.random() < 0.5:
            each = replace(
                each, temperature=rng.choice([0.5, 1.5]), top_k=rng.choice([0, 10]), seed=rng.getrandbits(40)
            )
        history = [rng.randrange(20) for _ in range(rng.randint(0, 5))]
        plain = rng.random() < 0.3
        processor = None if plain else processor_for(each, [1, 2], history, {EOS})
        ahead = () if plain else tuple(rng.randrange(20) for _ in range(rng.randint(0, 3)))
        visits.append(Visit(rng.randrange(9), rng.randrange(500), each, processor, ahead))
    assert draw_tokens(runner, logits, visits) == [naive_draw(runner, logits[v.row], v) for v in visits]
    assert torch.equal(logits, before), "drawing must not change the logits that logprobs are read from"
