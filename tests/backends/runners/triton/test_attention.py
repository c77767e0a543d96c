"""Attention: right, and the same bits for a row in any tree, chunk, window, page and company."""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.runners.batch import PAGE_SIZE, BatchBuilder
from backends.runners.triton.tiling import GPU, INTERPRETER, Tiling
from backends.runners.triton.work_list import items_of, lengths_of, most_items
from tests.backends.runners.triton.device import DEVICE, interpreted, ints, on_device
from tests.support.engine_helpers import one_thread

from backends.runners.triton import interpreter, ops  # isort: skip
from backends.runners.triton.weights import HeadShape  # isort: skip

__all__ = ["one_thread"]

SHAPE = HeadShape(heads=6, kv_heads=2, size=16)
PAGES, SCRATCH_PAGES = 80, 4
TILING = replace(ops.default_tiling(), piece=64, tile=32) if DEVICE.type == "cpu" else GPU
Path = tuple[int, ...]


def numbers(path: Path, what: str, count: int) -> torch.Tensor:
    """Keys, values and queries are functions of the path alone, as in a model."""
    made = torch.Generator().manual_seed(zlib.crc32(repr((path, what)).encode()))
    return torch.randn(count, SHAPE.size, generator=made)


@dataclass
class World:
    """Pools poisoned with NaN, of which only what rows may see is written, in random pages."""

    seed: int
    dtype: torch.dtype = torch.float32
    rows: list[Path] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.free = self.rng.sample(range(PAGES), PAGES)
        pool = (PAGES + SCRATCH_PAGES, SHAPE.kv_heads, PAGE_SIZE, SHAPE.size)
        self.k, self.v = (torch.full(pool, torch.nan, dtype=self.dtype) for _ in range(2))
        self.builder = BatchBuilder(PAGES * PAGE_SIZE)

    def _put(self, slot: int, path: Path) -> None:
        page, offset = divmod(slot, PAGE_SIZE)
        self.k[page, :, offset] = numbers(path, "key", SHAPE.kv_heads).to(self.dtype)
        self.v[page, :, offset] = numbers(path, "value", SHAPE.kv_heads).to(self.dtype)

    def _pages(self, tokens: Path) -> list[int]:
        pages = [self.free.pop() for _ in range(-(-len(tokens) // PAGE_SIZE))]
        for position in range(len(tokens)):
            slot = pages[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE
            self._put(slot, tokens[: position + 1])
        return pages

    def chunk(self, tokens: Path, start: int) -> None:
        self.builder.add_chunk(self._pages(tokens), tokens[start:], start, last_output=True)
        self.rows += [tokens[: end + 1] for end in range(start, len(tokens))]

    def tree(self, tokens: Path, nodes: list[int], parents: list[int]) -> None:
        slots = self.builder.add_tree(self._pages(tokens), tokens[-1], len(tokens) - 1, nodes, parents)
        paths = [tokens]
        for token, parent, slot in zip(nodes, parents, slots, strict=True):
            paths.append((*paths[parent], token))
            self._put(slot, paths[-1])
        self.rows += paths

    def attend(self, *, window: int = 0, tiling: Tiling = TILING, programs: int = 3) -> dict[Path, torch.Tensor]:
        batch, shape = self.builder.build(), replace(SHAPE, window=window)
        items = items_of(batch, tiling, shape.group, PAGES * PAGE_SIZE)
        step = {
            "items": ints(items.tolist()),
            "count": ints([len(items)]),
            "row_n": ints(lengths_of(batch).tolist()),
            "pages": ints(batch.pages.tolist()),
            "tail": ints([*batch.tail_slots.tolist(), 0]),
        }
        q = on_device(torch.stack([numbers(path, "query", SHAPE.heads) for path in self.rows]).to(self.dtype))
        buffers = ops.AttentionBuffers.empty(tiling, shape, len(self.rows), max(map(len, self.rows)), DEVICE)
        # In float32: rounding to bfloat16 would hide differences.
        out = torch.full((len(self.rows), SHAPE.heads, SHAPE.size), torch.nan, device=DEVICE)
        pools = on_device(self.k), on_device(self.v)
        ops.attend(tiling, shape, q, pools, buffers, step, out, len(self.rows), SHAPE.size**-0.5, programs)
        return dict(zip(self.rows, out.cpu(), strict=True))


def reference(path: Path, dtype: torch.dtype, window: int) -> torch.Tensor:
    seen = range(max(0, len(path) - window) if window else 0, len(path))

    def each(what: str) -> torch.Tensor:
        return torch.stack([numbers(path[: p + 1], what, SHAPE.kv_heads).to(dtype).double() for p in seen], 1)

    q = numbers(path, "query", SHAPE.heads).to(dtype).double().view(SHAPE.kv_heads, SHAPE.group, SHAPE.size)
    weights = torch.softmax(q @ each("key").transpose(1, 2) * SHAPE.size**-0.5, -1)
    return (weights @ each("value")).reshape(SHAPE.heads, SHAPE.size)


LENGTHS = (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 96, 127, 128, 150)


def random_world(seed: int, dtype: torch.dtype, sequences: int = 3) -> World:
    rng, world = random.Random(seed), World(seed, dtype)
    for number in range(sequences):
        tokens = (number, *(rng.randrange(50) for _ in range(rng.choice(LENGTHS) - 1)))
        if rng.random() < 0.3:
            world.chunk(tokens, rng.randrange(max(0, len(tokens) - 24), len(tokens)))
        else:
            nodes = rng.randrange(7)
            # Siblings hold different tokens, or two rows would have one path.
            world.tree(tokens, [100 + i for i in range(nodes)], [rng.randrange(i + 1) for i in range(nodes)])
    return world


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [0, 20])
def test_rows_are_right_and_as_if_they_were_alone(dtype: torch.dtype, window: int) -> None:
    for seed in range(2):
        world = random_world(10 * seed + window, dtype)
        tiling = replace(TILING, queries=TILING.queries * (1 + seed))
        found = world.attend(window=window, tiling=tiling, programs=3 + seed)
        for path, out in found.items():
            expected = reference(path, dtype, window)
            assert (out.double() - expected).norm() < (1e-2 if dtype == torch.bfloat16 else 1e-5) * expected.norm()
        for path in random.Random(seed).sample(sorted(found), 3):
            alone = World(99 + seed, dtype)
            alone.tree(path, [], [])
            assert torch.equal(alone.attend(window=window, programs=1)[path], found[path]), len(path)


@interpreted
def test_a_product_that_depends_on_the_row_s_place_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = interpreter.chain_of_products

    def crooked(x: Any, y: Any, total: Any) -> Any:
        made = whole(x, y, total)
        made[4:] = np.nextafter(made[4:], np.float32(0))
        return made

    monkeypatch.setattr(interpreter, "chain_of_products", crooked)
    with pytest.raises(AssertionError):
        test_rows_are_right_and_as_if_they_were_alone(torch.float32, 0)


@given(st.integers(1, 3000), st.sampled_from([GPU, INTERPRETER]), st.sampled_from([0, 1, 20, 300, 4096]))
@settings(max_examples=200)
def test_pieces_hold_each_key_once_in_ascending_order(n: int, tiling: Tiling, window: int) -> None:
    pieces = tiling.pieces(n, window)
    seen = [key for start, end, _ in pieces for key in range(start, end)]
    assert seen == list(range(seen[0], n))
    assert seen[0] <= max(0, n - window) if window else seen[0] == 0
    assert all(start % tiling.tile == 0 and start < end for start, end, _ in pieces)
    numbered = [number for _, _, number in pieces]
    assert numbered == sorted(set(numbered))
    assert numbered[-1] < tiling.splits(n)


@given(st.integers(0, 10**6))
@settings(max_examples=40)
def test_items_hold_each_row_s_pieces_once(seed: int) -> None:
    rng, builder = random.Random(seed), BatchBuilder(PAGES * PAGE_SIZE)
    for _ in range(rng.randint(1, 5)):
        pages, length = rng.sample(range(PAGES), 20), rng.randint(1, 300)
        if rng.random() < 0.4:
            start = rng.randrange(max(0, length - 40), length)
            builder.add_chunk(pages, [1] * (length - start), start, last_output=False)
        else:
            nodes = rng.randrange(12)
            builder.add_tree(pages, 1, length - 1, [2] * nodes, [rng.randrange(i + 1) for i in range(nodes)])
    batch = builder.build()
    lengths = lengths_of(batch).tolist()
    for tiling in (GPU, INTERPRETER):
        items = items_of(batch, tiling, 3, PAGES * PAGE_SIZE).tolist()
        assert len(items) <= most_items(batch.rows, 300 + 16, tiling)
        held: dict[int, list[tuple[int, int, int]]] = {row: [] for row in range(batch.rows)}
        for first, rows, start, end, number, *_ in items:
            assert rows * 3 <= tiling.queries
            for row in range(first, first + rows):
                held[row].append((start, min(end, lengths[row]), number))
        assert all(sorted(held[row]) == tiling.pieces(lengths[row]) for row in held)
