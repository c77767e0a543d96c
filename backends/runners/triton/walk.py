"""Which candidates are accepted, and their keys and values: sample and match on the device."""

from __future__ import annotations

import triton
import triton.language as tl

PAGE = tl.constexpr(16)


@triton.jit
def walk_kernel(
    drawn,
    tokens,
    parents,
    first_row,
    num_rows,
    out_tokens,
    out_rows,
    out_count,
    DEPTH: tl.constexpr,
    B: tl.constexpr,
):
    """From each sequence's root down, always to the child that holds the token drawn at its parent; of several the
    first, as ``Draft.children`` has it.

    ``drawn``, ``tokens``, ``parents`` [rows]: the token drawn at a row, the one that it holds, and its parent's row
    counted from the root's 0 (the root's own: -1). ``first_row``, ``num_rows`` [sequences]. Out: ``out_tokens``,
    ``out_rows`` [sequences, DEPTH + 1] and how many of them count, ``out_count`` [sequences]. A drawn -1 is no token
    and ends the walk. Grid: sequences. R6: integers only."""
    s = tl.program_id(0)
    first, rows = tl.load(first_row + s), tl.load(num_rows + s)
    i = tl.arange(0, B)
    held = tl.load(tokens + first + i, mask=i < rows, other=-2)
    above = tl.load(parents + first + i, mask=i < rows, other=-2)
    at = tl.full((), 0, tl.int32)
    count = tl.full((), 0, tl.int32)
    going = tl.full((), 1, tl.int32)
    for _ in range(DEPTH + 1):
        if going == 1:
            token = tl.load(drawn + first + at)
            tl.store(out_tokens + s * (DEPTH + 1) + count, token)
            tl.store(out_rows + s * (DEPTH + 1) + count, at)
            count += 1
            child = tl.min(tl.where((above == at) & (held == token), i, B), 0)
            going = (child < B).to(tl.int32)
            at = tl.where(child < B, child, at)
    tl.store(out_count + s, count)


@triton.jit
def commit_kernel(
    k_pool,
    v_pool,
    out_rows,
    out_count,
    first_row,
    slots,
    root_position,
    page_at,
    pages,
    LAYER,
    KV: tl.constexpr,
    D: tl.constexpr,
    DEPTH: tl.constexpr,
    B: tl.constexpr,
):
    """Keys and values of accepted candidates from their slots into their sequence's pages, in every layer.

    ``out_rows``, ``out_count``: what :func:`walk_kernel` found. ``slots`` [rows]: where each row's key lies.
    ``root_position``, ``page_at`` [sequences]: the root's position, and where the page table begins in ``pages``.
    LAYER: elements from one layer to the next. Grid: sequences, layers. R5: a copy."""
    s = tl.program_id(0)
    base = tl.program_id(1).to(tl.int64) * LAYER
    first, position, at = tl.load(first_row + s), tl.load(root_position + s), tl.load(page_at + s)
    j = tl.arange(0, B)
    keep = j < KV * D
    inner = base + (j // D) * (PAGE * D) + j % D
    for step in range(1, tl.load(out_count + s)):
        source = tl.load(slots + first + tl.load(out_rows + s * (DEPTH + 1) + step)).to(tl.int64)
        p = position + step
        page = tl.load(pages + at + p // PAGE).to(tl.int64)
        a = inner + (source // PAGE) * (KV * PAGE * D) + (source % PAGE) * D
        b = inner + page * (KV * PAGE * D) + (p % PAGE) * D
        tl.store(k_pool + b, tl.load(k_pool + a, mask=keep), mask=keep)
        tl.store(v_pool + b, tl.load(v_pool + a, mask=keep), mask=keep)
