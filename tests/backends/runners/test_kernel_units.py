"""Single C functions against numpy and torch, at odd sizes; ``make test-sanitize`` runs them under the sanitizers."""

from __future__ import annotations

import ctypes
import itertools
import math
from array import array
from collections.abc import Iterator
from ctypes import c_char_p, c_float, c_int, c_long, c_void_p
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from backends.runners.batch import PAGE_SIZE, BatchBuilder
from backends.runners.cpu_cores import asked_variant
from backends.runners.native import bindings as lib
from backends.runners.native.packing import pack, pack_groups, pack_int8, quantise_groups, widen_groups
from tests.support.engine_helpers import native_or_skip

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
every_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
STORE, ADD, SILU_MUL, STORE_SILU = range(4)


SOURCE = Path(__file__).parent / "kernel_units.c"
variant_in_use: str | None = None


@cache
def units_of(variant: str | None) -> lib.Kernels:
    native_or_skip()
    library = lib.bind(lib.compiled(SOURCE), variant)
    pointer = c_void_p
    for name, result, *arguments in (
        (
            "linear",
            None,
            pointer,
            c_int,
            c_int,
            c_int,
            pointer,
            c_long,
            c_int,
            c_int,
            pointer,
            c_int,
            *[pointer] * 3,
            c_long,
        ),
        ("int8_linear", None, pointer, pointer, c_int, c_int, *[pointer] * 2, c_int, pointer, c_int, *[pointer] * 4),
        ("rms_norm", None, c_int, pointer, pointer, c_int, c_float, pointer),
        ("norm_and_rotate", None, *[pointer] * 4, c_int, c_float),
        ("attend", c_char_p, ctypes.POINTER(lib.Model), *[pointer] * 5, c_int, c_int, c_int),
        ("exp", None, pointer, c_int, pointer),
        ("sum", None, pointer, pointer),
        ("to_bf16", None, pointer, c_int, *[pointer] * 3),
        ("from_bf16", None, pointer, c_int, pointer, pointer),
        ("row_max", c_float, pointer, c_int),
        ("team", None, pointer, c_int, c_int, pointer),
    ):
        function = getattr(library, f"unit_{name}")
        function.restype, function.argtypes = result, arguments
    return library


def units() -> lib.Kernels:
    return units_of(variant_in_use)


