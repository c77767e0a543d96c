"""Penalties, biases and the ban on ending early, of each row by its own history."""

from __future__ import annotations

import triton
import triton.language as tl

HIGHEST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def penalise_kernel(
    logits,
    out,
    sequence,
    counts,
    prompt,
    ending,
    bias,
    path,
    path_length,
    repetition,
    frequency,
    presence,
    least_tokens,
    V,
    stride,
    DEPTH: tl.constexpr,
    B: tl.constexpr,
):
    """``out`` [rows, V]: ``logits`` [rows, V] float32 changed as ``backends.sampling.sampler.LogitProcessor`` does it.

    ``sequence`` [rows]: whose row it is. By sequence: ``counts`` [n, V] int32 of the answer's tokens so far, ``prompt``
    and ``ending`` [n, V] int8 marks, ``bias`` [n, V] float32, ``repetition``, ``frequency``, ``presence`` float32 and
    ``least_tokens`` int32 [n], and the number of answered tokens in ``counts``' own column V, so [n, V + 1]. ``path``
    [rows, DEPTH]: tokens of the row's ancestors in this step and of the row itself, the root's left out,
    ``path_length`` [rows] of them: known before any is accepted. Grid: rows, blocks of V.

    R5: each logit by itself, divided as IEEE 754 has it. R6: counts are integers.
    """
    r = tl.program_id(0)
    i = tl.program_id(1) * B + tl.arange(0, B)
    keep = i < V
    s = tl.load(sequence + r).to(tl.int64)
    v = tl.load(logits + r.to(tl.int64) * stride + i, mask=keep, other=0.0)
    v = v + tl.load(bias + s * V + i, mask=keep, other=0.0)
    times = tl.load(counts + s * (V + 1) + i, mask=keep, other=0)
    length = tl.load(path_length + r)
    for step in range(length):
        times = times + (tl.load(path + r * DEPTH + step) == i).to(tl.int32)
    factor = tl.load(repetition + s)
    seen = (times > 0) | (tl.load(prompt + s * V + i, mask=keep, other=0) > 0)
    changed = tl.minimum(tl.where(v > 0, tl.div_rn(v, factor), v * factor), HIGHEST)
    v = tl.where(factor == 1.0, v, tl.where(seen, changed, v))
    v = tl.where(times > 0, v - (tl.load(frequency + s) * times.to(tl.float32) + tl.load(presence + s)), v)
    early = tl.load(counts + s * (V + 1) + V) + length < tl.load(least_tokens + s)
    ends = tl.load(ending + s * V + i, mask=keep, other=0) > 0
    tl.store(out + r.to(tl.int64) * stride + i, tl.where(early & ends, float("-inf"), v), mask=keep)
