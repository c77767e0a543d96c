"""What Medusa heads need beside linear layers: their input, and the best guesses with their probabilities."""

from __future__ import annotations

import triton
import triton.language as tl

ABSENT = tl.constexpr(0x7FFFFFFF)


@triton.jit
def head_input_kernel(states, above, table, tokens, taken, out, H, TOKEN: tl.constexpr, B: tl.constexpr):
    """What ``W_up`` of a head is fed: ``out`` [rows, 2 H], the normed state ``above[r]`` of ``states`` [n, H], then the
    normed embedding of ``tokens[r]`` out of ``table`` [V, H]; without TOKEN the state alone, [rows, H]. ``taken``
    [rows, H]: the state itself, which the head's result is added to. Grid: rows. R5.
    """
    r = tl.program_id(0)
    i = tl.arange(0, B)
    keep = i < H
    width = 2 * H if TOKEN else H
    x = tl.load(states + tl.load(above + r).to(tl.int64) * H + i, mask=keep, other=0.0)
    tl.store(taken + r * H + i, x, mask=keep)
    x = x.to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, axis=0) / H + 1e-6)
    tl.store(out + r * width + i, x.to(out.dtype.element_ty), mask=keep)
    if TOKEN:
        e = tl.load(table + tl.load(tokens + r).to(tl.int64) * H + i, mask=keep, other=0.0).to(tl.float32)
        e = e * tl.rsqrt(tl.sum(e * e, axis=0) / H + 1e-12)
        tl.store(out + r * width + H + i, e.to(out.dtype.element_ty), mask=keep)


@triton.jit
def block_top_kernel(logits, values, columns, tops, sums, V, stride, BLOCKS, K: tl.constexpr, B: tl.constexpr):
    """The K best of one block of a row's ``logits`` [rows, V] float32, best first, ties by the lower column:
    ``values``, ``columns`` [rows, BLOCKS, K]; and the block's maximum and its sum of exp(logit - maximum): ``tops``,
    ``sums`` [rows, BLOCKS]. Grid: rows, blocks. Guesses decide nothing about tokens, so the sum may be of floats."""
    r, block = tl.program_id(0), tl.program_id(1)
    i = block * B + tl.arange(0, B)
    v = tl.load(logits + r.to(tl.int64) * stride + i, mask=i < V, other=float("-inf"))
    v = tl.where(v != v, float("-inf"), v)
    top = tl.max(v, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    tl.store(tops + r * BLOCKS + block, top)
    tl.store(sums + r * BLOCKS + block, tl.sum(tl.exp(v - base), 0))
    at = (r * BLOCKS + block) * K
    for rank in range(K):
        best = tl.max(v, 0)
        column = tl.min(tl.where(v == best, i, ABSENT), 0)
        tl.store(values + at + rank, best)
        tl.store(columns + at + rank, column)
        v = tl.where(i == column, float("-inf"), v)


@triton.jit
def top_kernel(
    values, columns, tops, sums, ids, tokens, chances, BLOCKS, IDS: tl.constexpr, K: tl.constexpr, B: tl.constexpr
):
    """Over a row's blocks: the K best ``tokens`` [rows, K] and their softmax probabilities ``chances`` [rows, K]. IDS:
    columns stand for the tokens ``ids`` [V]. B is at least BLOCKS * K. Grid: rows."""
    r = tl.program_id(0)
    i = tl.arange(0, B)
    top = tl.load(tops + r * BLOCKS + i, mask=i < BLOCKS, other=float("-inf"))
    highest = tl.max(top, 0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.sum(tl.load(sums + r * BLOCKS + i, mask=i < BLOCKS, other=0.0) * tl.exp(top - base), 0)
    there = i < BLOCKS * K
    v = tl.load(values + r * BLOCKS * K + i, mask=there, other=float("-inf"))
    column = tl.load(columns + r * BLOCKS * K + i, mask=there, other=ABSENT)
    for rank in range(K):
        best = tl.max(v, 0)
        found = tl.min(tl.where(v == best, column, ABSENT), 0)
        chance = tl.where((total > 0.0) & (best > float("-inf")), tl.exp(best - base) / total, 0.0)
        token = tl.load(ids + found) if IDS else found
        tl.store(tokens + r * K + rank, token)
        tl.store(chances + r * K + rank, chance)
        v = tl.where(column == found, float("-inf"), v)
        column = tl.where(column == found, ABSENT, column)
