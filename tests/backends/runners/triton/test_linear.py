"""Linear layers: right, and the same bits for a row in any tile, chain and company."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.backends.runners.triton.device import DEVICE, interpreted, on_device
from tests.support.engine_helpers import one_thread

from backends.runners.triton import interpreter, ops  # isort: skip
from backends.runners.triton.ops import LinearTile  # isort: skip

__all__ = ["one_thread"]

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
N, K = 80, 96
TILING = replace(ops.default_tiling(), chain_unit=16, least_chain=16, columns=64)


def inputs(rows: int, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    x, w = torch.randn(rows, K, generator=made), torch.randn(2 * N, K, generator=made)
    return on_device(x.to(dtype)), on_device(w.to(dtype))


def run(x: torch.Tensor, w: torch.Tensor, **options: Any) -> torch.Tensor:
    columns = len(w) // 2 if options.get("gated") else len(w)
    out = torch.full((len(x), columns), torch.nan, dtype=x.dtype, device=DEVICE)
    assert ops.linear(TILING, x, w, out, len(x), **options) == 0
    return out


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_row_is_right_and_has_the_same_bits_in_every_tile_and_company(dtype: torch.dtype) -> None:
    x, w = inputs(19, dtype)
    w = w[:N]
    expected = run(x, w)
    assert off(expected, x.double() @ w.double().T) < TOLERANCE[dtype]
    for tile in (LinearTile(32, 64, 32, 3), LinearTile(16, 128, 16, 2), LinearTile(64, 64, 32, 4)):
        assert torch.equal(run(x, w, tile=tile), expected), tile
    for rows in ([7], [18, 3], list(range(18, 1, -1))):
        assert torch.equal(run(x[rows].contiguous(), w), expected[rows]), rows


def test_what_is_done_to_the_sum_is_right() -> None:
    x, w = inputs(5, torch.float32)
    bias, residual = torch.linspace(-2, 2, N, device=DEVICE), torch.ones(5, N, device=DEVICE)
    exact = x.double() @ w.double().T
    gate, up = exact[:, :N], exact[:, N:]
    assert off(run(x, w, gated=True), F.silu(gate) * up) < 1e-5
    assert off(run(x, w[:N], bias=bias), gate + bias) < 1e-6
    assert off(run(x, w[:N], bias=bias, silu=True), F.silu(gate + bias)) < 1e-5
    assert off(run(x, w[:N], residual=residual), gate + residual) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_chains_give_the_same_bits_in_one_program_and_in_several(dtype: torch.dtype) -> None:
    x, w = inputs(17, dtype)
    w = w[:N].contiguous()
    chains = TILING.chains(N, K)
    assert chains == 2
    sums = {}
    for split in (True, False):
        part = torch.full((chains, 17, N), torch.nan, device=DEVICE)
        found = ops.linear(TILING, x, w, x, 17, part=part, split=split)
        assert found == (chains if split else 1)
        sums[split] = part[0] + part[1] if split else part[0]
    assert torch.equal(sums[True], sums[False])
    assert off(sums[True], x.double() @ w.double().T) < 1e-6
    last = torch.full((chains, 1, N), torch.nan, device=DEVICE)
    ops.linear(TILING, x[16:].contiguous(), w, x, 1, part=last)
    assert torch.equal(last[0, 0] + last[1, 0], sums[False][16])


@interpreted
def test_a_product_that_depends_on_the_row_s_place_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = interpreter.chain_of_products

    def crooked(x: Any, y: Any, total: Any) -> Any:
        made = whole(x, y, total)
        made[:, 4:] *= 1.0000002
        return made

    monkeypatch.setattr(interpreter, "chain_of_products", crooked)
    with pytest.raises(AssertionError):
        test_a_row_is_right_and_has_the_same_bits_in_every_tile_and_company(torch.float32)


@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (4096, 14336), (576, 1536), (2048, 8192), (64, 96)])
def test_the_number_of_chains_is_the_shape_s(n: int, k: int) -> None:
    chains = ops.GPU.chains(n, k)
    assert 1 <= chains <= 8
    assert k % chains == 0
    assert chains == 1 or k // chains >= ops.GPU.least_chain