@pytest.fixture(autouse=True, scope="module", params=list(lib.variant_flags()))
def variant(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test of this module runs on every variant that the CPU can run, or on the one that MEDUSA_CPU names."""
    global variant_in_use
    native_or_skip()
    runnable = lib.runnable_variants(ctypes.CDLL(str(lib.compiled(SOURCE))))
    if request.param not in runnable or asked_variant() not in (None, request.param):
        pytest.skip(f"this CPU can't run {request.param}, or another variant is asked for")
    variant_in_use = request.param
    yield
    variant_in_use = None


@pytest.fixture(params=[1, 3], ids=["threads1", "threads3"])
def pool(request: pytest.FixtureRequest) -> Iterator[int]:
    made = units().mg_pool_new(request.param)
    yield made
    units().mg_pool_free(made)


def random_tensor(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    rounding = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.double(), expected.double(), rtol=rounding, atol=rounding)


@every_dtype
@pytest.mark.parametrize("int8", [False, True], ids=["whole", "int8"])
@pytest.mark.parametrize("rows", [1, 5, 7, 13, 97])
@pytest.mark.parametrize(("k_size", "n"), [(16, 16), (208, 112), (32, 16 * 131)])
def test_linear(pool: int, dtype: torch.dtype, int8: bool, rows: int, k_size: int, n: int) -> None:
    """Rows lie farther apart than they are long, and stand between numbers that must not count."""
    wide = torch.full((rows + 2, k_size + 32), torch.nan, dtype=dtype)
    wide[1:-1, :k_size] = random_tensor(rows, k_size, dtype=dtype)
    x, weight = wide[1:-1, :k_size], random_tensor(n, k_size, seed=1, dtype=dtype)
    bias, packed = random_tensor(n, seed=2), pack_groups(weight) if int8 else pack(weight)
    product = x.double() @ (widen_groups(*quantise_groups(weight)) if int8 else weight).double().T
    ahead = random_tensor(rows, n, seed=3)

    def run(epilogue: int, out: torch.Tensor | None, act: torch.Tensor | None, bias: torch.Tensor | None) -> None:
        units().unit_linear(
            *(pool, int(dtype == torch.bfloat16), int8, epilogue, x.data_ptr(), x.stride(0), rows, k_size),
            *(packed.data_ptr(), n // 16, None if bias is None else bias.data_ptr()),
            *(None if out is None else out.data_ptr(), None if act is None else act.data_ptr()),
            0 if act is None else act.stride(0),
        )

    out = torch.full((rows, n), torch.nan)
    run(STORE, out, None, bias)
    close(out, product + bias, torch.float32)
    out = ahead.clone()
    run(ADD, out, None, None)
    close(out, product + ahead, torch.float32)
    act = torch.full((rows, n), torch.nan, dtype=dtype)
    run(STORE_SILU, None, act, bias)
    close(act, torch.nn.functional.silu(product + bias), dtype)
    if n % 32 == 0:
        act = torch.full((rows, n // 2), torch.nan, dtype=dtype)
        run(SILU_MUL, None, act, None)
        gate, up = product.unflatten(1, (-1, 2, 16)).unbind(2)
        close(act, (torch.nn.functional.silu(gate) * up).flatten(1), dtype)


def test_weights_in_eight_bits_are_the_nearest() -> None:
    """Within half a step of its group's largest, which stays as it is; groups of zeros and short ones among them."""
    weight = random_tensor(48, 208)
    weight[3, 64:128] = 0.0
    weight[5, 7] = 1e3
    q, scale = quantise_groups(weight)
    assert (q.dtype, q.shape, scale.shape) == (torch.int8, (48, 208), (48, 4))
    error = (widen_groups(q, scale) - weight).abs()
    assert (error <= scale.repeat_interleave(64, dim=1)[:, :208] * 0.5001).all()
    assert error[5, 7] < 1e-3
    assert (q[3, 64:128] == 0).all()
    assert pack_groups(weight[:33]).shape == (3, 208 * 16 + 4 * 64)


@every_dtype
def test_rows_in_eight_bits_do_not_depend_on_their_company(pool: int, dtype: torch.dtype) -> None:
    """A row alone is the row in tiles of every size, widened in registers or ahead."""
    k_size, n = 208, 16 * 13
    x, weight = random_tensor(97, k_size, dtype=dtype), pack_groups(random_tensor(n, k_size, seed=1))

    def product(rows: torch.Tensor) -> torch.Tensor:
        out = torch.full((len(rows), n), torch.nan)
        units().unit_linear(
            *(pool, int(dtype == torch.bfloat16), 1, STORE, rows.data_ptr(), k_size, len(rows), k_size),
            *(weight.data_ptr(), n // 16, None, out.data_ptr(), None, 0),
        )
        return out

    alone = torch.cat([product(row[None].contiguous()) for row in x])
    for count in (*range(2, 15), 20, 97):
        assert torch.equal(product(x[:count]), alone[:count]), count


@pytest.mark.parametrize("silu", [0, 1])
@pytest.mark.parametrize(("rows", "k_size", "n"), [(1, 16, 16), (3, 64, 48), (4, 96, 112), (10, 208, 80)])
def test_eight_bit_linear(pool: int, rows: int, k_size: int, n: int, silu: int) -> None:
    x, weight = random_tensor(rows, k_size), random_tensor(n, k_size, seed=1)
    x[0, 1] = 40.0  # its group alone is rounded coarsely
    x[-1] = 0.0
    bias = random_tensor(n, seed=2)
    packed, column_scale = pack_int8(weight)
    groups = -(-k_size // 64)
    q = torch.zeros(rows, k_size, dtype=torch.int8)
    scale, total, out = torch.zeros(rows, groups), torch.zeros(rows), torch.full((rows, n), torch.nan)
    units().unit_int8_linear(
        *(pool, x.data_ptr(), rows, k_size, packed.data_ptr(), column_scale.data_ptr(), n // 16, bias.data_ptr()),
        *(silu, q.data_ptr(), scale.data_ptr(), total.data_ptr(), out.data_ptr()),
    )
    spread = scale.repeat_interleave(64, dim=1)[:, :k_size]
    assert (q.float() * spread - x).abs().max() <= spread.max() / 2 + 1e-6
    assert ((q.float() * spread - x).abs() <= spread / 2 * 1.001).all()
    close(total, (q.double() * spread).sum(1), torch.float32)
    # Exact integer products: what is left is the rounding of both operands.
    rounded = (weight / column_scale[:, None]).round().double() * column_scale[:, None]
    expected = (q.double() * spread) @ rounded.T
    close(out, torch.nn.functional.silu(expected + bias) if silu else expected, torch.float32)


@every_dtype
@pytest.mark.parametrize("size", [16, 48, 576])
def test_rms_norm(dtype: torch.dtype, size: int) -> None:
    for scale in (1e-4, 1.0, 1e4):
        x, weight = random_tensor(size) * scale, random_tensor(size, seed=1)
        out = torch.empty(size, dtype=dtype)
        units().unit_rms_norm(int(dtype == torch.bfloat16), x.data_ptr(), weight.data_ptr(), size, 1e-5, out.data_ptr())
        close(out, x.double() / (x.double().square().mean() + 1e-5).sqrt() * weight, dtype)


@pytest.mark.parametrize("size", [16, 48, 80, 128])
@pytest.mark.parametrize("normed", [False, True])
def test_rotary_embedding(size: int, normed: bool) -> None:
    x, norm = random_tensor(size), random_tensor(size, seed=1)
    angle = random_tensor(size // 2, seed=2)
    cos, sin = angle.cos(), angle.sin()
    expected = x.double()
    if normed:
        expected = expected / (expected.square().mean() + 1e-6).sqrt() * norm
    a, b = expected[: size // 2], expected[size // 2 :]
    expected = torch.cat([a * cos - b * sin, b * cos + a * sin])
    units().unit_norm_and_rotate(
        x.data_ptr(), norm.data_ptr() if normed else None, cos.data_ptr(), sin.data_ptr(), size, 1e-6
    )
    close(x, expected, torch.float32)


def paged(values: torch.Tensor, head_dim: int, step: int, *, keys: bool) -> torch.Tensor:
    """[pages, 16, kv_heads, head_dim] -> as linear.h keeps them: units of 16 columns."""
    pages, _, kv_heads, _ = values.shape
    if keys:  # columns are positions: [pages, kv_heads, head_dim / step, 16, step]
        return values.view(pages, 16, kv_heads, head_dim // step, step).permute(0, 2, 3, 1, 4).contiguous()
    # Columns are dimensions: [pages, kv_heads, head_dim / 16, 16 / step, 16, step]
    return values.view(pages, 16 // step, step, kv_heads, head_dim // 16, 16).permute(0, 3, 4, 1, 5, 2).contiguous()


@every_dtype
@pytest.mark.parametrize("group", [1, 3, 7, 12, 13, 100])
@pytest.mark.parametrize("head_dim", [16, 48, 80])
def test_attention_of_one_row(dtype: torch.dtype, group: int, head_dim: int) -> None:
    """At any position, alone and as the deepest candidate, with pages in any order and NaN wherever nobody may look."""
    step, kv_heads, num_pages = (2 if dtype == torch.bfloat16 else 1), 2, 9
    heads, scale = group * kv_heads, head_dim**-0.5
    for length, path in ((1, 0), (15, 16), (16, 0), (17, 3), (64, 16), (79, 16), (95, 1)):
        order = [5, 2, 3, 7, 0, 1, 6][: -(-length // PAGE_SIZE)]
        keys = torch.full((num_pages + 2, PAGE_SIZE, kv_heads, head_dim), torch.nan, dtype=dtype)
        values = keys.clone()
        builder = BatchBuilder(num_pages * PAGE_SIZE)
        nodes = builder.add_tree(order, 0, length - 1, [0] * path, list(range(path)))
        slots = [order[i // PAGE_SIZE] * PAGE_SIZE + i % PAGE_SIZE for i in range(length)] + nodes
        for pool, seed in ((keys, length), (values, length + 1)):
            pool.view(-1, kv_heads, head_dim)[slots] = random_tensor(
                len(slots), kv_heads, head_dim, seed=seed, dtype=dtype
            )
        kept = [paged(keys, head_dim, step, keys=True), paged(values, head_dim, step, keys=False)]
        model = lib.Model(
            layers=1,
            hidden=16,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate=16,
            is_bf16=step - 1,
            vocab=1,
            max_context=128,
            scale=scale,
            pages=num_pages + 2,
            k_pool=kept[0].data_ptr(),
            v_pool=kept[1].data_ptr(),
        )
        assert units().mg_model_fault(model, 32, 1) is None
        workspace = units().mg_workspace_new(model, 32, 1)
        batch, row = builder.build(), path
        ends, (memory, _) = array("i", batch.ends), batch.memory.buffer_info()
        q = random_tensor(batch.rows, heads, head_dim, seed=7, dtype=dtype)
        found = torch.full_like(q, torch.nan)
        for kv_head in range(kv_heads):
            addresses = (memory, ends.buffer_info()[0], workspace, q.data_ptr(), found.data_ptr())
            assert units().unit_attend(model, *addresses, row, 1, kv_head) is None
        units().mg_workspace_free(workspace)
        k, v = (pool.view(-1, kv_heads, head_dim)[slots].double() for pool in (keys, values))
        weights = torch.softmax(torch.einsum("kgd,skd->kgs", q[row].double().view(kv_heads, group, -1), k) * scale, -1)
        close(found[row], torch.einsum("kgs,skd->kgd", weights, v).flatten(0, 1), dtype)


def test_exponential() -> None:
    x = np.linspace(-87, 88, 4096, dtype=np.float32)
    special = np.array([0.0, -0.0, -1e30, -np.inf, -88.0, 100.0, np.inf, 1e-30] * 2, np.float32)
    out = np.empty(4096, np.float32)
    units().unit_exp(x.ctypes.data, 4096, out.ctypes.data)
    np.testing.assert_allclose(out, np.exp(x.astype(np.float64)), rtol=3e-7)
    units().unit_exp(special.ctypes.data, 16, out.ctypes.data)
    assert out[:8].tolist() == [1.0, 1.0, 0.0, 0.0, 0.0, out[5], out[5], 1.0]
    np.testing.assert_allclose(out[5], math.exp(88), rtol=1e-6)


def test_bfloat16_is_torch_s() -> None:
    """Rounding to even, at ties, of what is denormal, infinite and no number; both ways of doing it agree."""
    bits = np.random.default_rng(0).integers(0, 1 << 32, 4096, dtype=np.uint32)
    bits[:2048] = (bits[:2048] & 0xFFFF0000) | 0x8000
    bits[:16] = [0, 0x80000000, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x7F7F8000, 0x7FC00000, 0x7F800001] * 2
    x = bits.view(np.float32)
    by_vector, by_one, rounded = np.empty(4096, np.uint16), np.empty(4096, np.uint16), np.empty(4096, np.float32)
    units().unit_to_bf16(x.ctypes.data, 4096, by_vector.ctypes.data, rounded.ctypes.data, by_one.ctypes.data)
    expected = torch.from_numpy(x.copy()).to(torch.bfloat16)
    number = ~np.isnan(x)
    normal = (np.abs(x) >= np.finfo(np.float32).tiny) | (x == 0) | ~number
    theirs = expected.view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(by_one[number & normal], theirs[number & normal])
    np.testing.assert_array_equal(by_one[~normal], theirs[~normal] & 0x8000, "denormal numbers are taken for zero")
    np.testing.assert_array_equal(by_vector, by_one)
    np.testing.assert_array_equal(rounded.view(np.uint32), by_one.astype(np.uint32) << 16)
    back, back_one = np.empty(4096, np.float32), np.empty(4096, np.float32)
    for rounding in (by_vector, by_one):
        units().unit_from_bf16(rounding.ctypes.data, 4096, back.ctypes.data, back_one.ctypes.data)
        np.testing.assert_array_equal(back.view(np.uint32), rounding.astype(np.uint32) << 16)
        np.testing.assert_array_equal(back.view(np.uint32), back_one.view(np.uint32))
        assert np.isnan(back[~number]).all()


@pytest.mark.parametrize("size", [1, 2, 15, 16, 17, 31, 33, 100, 257])
def test_maximum_argmax_and_best_guesses(pool: int, size: int) -> None:
    rng = np.random.default_rng(size)
    rows = rng.integers(-3, 4, (6, size)).astype(np.float32)
    rows[5, rng.integers(size)] = np.nan
    for row in rows:
        found = units().unit_row_max(row.ctypes.data, size)
        assert found == row.max() or (math.isnan(found) and math.isnan(row.max()))
    index, out = np.arange(6, dtype=np.int32), np.full(6, -7, np.int32)
    fault = units().mg_argmax(pool, rows.ctypes.data, 6, size, size, index.ctypes.data, 6, out.ctypes.data)
    assert fault is None
    assert out.tolist() == [*rows[:5].argmax(1), -1]
    for k in {1, min(size, 5), min(size, 32)}:
        ids, p = np.full((6, k), -7, np.int32), np.full((6, k), np.nan, np.float32)
        assert units().mg_top_k(pool, rows.ctypes.data, 6, size, size, k, ids.ctypes.data, p.ctypes.data) is None
        order = np.argsort(-rows[:5], axis=1, kind="stable")[:, :k]
        np.testing.assert_array_equal(ids[:5], order)
        expected = torch.softmax(torch.from_numpy(rows[:5]).double(), -1).numpy()
        np.testing.assert_allclose(p[:5], np.take_along_axis(expected, order, 1), rtol=1e-5)
        assert ((ids[5] >= 0) & (ids[5] < size)).all(), "guesses of a row of no numbers are tokens all the same"
        assert (p[5] == 0).all()
    for k in (0, 33, size + 1):
        assert b"k must be" in units().mg_top_k(pool, rows.ctypes.data, 6, size, size, k, None, None)


def dirty_heap() -> None:
    """What blocks of the sampler's sizes hold before they are written is anybody's: here 0x5A5A5A5A."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = c_void_p, [ctypes.c_size_t], [c_void_p]
    for size in (448, 512, 832, 896):
        blocks = [libc.malloc(size) for _ in range(8)]
        for block in blocks:
            ctypes.memset(block, 0x5A, size)
        for block in blocks:
            libc.free(block)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_sampling_never_reads_what_nobody_wrote(pool: int, bad: float) -> None:
    """A row of no numbers with min_p once gave a token of 1515870810, of a vocabulary of 100."""
    row = np.full(100, bad, np.float32)
    one = np.array([bad] + [0.0] * 99, np.float32)
    for logits, top_k, top_p, min_p in itertools.product((row, one), (0, 5), (1.0, 0.9), (0.0, 0.05, 1.0)):
        given = [np.array([1.0], np.float32), np.array([top_k], np.int32)]
        given += [np.array([top_p], np.float32), np.array([min_p], np.float32), np.array([0.5])]
        index, out = np.zeros(1, np.int32), np.full(1, -7, np.int32)
        dirty_heap()
        pointers = (each.ctypes.data for each in given)
        assert (
            units().mg_sample(pool, logits.ctypes.data, 1, 100, 100, index.ctypes.data, 1, *pointers, out.ctypes.data)
            is None
        )
        if bad == -math.inf and logits is one:
            assert 1 <= out[0] < 100
        else:
            assert out[0] == -1


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_a_team_does_every_piece_once(threads: int) -> None:
    """More threads than cores among them; loops that are shorter than the team, and longer."""
    pool = units().mg_pool_new(threads)
    for size in (1, 2, 5, 100):
        for _ in range(3):
            claims = np.zeros((6, size), np.int32)
            units().unit_team(pool, 6, size, claims.ctypes.data)
            assert (claims == 1).all()
    units().mg_pool_free(pool)
