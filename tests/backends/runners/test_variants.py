"""Every variant of the kernels that this CPU can run gives the same bits, so one model has one arithmetic."""

from __future__ import annotations

import ctypes
import random

import numpy as np
import pytest
import torch

from backends.runners.base import ProposalRequest
from backends.runners.native import bindings as lib
from backends.runners.native.runner import NativeRunner
from backends.sampling.rows import RowSampling
from tests.backends.runners import test_kernel_units as kernel_units
from tests.backends.runners.test_kernels import DTYPES, alone, random_heads
from tests.support.engine_helpers import make_runner, native_or_skip, random_prompt, tiny_lm

every_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


@pytest.fixture(scope="module")
def variants() -> list[str]:
    native_or_skip()
    found = lib.runnable_variants(ctypes.CDLL(str(lib.compiled(kernel_units.SOURCE))))
    if len(found) < 2:
        pytest.skip(f"this CPU can run one variant only: {found[0]}")
    return found


def runner_of(variant: str, architecture: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> NativeRunner:
    built = lib.compiled(lib.SOURCE_FOLDER / lib.SOURCES[0])
    monkeypatch.setattr(lib, "load_library", lambda: lib.bind(built, variant))
    made = make_runner("native", tiny_lm(architecture, dtype=dtype))
    assert isinstance(made, NativeRunner)
    assert made.library.variant == variant
    return made


@every_dtype
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_whole_models(
    architecture: str, dtype: torch.dtype, variants: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hidden states, logits, draws and proposals of both kinds of heads."""
    tokens, found = random_prompt(random.Random(1), 75, 75), []
    for variant in variants:
        runner = runner_of(variant, architecture, dtype, monkeypatch)
        hidden = alone(runner, tokens)
        logits = runner.logits(hidden).clone()
        bits = [hidden.float(), logits]
        if architecture == "llama":
            contexts = [[token] for token in tokens]
            for sequential in (False, True):
                heads = random_heads(None, "hidden+token", sequential=sequential)
                for each in runner.bind_heads(heads).propose(ProposalRequest(hidden, contexts, 5)):
                    bits += [torch.as_tensor(each.tokens).float(), torch.as_tensor(each.probabilities)]
        ones = np.ones(75, np.float32)
        params = RowSampling(ones, np.full(75, 20, np.int32), 0.9 * ones, 0.0 * ones, np.linspace(0, 0.99, 75))
        bits.append(torch.tensor(runner.sample(logits, list(range(75)), params)).float())
        found.append(bits)
    for variant, bits in zip(variants[1:], found[1:], strict=True):
        for mine, best in zip(bits, found[0], strict=True):
            assert torch.equal(mine, best), variant


def test_sums_exponentials_and_rounding(variants: list[str]) -> None:
    x = np.random.default_rng(0).integers(0, 1 << 32, 4096, dtype=np.uint32).view(np.float32)
    found = []
    for variant in variants:
        units = kernel_units.units_of(variant)
        exps, total, rounded = np.empty(4096, np.float32), np.empty(1, np.float32), np.empty(4096, np.float32)
        halves = np.empty((2, 4096), np.uint16)
        units.unit_exp(x.ctypes.data, 4096, exps.ctypes.data)
        units.unit_sum(np.linspace(1, 3, 16, dtype=np.float32).ctypes.data, total.ctypes.data)
        units.unit_to_bf16(x.ctypes.data, 4096, halves[0].ctypes.data, rounded.ctypes.data, halves[1].ctypes.data)
        found.append([exps.view(np.uint32), total, rounded.view(np.uint32), halves])
    for variant, theirs in zip(variants[1:], found[1:], strict=True):
        for mine, best in zip(theirs, found[0], strict=True):
            np.testing.assert_array_equal(mine, best, variant)


@every_dtype
@pytest.mark.parametrize("int8", [False, True], ids=["whole", "int8"])
@pytest.mark.parametrize("rows", [1, 6, 13, 97])
def test_products_of_numbers_of_any_size(dtype: torch.dtype, int8: bool, rows: int, variants: list[str]) -> None:
    """Also of denormal ones, and sums that are: they are taken for zero in every variant."""
    generator, k_size, n = torch.Generator().manual_seed(rows), 208, 48

    def spread_out(*shape: int) -> torch.Tensor:
        scale = torch.randint(-70, 20, shape, generator=generator).float().exp2()
        values = torch.randn(*shape, generator=generator) * scale
        values.flatten()[::7] *= 2.0**-62
        return values.to(dtype)

    pack = kernel_units.pack_groups if int8 else kernel_units.pack
    x, weight, found = spread_out(rows, k_size), pack(spread_out(n, k_size)), []
    x[0] *= 2.0**-62
    for variant in variants:
        units = kernel_units.units_of(variant)
        pool, out = units.mg_pool_new(2), torch.full((rows, n), torch.nan)
        arguments = (x.data_ptr(), k_size, rows, k_size, weight.data_ptr(), n // 16, None, out.data_ptr(), None, 0)
        units.unit_linear(pool, int(dtype == torch.bfloat16), int8, kernel_units.STORE, *arguments)
        units.mg_pool_free(pool)
        found.append(out)
    for variant, out in zip(variants[1:], found[1:], strict=True):
        assert torch.equal(out.view(torch.int32), found[0].view(torch.int32)), variant
