"""Drawing one token from each row: filters, a random number for each token, and the lowest id of the maximum.

A token is drawn by a race (Gumbel, 1954; "Gumbel-max"): each token's logit over the temperature, less the logarithm of
an exponential random number of its own, and the highest wins. The probabilities are those of the softmax, and what is
compared are maxima, which don't depend on how the vocabulary is cut.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Weights as whole numbers, where the likeliest token's is 2**40: sums of 2**20 of them fit 64 bits.
WHOLE = tl.constexpr(1099511627776.0)
ABSENT = tl.constexpr(0x7FFFFFFF)


@triton.jit
def mix(z):
    """SplitMix64, as ``backends.sampling.splitmix``: of an unsigned 64-bit number the next one."""
    z = z + 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def row_key_kernel(seeds, positions, keys, n, B: tl.constexpr):
    """``keys`` [n]: the 53 bits of ``backends.sampling.sampler.keyed_uniform`` of each seed and position, as int64.

    R6: integers only.
    """
    i = tl.program_id(0) * B + tl.arange(0, B)
    seed = tl.load(seeds + i, mask=i < n, other=0).to(tl.uint64)
    position = tl.load(positions + i, mask=i < n, other=0).to(tl.uint64)
    tl.store(keys + i, (mix(mix(seed) ^ position) >> 11).to(tl.int64), mask=i < n)


@triton.jit
def block_best_kernel(logits, index, best, best_id, V, stride, BLOCKS, B: tl.constexpr):
    """The maximum of one block of a row's logits, and the lowest id that has it: [rows, BLOCKS] each.

    ``index`` [rows]: rows of ``logits`` [n, V] float32. A block that holds NaN or +inf has the maximum +inf and the id
    -1, so that the row has no token. Grid: rows, blocks. R6: maxima do not depend on the order.
    """
    r, block = tl.program_id(0), tl.program_id(1)
    i = block * B + tl.arange(0, B)
    v = tl.load(logits + tl.load(index + r).to(tl.int64) * stride + i, mask=i < V, other=float("-inf"))
    broken = tl.max(((v != v) | (v == float("inf"))).to(tl.int32), 0)
    v = tl.where(v != v, float("-inf"), v)
    top = tl.max(v, 0)
    first = tl.min(tl.where(v == top, i, ABSENT), 0)
    tl.store(best + r * BLOCKS + block, tl.where(broken > 0, float("inf"), top))
    tl.store(best_id + r * BLOCKS + block, tl.where(broken > 0, -1, first))


@triton.jit
def best_kernel(best, best_id, highest, token, BLOCKS, B: tl.constexpr):
    """Over a row's blocks: the maximum into ``highest`` [rows] float32, the lowest id that has it into ``token``
    [rows], -1 where the maximum is not finite. Grid: rows. R6: maxima and minima of integers."""
    r = tl.program_id(0)
    i = tl.arange(0, B)
    v = tl.load(best + r * BLOCKS + i, mask=i < BLOCKS, other=float("-inf"))
    ids = tl.load(best_id + r * BLOCKS + i, mask=i < BLOCKS, other=ABSENT)
    top = tl.max(v, 0)
    found = tl.min(tl.where(v == top, ids, ABSENT), 0)
    tl.store(highest + r, top)
    tl.store(token + r, tl.where((top == float("-inf")) | (top == float("inf")), -1, found))


@triton.jit
def ordered(v):
    """A float's bits as an integer of 32 bits, in the order of the floats; -0.0 counts as 0.0."""
    bits = (v + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def as_float(order):
    """The float that :func:`ordered` made an integer of."""
    bits = order.to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def mass_of(v, top, inverse):
    """exp((v - top) * inverse) in units of 2**-40, as int64; ``inverse``: one over the temperature."""
    return (tl.exp((v - top) * inverse) * WHOLE).to(tl.int64)


@triton.jit
def amount_from(row, V, top, inverse, least, least_id, floor, floor_id, MASS: tl.constexpr, B: tl.constexpr):
    """How much of a row comes at or before a place in the order of falling logits, ties by rising id: tokens, or with
    MASS their weights. The place is (``least``, ``least_id``); what comes after (``floor``, ``floor_id``) is not
    counted."""
    total = tl.full((), 0, tl.int64)
    for start in range(0, V, B):
        i = start + tl.arange(0, B)
        v = tl.load(row + i, mask=i < V, other=float("-inf"))
        o = ordered(v)
        kept = (i < V) & ((o > least) | ((o == least) & (i <= least_id)))
        kept = kept & ((o > floor) | ((o == floor) & (i <= floor_id)))
        one = mass_of(v, top, inverse) if MASS else tl.full((B,), 1, tl.int64)
        total += tl.sum(tl.where(kept, one, 0), 0)
    return total


@triton.jit
def last_place(row, V, top, inverse, wanted, floor, floor_id, MASS: tl.constexpr, B: tl.constexpr):
    """The first place in a row's order at which the amount from the start on is ``wanted`` or more, by bisection; the
    floor itself where there is none."""
    low, high = floor, ordered(top)
    # Invariant: the amount at `low` with all its ties is enough, or low is the floor.
    while low < high:
        middle = low + (high - low + 1) // 2
        enough = amount_from(row, V, top, inverse, middle, ABSENT, floor, floor_id, MASS, B) >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    first, last = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64) + V - 1
    while first < last:
        middle = (first + last) // 2
        enough = amount_from(row, V, top, inverse, low, middle, floor, floor_id, MASS, B) >= wanted
        last = tl.where(enough, middle, last)
        first = tl.where(enough, first, middle + 1)
    return low, first


