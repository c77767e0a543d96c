"""Drawing on the device: the same filters as on the CPU, the same token however the vocabulary is cut, and
penalties."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from backends.sampling.rows import RowSampling
from backends.sampling.sampler import LogitProcessor, keyed_uniform
from backends.sampling.torch_sampler import best_rows
from backends.types import SamplingParams
from tests.backends.runners.triton.device import DEVICE, ints, on_device
from tests.support.engine_helpers import one_thread

from backends.runners.triton import ops  # isort: skip
from backends.runners.triton.penalties import penalise_kernel  # isort: skip
from backends.runners.triton.sampler import DeviceSampler  # isort: skip
from backends.runners.triton.sampling import row_key_kernel  # isort: skip

__all__ = ["one_thread"]

V = 97


def sampler(block: int = 128) -> DeviceSampler:
    return DeviceSampler(replace(ops.default_tiling(), vocabulary=block), DEVICE, V)


def params(rows: int, seed: int = 0, **given: Any) -> RowSampling:
    usual = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **given}
    types = {"top_k": np.int32}
    arrays = {name: np.full(rows, value, types.get(name, np.float32)) for name, value in usual.items()}
    return RowSampling(**arrays, uniform=np.random.default_rng(seed).random(rows))


def test_the_lowest_id_of_the_maximum_and_no_token_from_a_broken_row() -> None:
    logits = torch.randn(7, V, generator=torch.Generator().manual_seed(0)).round()
    logits[2, 50], logits[3, 90], logits[4] = torch.nan, torch.inf, -torch.inf
    expected = best_rows(logits)
    assert expected[2:5] == [-1, -1, -1]
    for block in (32, 128):
        found = sampler(block)
        assert found.argmax(on_device(logits), list(range(7))) == expected
        drawn = found.sample(on_device(logits), [2, 3, 4], params(3, top_k=5, top_p=0.5))
        assert drawn == [-1, -1, -1]


def kept_by(row: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """By the definition: sort, then cut; exact in 64 bits."""
    weights, ids = torch.sort(torch.exp((row.double() - row.max()) / temperature), descending=True, stable=True)
    keep = weights >= min_p
    if top_k:
        keep[top_k:] = False
        weights = weights[:top_k]
    before = torch.cumsum(weights, 0) - weights
    keep[: len(weights)] &= before < top_p * weights.sum()
    keep[0] = True
    return set(ids[keep.nonzero()[:, 0]].tolist())


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(5, 1.0, 0.0), (0, 0.8, 0.0), (0, 1.0, 0.2), (12, 0.7, 0.05), (1, 0.5, 0.0)]
)
def test_only_and_all_kept_tokens_are_drawn(top_k: int, top_p: float, min_p: float) -> None:
    """Logits in steps, so that many are equal where they are cut; ties go by id."""
    row = (torch.randn(V, generator=torch.Generator().manual_seed(top_k)) * 4).round() / 2
    logits = on_device(row[None])
    kept = kept_by(row, 0.9, top_k, top_p, min_p)
    draws = 24 if len(kept) < 8 else 16
    given = params(draws, temperature=0.9, top_k=top_k, top_p=top_p, min_p=min_p)
    found = set(sampler().sample(logits, [0] * draws, given))
    assert found <= kept
    assert len(kept) > 8 or len(found) >= min(len(kept), 2)


def test_a_token_depends_on_its_row_and_number_alone() -> None:
    logits = on_device(torch.randn(6, V, generator=torch.Generator().manual_seed(1)) * 2)
    given = params(6, temperature=0.8, top_p=0.9)
    given.temperature[2] = 0.0
    whole = sampler(128).sample(logits, list(range(6)), given)
    assert sampler(16).sample(logits, list(range(6)), given) == whole
    assert whole[2] == int(logits[2].argmax())
    for row in (0, 5):
        one = RowSampling(**{name: getattr(given, name)[row : row + 1] for name in RowSampling.__dataclass_fields__})
        assert sampler().sample(logits, [row], one) == [whole[row]]


def test_tokens_are_drawn_as_often_as_their_probability_says() -> None:
    row = torch.linspace(-2, 2, 6)
    logits = on_device(torch.full((1, V), -torch.inf).index_copy(1, torch.arange(6), row[None]))
    draws = 250
    found = np.bincount(sampler().sample(logits, [0] * draws, params(draws, 5, temperature=1.5)), minlength=V)
    expected = torch.softmax(row / 1.5, 0).numpy() * draws
    assert found[6:].sum() == 0
    assert float(((found[:6] - expected) ** 2 / expected).sum()) < 20.5  # chi-squared, 5 degrees: 0.1%


def test_a_row_s_key_is_that_of_the_cpu() -> None:
    seeds, positions = [0, 1, 2**63 - 1, 12345678901234567], [0, 7, 123456, 5]
    keys = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    row_key_kernel[(1,)](torch.tensor(seeds, device=DEVICE), torch.tensor(positions, device=DEVICE), keys, 4, B=4)
    expected = [int(keyed_uniform(seed, position) * 2**53) for seed, position in zip(seeds, positions, strict=True)]
    assert keys.tolist() == expected


@pytest.mark.parametrize("repetition", [1.0, 1.3, 0.7])
def test_penalties_are_those_of_the_cpu(repetition: float) -> None:
    """Two sequences, and rows that see other tokens of the step before them."""
    asked = SamplingParams(
        repetition_penalty=repetition,
        frequency_penalty=0.4,
        presence_penalty=0.3,
        logit_bias={3: 2.5, 40: -100.0},
        min_tokens=6,
    )
    plain = SamplingParams(frequency_penalty=0.5)
    prompts, answers = [[1, 2, 3, 90], [5]], [[7, 7, 3, 11], [8, 8]]
    paths, owner = [[], [7], [11, 12, 12], [8], []], [0, 0, 0, 1, 1]
    logits = torch.randn(5, V, generator=torch.Generator().manual_seed(0)) * 3
    expected = logits.clone()
    for row, (path, s) in enumerate(zip(paths, owner, strict=True)):
        processor = LogitProcessor((asked, plain)[s], np.array(prompts[s]), np.array([0, 96]))
        for token in answers[s]:
            processor.accept(token)
        processor.apply(expected[row].numpy(), path)
    counts = torch.zeros(2, V + 1, dtype=torch.int32)
    prompt, bias = torch.zeros(2, V, dtype=torch.int8), torch.zeros(2, V)
    for s in range(2):
        prompt[s, prompts[s]] = 1
        for token in answers[s]:
            counts[s, token] += 1
        counts[s, V] = len(answers[s])
    bias[0, 3], bias[0, 40] = 2.5, -100.0
    ending = torch.zeros(2, V, dtype=torch.int8)
    ending[:, [0, 96]] = 1
    out = on_device(torch.full_like(logits, torch.nan))
    by_sequence = [[repetition, 1.0], [0.4, 0.5], [0.3, 0.0]]
    penalise_kernel[(5, 2)](
        on_device(logits),
        out,
        ints(owner),
        on_device(counts),
        on_device(prompt),
        on_device(ending),
        on_device(bias),
        ints([path + [0] * (16 - len(path)) for path in paths]),
        ints([len(path) for path in paths]),
        *(torch.tensor(values, device=DEVICE) for values in by_sequence),
        ints([6, 0]),
        V,
        V,
        DEPTH=16,
        B=64,
        enable_fp_fusion=False,
    )
    assert torch.equal(out.cpu(), expected)
