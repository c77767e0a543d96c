"""The engine on the Triton kernels: lossless, right, and a body that knows its bucket only."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from backends.engine.loading import EngineOptions, LoadedCore, ModelParts, build_core, load_parts
from backends.heads.module import MedusaHeads
from backends.models.tiny_architectures import tiny_architecture
from backends.proof.lossless import LosslessReport, verify_lossless
from backends.runners.base import ProposalRequest
from backends.runners.batch import PAGE_SIZE, BatchBuilder
from backends.runners.torch_heads import heads_in_torch
from backends.runners.triton.tiling import bucket_of, outputs_of
from tests.backends.runners.triton.device import DEVICE
from tests.support.engine_helpers import FLAT_COST, one_thread, random_prompt

from backends.runners.triton import ops, runner as of_runner  # isort: skip
from backends.runners.triton.runner import TritonRunner  # isort: skip

__all__ = ["one_thread"]

PAGES = 40


def make(architecture: str, dtype: torch.dtype = torch.float32, **sizes: Any) -> TritonRunner:
    sizes = {"num_pages": PAGES, "max_rows": 64, "max_context": 192, **sizes}
    return TritonRunner(tiny_architecture(architecture, dtype=dtype), device=DEVICE, **sizes)


def some_heads(*, sequential: bool, draft: bool = True) -> MedusaHeads:
    ids = torch.randperm(260, generator=torch.Generator().manual_seed(1))[:100].sort().values if draft else None
    with torch.random.fork_rng():
        torch.manual_seed(3)
        heads = MedusaHeads(64, 3, 48, sequential=sequential, draft_token_ids=ids).eval().requires_grad_(False)
        for parameter in heads.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    return heads


def loaded_core(architecture: str, dtype: str, *, sequential: bool) -> LoadedCore:
    options = EngineOptions(model=f"tiny-random:{architecture}", dtype=dtype, runner="triton", device=str(DEVICE))
    parts = load_parts(options)
    assert parts.heads is not None
    heads = replace(parts.heads, heads=some_heads(sequential=sequential))
    return build_core(ModelParts(parts.model, parts.tokenizer, heads, parts.name), options, cost=FLAT_COST)


def prove(loaded: LoadedCore, prompts: int, tokens: int, seed: int) -> LosslessReport:
    rng = random.Random(seed)
    ids = [random_prompt(rng, 3, 70 if i == 0 else 20) for i in range(prompts)]
    return verify_lossless(loaded, ids, seed=seed, max_tokens=tokens)


@pytest.mark.parametrize(
    ("architecture", "dtype", "sequential"),
    [
        ("llama", "bfloat16", False),
        ("mistral", "float32", True),
        ("mistral-window", "bfloat16", True),
        ("qwen2", "bfloat16", False),
        ("qwen3", "float32", False),
    ],
)
def test_is_lossless(architecture: str, dtype: str, sequential: bool) -> None:
    """Trees, prompts in chunks, company, sampling on the device and heads: 400 tokens together at least."""
    report = prove(loaded_core(architecture, dtype, sequential=sequential), 7, 16, 3)
    assert report.lossless, report
    assert report.tokens >= 75
    assert report.accepted >= 20


def test_candidates_that_are_taken_for_certain_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault that grouping invites: rows of a tree share a piece that holds candidates."""
    true_items = of_runner.items_of

    def careless(batch: Any, tiling: Any, group: int, scratch_base: int) -> Any:
        return true_items(batch, tiling, group, 1 << 30)

    monkeypatch.setattr(of_runner, "items_of", careless)
    report = prove(loaded_core("llama", "float32", sequential=False), 2, 8, 1)
    assert report.token_mismatches + report.logit_mismatches > 0


def test_rows_whose_chains_depend_on_the_bucket_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault that speed invites: another order of sums where there are more rows."""
    true_linear = ops.linear

    def by_rows(tiling: Any, x: Any, weight: Any, out: Any, rows: int, **options: Any) -> int:
        return true_linear(replace(tiling, least_chain=16 if rows > 4 else 64), x, weight, out, rows, **options)

    monkeypatch.setattr(ops, "linear", by_rows)
    report = prove(loaded_core("llama", "float32", sequential=False), 2, 8, 1)
    assert report.logit_mismatches > 0


@pytest.mark.parametrize("architecture", ["llama", "mistral-window", "qwen2", "qwen3"])
def test_says_what_transformers_says(architecture: str) -> None:
    tokens = random_prompt(random.Random(1), 45, 45)
    model = tiny_architecture(architecture)
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    runner, batch = make(architecture), BatchBuilder(PAGES * PAGE_SIZE)
    for start in (0, 20, 44):
        batch.add_chunk([5, 0, 9], tokens[start : {0: 20, 20: 44, 44: 45}[start]], start, last_output=True)
    found = runner.logits(runner.forward(batch.build())).cpu()
    torch.testing.assert_close(found, expected[[19, 43, 44]], rtol=0, atol=2e-3)


def test_states_that_a_step_did_not_give_have_the_same_logits() -> None:
    runner, batch = make("llama"), BatchBuilder(PAGES * PAGE_SIZE)
    batch.add_tree([3], 7, 0, [9, 8, 7], [0, 1, 0])
    hidden = runner.forward(batch.build())
    of_the_step = runner.logits(hidden).clone()
    assert torch.equal(runner.logits(hidden.clone()), of_the_step)
    assert torch.equal(runner.logits(hidden[2:3].clone())[0], of_the_step[2])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_graph_gives_the_bits_of_its_body_in_every_bucket(dtype: torch.dtype) -> None:
    """On a device only: the interpreter has no graphs. The first row is the same in each bucket, alone or not."""
    runner, first = make("llama", dtype), []
    for nodes in (0, 3, 11, 30, 60):
        batch = BatchBuilder(PAGES * PAGE_SIZE)
        batch.add_tree([3], 7, 0, list(range(1, nodes + 1)), [0] * nodes)
        step = batch.build()
        replayed = runner.logits(runner.forward(step)).clone()
        rows = bucket_of(step.rows, runner.max_rows)
        runner._body(rows, outputs_of(step.outputs, rows))
        assert torch.equal(runner.logits(runner._state.hidden[: step.outputs]), replayed)
        first.append(replayed[0])
    assert all(torch.equal(each, first[0]) for each in first)


def test_more_rows_than_a_step_holds_are_refused() -> None:
    runner, batch = make("llama", max_rows=4), BatchBuilder(PAGES * PAGE_SIZE)
    batch.add_tree([3], 7, 0, [1] * 4, [0] * 4)
    with pytest.raises(ValueError, match="5 rows in a step of at most 4"):
        runner.forward(batch.build())


@pytest.mark.parametrize("sequential", [False, True])
@pytest.mark.parametrize("draft", [False, True])
def test_heads_guess_what_they_guess_in_torch(sequential: bool, draft: bool) -> None:
    runner, heads = make("llama"), some_heads(sequential=sequential, draft=draft)
    hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    request = ProposalRequest(hidden=hidden, contexts=[[1, 4], [7], [9, 30]], k=5, rows=[2, 0, 1], min_survival=0.01)
    for found, expected in zip(
        runner.bind_heads(heads).propose(request), heads_in_torch(runner, heads).propose(request), strict=True
    ):
        assert found.tokens.tolist() == expected.tokens.tolist()
        np.testing.assert_allclose(found.probabilities, expected.probabilities, rtol=1e-4)
        assert np.array_equal(found.below, expected.below) if sequential else found.below is None
