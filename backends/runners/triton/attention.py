"""Attention over the page pool: each row sees its own path, in pieces that its own length decides."""

# Inside a kernel constants and loaded numbers mix.
# pyright: reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

PAGE = tl.constexpr(16)


@triton.jit
def attend_kernel(
    q,
    k_pool,
    v_pool,
    part_o,
    part_ml,
    items,
    num_items,
    row_n,
    pages,
    tail,
    scale_log2,
    KV: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    BM: tl.constexpr,
    KT: tl.constexpr,
):
    """One piece of attention after another, for rows that see the same keys in it.

    ``q`` [rows, KV * GROUP, D]; pools [pages, KV, 16, D]; ``items`` [n, 8] as :mod:`backends.runners.triton.work_list`
    makes them, ``num_items`` [1] of them; ``row_n`` [rows]: keys that each row sees. ``pages`` and ``tail``: page
    tables and slots that items point into. ``scale_log2``: the scores' scale times log2(e). WINDOW: keys that a row
    sees at most, 0 for all. Out: of each piece the weighted values, not yet divided, ``part_o`` [rows, SPLITS, heads,
    D], and the maximum and the sum of the weights, ``part_ml`` [rows, SPLITS, heads, 2], float32. Grid: any number of
    programs; they share the items times the key heads.

    R1: BM is 64 on a GPU, for any number of rows. R2: a tile's scores and its weighted values each go through one
    accumulator. R4: a piece starts empty and goes through tiles of KT keys that start at multiples of KT; a tile that a
    row sees nothing of leaves its state as it was, bit by bit, so it does not matter who else is in the item. R6: what
    is hidden has weight zero, and its values are not read where no row of the item sees them. R7: rows that fill a
    bucket are in no item.
    """
    total = tl.load(num_items) * KV
    mi = tl.arange(0, BM)
    d = tl.arange(0, D)
    kt = tl.arange(0, KT)
    for work in range(tl.program_id(0), total, tl.num_programs(0)):
        item = items + (work // KV) * 8
        h = work % KV
        first, rows = tl.load(item), tl.load(item + 1)
        start, end = tl.load(item + 2), tl.load(item + 3)
        split, page_at = tl.load(item + 4), tl.load(item + 5)
        full, tail_at = tl.load(item + 6), tl.load(item + 7)
        r = first + mi // GROUP
        head = h * GROUP + mi % GROUP
        used = mi < rows * GROUP
        n = tl.load(row_n + r, mask=used, other=0)
        # Keys before `low` no row of the item sees; whole tiles of them are passed over.
        low = tl.min(tl.where(used, n, 0x7FFFFFFF), 0) - WINDOW if WINDOW else 0
        begin = tl.maximum(start, low // KT * KT) if WINDOW else start
        q_at = q + (r * (KV * GROUP) + head)[:, None] * D + d[None, :]
        qt = tl.load(q_at, mask=used[:, None], other=0.0)
        m = tl.full((BM,), float("-inf"), tl.float32)
        weight = tl.zeros((BM,), tl.float32)
        acc = tl.zeros((BM, D), tl.float32)
        for t in range(begin, end, KT):
            pos = t + kt
            inside = (pos < end) & (pos >= low)
            paged = inside & (pos < full)
            page = tl.load(pages + page_at + pos // PAGE, mask=paged, other=0)
            own = tl.load(tail + tail_at + pos - full, mask=inside & (pos >= full), other=0)
            slot = tl.where(paged, page * PAGE + pos % PAGE, own).to(tl.int64)
            to = ((slot // PAGE) * KV + h) * (PAGE * D) + (slot % PAGE) * D
            keys = tl.load(k_pool + to[None, :] + d[:, None], mask=inside[None, :], other=0.0)
            s = tl.dot(qt, keys, input_precision="ieee") * scale_log2
            seen = pos[None, :] < n[:, None]
            if WINDOW:
                seen = seen & (pos[None, :] >= n[:, None] - WINDOW)
            s = tl.where(seen, s, float("-inf"))
            m_new = tl.maximum(m, tl.max(s, 1))
            base = tl.where(m_new == float("-inf"), 0.0, m_new)
            p = tl.exp2(s - base[:, None])
            alpha = tl.exp2(m - base)
            weight = weight * alpha + tl.sum(p, 1)
            values = tl.load(v_pool + to[:, None] + d[None, :], mask=inside[:, None], other=0.0)
            acc = tl.dot(p.to(values.dtype), values, acc * alpha[:, None], input_precision="ieee")
            m = m_new
        at = (r * SPLITS + split) * (KV * GROUP) + head
        tl.store(part_ml + at * 2, m, mask=used)
        tl.store(part_ml + at * 2 + 1, weight, mask=used)
        tl.store(part_o + at[:, None].to(tl.int64) * D + d[None, :], acc, mask=used[:, None])


@triton.jit
def merge_kernel(
    part_o,
    part_ml,
    row_n,
    out,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    PIECE: tl.constexpr,
    KT: tl.constexpr,
    HB: tl.constexpr,
):
    """A row's pieces, as :func:`attend_kernel` left them, into ``out`` [rows, HEADS, D]. Grid: rows, blocks of HB
    heads.

    R4: pieces are merged in ascending order by one formula; which there are says the row's own length ``row_n`` [rows],
    as ``Tiling.pieces`` does. R7: a row of no keys gets zeros.
    """
    r = tl.program_id(0)
    h = tl.program_id(1) * HB + tl.arange(0, HB)
    there = h < HEADS
    d = tl.arange(0, D)
    n = tl.load(row_n + r)
    whole = n // PIECE
    tiles = n // KT * KT
    low = tl.maximum(n - WINDOW, 0) if WINDOW else 0
    m = tl.full((HB,), float("-inf"), tl.float32)
    weight = tl.zeros((HB,), tl.float32)
    acc = tl.zeros((HB, D), tl.float32)
    for split in range(low // PIECE, whole + 2):
        end = tl.where(split < whole, (split + 1) * PIECE, tl.where(split == whole, tiles, n))
        start = tl.where(split < whole, split * PIECE, tl.where(split == whole, whole * PIECE, tiles))
        if (end > start) & (end > low):
            at = (r * SPLITS + split) * HEADS + h
            m_piece = tl.load(part_ml + at * 2, mask=there, other=0.0)
            w_piece = tl.load(part_ml + at * 2 + 1, mask=there, other=0.0)
            o_piece = tl.load(part_o + at[:, None].to(tl.int64) * D + d[None, :], mask=there[:, None], other=0.0)
            m_new = tl.maximum(m, m_piece)
            a, b = tl.exp2(m - m_new), tl.exp2(m_piece - m_new)
            weight = weight * a + w_piece * b
            acc = acc * a[:, None] + o_piece * b[:, None]
            m = m_new
    result = acc / tl.where(weight > 0.0, weight, 1.0)[:, None]
    tl.store(out + (r * HEADS + h[:, None]) * D + d[None, :], result.to(out.dtype.element_ty), mask=there[:, None])
