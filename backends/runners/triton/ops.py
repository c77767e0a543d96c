"""Launching the kernels: grids, tiles and options. Nothing here allocates, so that a CUDA graph can hold all of it."""

# Numbers that a kernel is compiled for are given as ints.
# pyright: reportArgumentType=false

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from triton import knobs

from backends.runners.triton import interpreter
from backends.runners.triton.tiling import GPU, INTERPRETER, Tiling, power_of_two
from backends.runners.triton.weights import HeadShape

if knobs.runtime.interpret:
    # Kernels decide when they are imported whether they run in the interpreter.
    interpreter.install()

from backends.runners.triton.attention import attend_kernel, merge_kernel
from backends.runners.triton.linear import linear_kernel
from backends.runners.triton.rows import add_norm_kernel, copy_slots_kernel, rotate_store_kernel, take_kernel

INTERPRETED: bool = bool(knobs.runtime.interpret)
# From here on one program sums all chains of a linear layer: partial sums of many rows would cost more than they gain.
_MOST_SPLIT_ROWS = 64


def launch(warps: int, stages: int = 3) -> dict[str, Any]:
    """A launch's options. R5: no product and sum are contracted, which a compiler does here and not there."""
    return {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": False}


def default_tiling() -> Tiling:
    return INTERPRETER if INTERPRETED else GPU


@dataclass(frozen=True, slots=True)
class LinearTile:
    """Free sizes of one launch of a linear layer: they change its speed, and no bit. See ``linear_kernel``."""

    rows: int
    columns: int
    depth: int
    stages: int


def linear_tile(tiling: Tiling, rows: int, chain: int, *, gated: bool) -> LinearTile:
    """The tile for ``rows`` rows and chains of ``chain`` elements."""
    high = next((size for size in (16, 32, 64) if rows <= size), 128)
    depth = tiling.depth if high < 128 and not gated else min(tiling.depth, 64)
    return LinearTile(high, tiling.columns, tiling.depth_of(chain, depth), 4 if high < 64 else 3)


def linear(
    tiling: Tiling,
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    rows: int,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    part: torch.Tensor | None = None,
    gated: bool = False,
    silu: bool = False,
    tile: LinearTile | None = None,
    split: bool | None = None,
) -> int:
    """``out`` [rows, N], or partial sums in ``part``, of ``x`` [rows, K]; see ``linear_kernel``. Returns how many
    partial sums there are, 0 when ``out`` is whole. ``tile`` and ``split``: for tests; they change no bit."""
    n, k = weight.shape[0] // (2 if gated else 1), weight.shape[1]
    chains = 1 if part is None else tiling.chains(n, k)
    if split is None:
        split = chains > 1 and rows <= _MOST_SPLIT_ROWS
    tile = tile or linear_tile(tiling, rows, k // chains, gated=gated)
    grid = (-(-n // tile.columns) * -(-rows // tile.rows), chains if split else 1)
    linear_kernel[grid](
        x,
        weight,
        weight if bias is None else bias,
        x if residual is None else residual,
        out,
        out if part is None else part,
        rows,
        n,
        k,
        x.stride(0),
        out.stride(0),
        SEG=k // chains,
        SEGS=chains,
        SPLIT=split,
        PART=part is not None,
        GATED=gated,
        SILU=silu,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        BR=tile.rows,
        BN=tile.columns,
        BK=tile.depth,
        **launch(4, tile.stages),
    )
    return 0 if part is None else chains if split else 1


def take(table: torch.Tensor, index: torch.Tensor, out: torch.Tensor, rows: int) -> None:
    """``out[r] = table[index[r]]`` for ``rows`` rows."""
    width = table.shape[1]
    take_kernel[(rows,)](table, index, out, width, B=power_of_two(width), **launch(4))


def add_norm(
    x: torch.Tensor, part: torch.Tensor, weight: torch.Tensor, normed: torch.Tensor, rows: int, eps: float, chains: int
) -> None:
    """``x`` += the ``chains`` partial sums; ``normed``: its RMS norm."""
    width = x.shape[1]
    add_norm_kernel[(rows,)](x, part, weight, normed, rows, width, eps, SEGS=chains, B=power_of_two(width), **launch(8))


def rotate_store(
    tiling: Tiling,
    shape: HeadShape,
    qkv: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    q: torch.Tensor,
    pools: tuple[torch.Tensor, torch.Tensor],
    positions: torch.Tensor,
    slots: torch.Tensor,
    rotation: tuple[torch.Tensor, torch.Tensor],
    rows: int,
    eps: float,
) -> None:
    """See ``rotate_store_kernel``. ``norms``: weights of the norms of queries and keys; ``rotation``: cos and sin."""
    block = min(2 * tiling.heads, power_of_two(shape.heads + shape.kv_heads))
    rotate_store_kernel[(rows, -(-(shape.heads + shape.kv_heads) // block))](
        qkv,
        *(norms or (qkv, qkv)),
        q,
        *pools,
        positions,
        slots,
        *rotation,
        qkv.stride(0),
        eps,
        HEADS=shape.heads,
        KV=shape.kv_heads,
        D=shape.size,
        NORM=norms is not None,
        HB=block,
        **launch(4),
    )


@dataclass(frozen=True, slots=True)
class AttentionBuffers:
    """``part_o`` [rows, splits, heads, D] and ``part_ml`` [rows, splits, heads, 2], float32: a step's pieces."""

    part_o: torch.Tensor
    part_ml: torch.Tensor

    @classmethod
    def empty(cls, tiling: Tiling, shape: HeadShape, rows: int, longest: int, device: torch.device) -> AttentionBuffers:
        sizes = (rows, tiling.splits(longest), shape.heads)
        # NaN at first: what is read without having been written must not pass for a number.
        made = (torch.full((*sizes, width), math.nan, device=device) for width in (shape.size, 2))
        return cls(*made)


def attend(
    tiling: Tiling,
    shape: HeadShape,
    q: torch.Tensor,
    pools: tuple[torch.Tensor, torch.Tensor],
    buffers: AttentionBuffers,
    step: dict[str, torch.Tensor],
    out: torch.Tensor,
    rows: int,
    scale: float,
    programs: int,
) -> None:
    """Attention of one layer into ``out`` [rows, heads, D]: ``attend_kernel`` by ``programs`` programs, then
    ``merge_kernel``. ``step``: ``items``, ``count``, ``row_n``, ``pages`` and ``tail`` on the device."""
    splits = buffers.part_o.shape[1]
    attend_kernel[(programs,)](
        q,
        *pools,
        buffers.part_o,
        buffers.part_ml,
        step["items"],
        step["count"],
        step["row_n"],
        step["pages"],
        step["tail"],
        scale * math.log2(math.e),
        KV=shape.kv_heads,
        GROUP=shape.group,
        D=shape.size,
        SPLITS=splits,
        WINDOW=shape.window,
        BM=tiling.queries,
        KT=tiling.tile,
        **launch(4, 2),
    )
    block = min(tiling.heads, power_of_two(shape.heads))
    merge_kernel[(rows, -(-shape.heads // block))](
        buffers.part_o,
        buffers.part_ml,
        step["row_n"],
        out,
        HEADS=shape.heads,
        D=shape.size,
        SPLITS=splits,
        WINDOW=shape.window,
        PIECE=tiling.piece,
        KT=tiling.tile,
        HB=block,
        **launch(4),
    )


def copy_slots(
    pools: tuple[torch.Tensor, torch.Tensor], source: torch.Tensor, target: torch.Tensor, count: int
) -> None:
    """``pools`` [layers, pages, KV, 16, D] each: the first ``count`` slots of ``source`` to those of ``target``."""
    layers, _, kv, _, size = pools[0].shape
    block = power_of_two(kv * size)
    copy_slots_kernel[(count, layers)](*pools, source, target, pools[0].stride(0), KV=kv, D=size, B=block, **launch(4))
