"""Linear layers: weights stand on the M side of the matrix instruction, rows on its N side."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def linear_kernel(
    x,
    w,
    bias,
    residual,
    out,
    part,
    rows,
    N,
    K,
    stride_x,
    stride_out,
    SEG: tl.constexpr,
    SEGS: tl.constexpr,
    SPLIT: tl.constexpr,
    PART: tl.constexpr,
    GATED: tl.constexpr,
    SILU: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BR: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """``x`` [rows, K] times the transpose of ``w`` [N, K]: ``out`` [rows, N] in its own dtype, or partial sums.

    K is summed in SEGS chains of SEG elements. SPLIT: each chain has a program of its own, which leaves its sums in
    ``part`` [SEGS, rows, N] float32. Else one program sums all chains one after the other, and with PART leaves the
    total in ``part`` [1, rows, N]. GATED: ``w`` [2N, K] holds gates, then ups, and ``out`` is silu(gate) * up. BIAS:
    ``bias`` [N] is added to the total; SILU then bends it; RESIDUAL: ``residual`` [rows, N] is added to what was
    rounded. Grid: tiles of N times tiles of rows, chains.

    R1: BN is 64 or more. R2: one accumulator goes through a chain's K in ascending order, so BK is free. R3: SEGS
    depends on the weight's shape; split or not, chains are added in ascending order starting from zero. R5: ``rows`` is
    not specialised. R6, R7: rows and columns beyond the end read row 0 and are not stored.
    """
    tiles_r = tl.cdiv(rows, BR)
    pid = tl.program_id(0)
    n = (pid // tiles_r) * BN + tl.arange(0, BN)
    r = (pid % tiles_r) * BR + tl.arange(0, BR)
    # Always in bounds: what lies beyond the end is computed of the first row, and not stored.
    of_w = tl.where(n < N, n, 0).to(tl.int64) * K
    of_x = tl.where(r < rows, r, 0).to(tl.int64) * stride_x
    k = tl.arange(0, BK)
    first = tl.program_id(1) if SPLIT else 0
    total = tl.zeros((BN, BR), tl.float32)
    total_up = tl.zeros((BN, BR), tl.float32)
    for s in range(first, first + (1 if SPLIT else SEGS)):
        acc = tl.zeros((BN, BR), tl.float32)
        acc_up = tl.zeros((BN, BR), tl.float32)
        w_at = w + of_w[:, None] + s * SEG + k[None, :]
        x_at = x + of_x[None, :] + s * SEG + k[:, None]
        for _ in range(0, SEG, BK):
            xt = tl.load(x_at)
            acc = tl.dot(tl.load(w_at), xt, acc, input_precision="ieee")
            if GATED:
                acc_up = tl.dot(tl.load(w_at + N.to(tl.int64) * K), xt, acc_up, input_precision="ieee")
            w_at += BK
            x_at += BK
        total = acc if SEGS == 1 else total + acc
        if GATED:
            total_up = acc_up if SEGS == 1 else total_up + acc_up
    keep = (n[:, None] < N) & (r[None, :] < rows)
    if PART:
        tl.store(part + (first * rows + r[None, :]).to(tl.int64) * N + n[:, None], total, mask=keep)
    else:
        if BIAS:
            total = total + tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        if SILU:
            total = total / (1.0 + tl.exp(-total))
        if GATED:
            total = total / (1.0 + tl.exp(-total)) * total_up
        if RESIDUAL:
            total = total.to(out.dtype.element_ty).to(tl.float32)
            total = total + tl.load(residual + r[None, :] * N + n[:, None], mask=keep, other=0.0).to(tl.float32)
        tl.store(out + r[None, :].to(tl.int64) * stride_out + n[:, None], total.to(out.dtype.element_ty), mask=keep)