@triton.jit
def filter_kernel(
    logits, index, highest, temperatures, top_ks, top_ps, min_ps, cut, cut_id, V, stride, B: tl.constexpr
):
    """Which tokens of each row may be drawn: those above the logit ``cut`` [rows], and of those equal to it the ones of
    an id up to ``cut_id`` [rows].

    As ``backends.sampling.torch_sampler`` defines it: the ``top_k`` best (0: all), of these the fewest whose weight is
    ``top_p`` of theirs, and none whose weight is under ``min_p`` of the best one's. Ties go by id. ``highest`` [rows]:
    the rows' maxima. Grid: rows.

    R6: weights are whole numbers, whose sums are the same in any order; the place where they reach a share is found by
    bisection over the bits of a float.
    """
    r = tl.program_id(0)
    row = logits + tl.load(index + r).to(tl.int64) * stride
    top = tl.load(highest + r)
    temperature = tl.load(temperatures + r)
    top_k, top_p, min_p = tl.load(top_ks + r), tl.load(top_ps + r), tl.load(min_ps + r)
    place = ordered(tl.full((), float("-inf"), tl.float32))
    place_id = tl.full((), 0, tl.int64) + V
    finite = (top > float("-inf")) & (top < float("inf"))
    if finite & (temperature > 0.0):
        inverse = 1.0 / temperature
        if (top_k > 0) & (top_k < V):
            place, place_id = last_place(row, V, top, inverse, top_k.to(tl.int64), place, place_id, False, B)
        if top_p < 1.0:
            whole = amount_from(row, V, top, inverse, place, place_id, place, place_id, True, B)
            wanted = tl.maximum(tl.ceil(whole.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64), 1)
            place, place_id = last_place(row, V, top, inverse, wanted, place, place_id, True, B)
        if min_p > 0.0:
            least = ordered(top + temperature * tl.log(min_p))
            place_id = tl.where(least > place, V, place_id)
            place = tl.maximum(least, place)
    tl.store(cut + r, as_float(place))
    tl.store(cut_id + r, place_id.to(tl.int32))


@triton.jit
def race_kernel(
    logits, index, highest, keys, temperatures, cut, cut_id, best, best_id, V, stride, BLOCKS, B: tl.constexpr
):
    """One block of a row's race: the best and the lowest id that has it, [rows, BLOCKS] each, for :func:`best_kernel`.

    ``keys`` [rows] int64: the 53 bits of each row's random number. ``cut``, ``cut_id``: what :func:`filter_kernel`
    found. A row of temperature 0, or one whose maximum is not finite, keeps its logits as they are. Grid: rows, blocks.

    R6: each token's number is its own, keyed by the row's and its id, so the winner is the same however V is cut.
    """
    r, block = tl.program_id(0), tl.program_id(1)
    i = block * B + tl.arange(0, B)
    v = tl.load(logits + tl.load(index + r).to(tl.int64) * stride + i, mask=i < V, other=float("-inf"))
    top = tl.load(highest + r)
    temperature = tl.load(temperatures + r)
    finite = (top > float("-inf")) & (top < float("inf"))
    if finite & (temperature > 0.0):
        least = tl.load(cut + r)
        v = tl.where((v > least) | ((v == least) & (i <= tl.load(cut_id + r))), v, float("-inf"))
        z = mix(mix(tl.load(keys + r).to(tl.uint64)) ^ i.to(tl.uint64))
        # From 40 bits, and fine where the exponential is small: there the race is decided.
        u = ((z >> 24).to(tl.int64).to(tl.float32) + 0.5) * 9.094947017729282e-13
        e = tl.where(u < 1e-3, u * (1.0 + u * (0.5 + u * 0.33333334)), -tl.log(1.0 - tl.minimum(u, 0.9999999)))
        v = (v - top) / temperature - tl.log(e)
    best_here = tl.max(v, 0)
    found = tl.min(tl.where(v == best_here, i, ABSENT), 0)
    tl.store(best + r * BLOCKS + block, tl.where(finite, best_here, top))
    tl.store(best_id + r * BLOCKS + block, found)
