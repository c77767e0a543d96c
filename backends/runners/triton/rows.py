"""What is done to each row by itself: embeddings, norms, rotary positions, and taking rows out."""

from __future__ import annotations

import triton
import triton.language as tl

PAGE = tl.constexpr(16)


@triton.jit
def take_kernel(table, index, out, H, B: tl.constexpr):
    """``out`` [rows, H]: row ``index[r]`` of ``table`` [n, H]. For embeddings, and for the rows that are outputs.

    R5: a copy, one program a row. R7: rows that fill a bucket take row 0.
    """
    r = tl.program_id(0)
    i = tl.arange(0, B)
    source = tl.load(index + r).to(tl.int64)
    tl.store(out + r * H + i, tl.load(table + source * H + i, mask=i < H), mask=i < H)


@triton.jit(do_not_specialize=["rows"])
def add_norm_kernel(x, part, weight, normed, rows, H, eps, SEGS: tl.constexpr, B: tl.constexpr):
    """``x`` [rows, H] += ``part[0]`` + ``part[1]`` + ... (of [SEGS, rows, H] float32), in place, and ``normed``
    [rows, H]: its RMS norm times ``weight`` [H]. SEGS 0: nothing is added.

    R3: chains are added in ascending order starting from zero, as the linear layer does it within one program. R5: one
    program a row, of one block whatever the number of rows. R6: what lies beyond H counts as zero.
    """
    r = tl.program_id(0)
    i = tl.arange(0, B)
    keep = i < H
    v = tl.load(x + r * H + i, mask=keep, other=0.0).to(tl.float32)
    if SEGS > 0:
        delta = tl.zeros((B,), tl.float32)
        for s in tl.static_range(SEGS):
            delta = delta + tl.load(part + (s * rows + r).to(tl.int64) * H + i, mask=keep, other=0.0)
        rounded = (v + delta.to(x.dtype.element_ty).to(tl.float32)).to(x.dtype.element_ty)
        tl.store(x + r * H + i, rounded, mask=keep)
        v = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(v * v, axis=0) / H + eps)
    w = tl.load(weight + i, mask=keep, other=0.0).to(tl.float32)
    scaled = (v * scale).to(x.dtype.element_ty).to(tl.float32) * w
    tl.store(normed + r * H + i, scaled.to(x.dtype.element_ty), mask=keep)


@triton.jit
def rotate_store_kernel(
    qkv,
    q_norm,
    k_norm,
    q_out,
    k_pool,
    v_pool,
    positions,
    slots,
    cos,
    sin,
    stride_qkv,
    eps,
    HEADS: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    NORM: tl.constexpr,
    HB: tl.constexpr,
):
    """Of ``qkv`` [rows, (HEADS + 2 KV) D]: rotated queries into ``q_out`` [rows, HEADS, D], rotated keys and the values
    into ``slots`` of the pools [pages, KV, 16, D].

    ``cos``, ``sin`` [context, D / 2] float32. NORM: queries and keys are first RMS-normed by ``q_norm`` and ``k_norm``
    [D]. Grid: rows, blocks of HB query and key heads.

    R5: each head by itself, in float32. R7: rows that fill a bucket have the slot that nobody reads.
    """
    r = tl.program_id(0)
    h = tl.program_id(1) * HB + tl.arange(0, HB)
    half: tl.constexpr = D // 2
    i = tl.arange(0, half)
    is_q, is_k = h < HEADS, (h >= HEADS) & (h < HEADS + KV)
    there = (is_q | is_k)[:, None]
    at = qkv + r * stride_qkv + h[:, None] * D + i[None, :]
    a = tl.load(at, mask=there, other=0.0).to(tl.float32)
    b = tl.load(at + half, mask=there, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(a * a + b * b, axis=1) / D + eps)[:, None]
        of_q = is_q[:, None]
        wa = tl.where(of_q, tl.load(q_norm + i)[None, :], tl.load(k_norm + i)[None, :]).to(tl.float32)
        wb = tl.where(of_q, tl.load(q_norm + half + i)[None, :], tl.load(k_norm + half + i)[None, :]).to(tl.float32)
        a = (a * scale).to(q_out.dtype.element_ty).to(tl.float32) * wa
        b = (b * scale).to(q_out.dtype.element_ty).to(tl.float32) * wb
    p = tl.load(positions + r)
    c = tl.load(cos + p * half + i)[None, :]
    s = tl.load(sin + p * half + i)[None, :]
    ra = (a * c - b * s).to(q_out.dtype.element_ty)
    rb = (b * c + a * s).to(q_out.dtype.element_ty)
    q_at = q_out + (r * HEADS + h[:, None]) * D + i[None, :]
    tl.store(q_at, ra, mask=is_q[:, None])
    tl.store(q_at + half, rb, mask=is_q[:, None])
    slot = tl.load(slots + r).to(tl.int64)
    to = ((slot // PAGE) * KV + (h[:, None] - HEADS)) * (PAGE * D) + (slot % PAGE) * D + i[None, :]
    tl.store(k_pool + to, ra, mask=is_k[:, None])
    tl.store(k_pool + to + half, rb, mask=is_k[:, None])
    v_at = at + KV * D
    tl.store(v_pool + to, tl.load(v_at, mask=is_k[:, None]), mask=is_k[:, None])
    tl.store(v_pool + to + half, tl.load(v_at + half, mask=is_k[:, None]), mask=is_k[:, None])


@triton.jit
def copy_slots_kernel(k_pool, v_pool, source, target, LAYER, KV: tl.constexpr, D: tl.constexpr, B: tl.constexpr):
    """Keys and values of slot ``source[i]`` to slot ``target[i]`` in every layer; LAYER: elements from one layer to the
    next. No slot may be both. Grid: pairs, layers. R5: a copy."""
    i = tl.program_id(0)
    base = tl.program_id(1).to(tl.int64) * LAYER
    s, t = tl.load(source + i).to(tl.int64), tl.load(target + i).to(tl.int64)
    j = tl.arange(0, B)
    keep = j < KV * D
    inner = base + (j // D) * (PAGE * D) + j % D
    a = inner + (s // PAGE) * (KV * PAGE * D) + (s % PAGE) * D
    b = inner + (t // PAGE) * (KV * PAGE * D) + (t % PAGE) * D
    tl.store(k_pool + b, tl.load(k_pool + a, mask=keep), mask=keep)
    tl.store(v_pool + b, tl.load(v_pool + a, mask=keep), mask=keep)
