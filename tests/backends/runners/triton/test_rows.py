"""What is done row by row: norms, rotation, copies; and walking down trees."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from backends.speculation.tree_builder import Draft
from tests.backends.runners.triton.device import DEVICE, ints, on_device
from tests.support.engine_helpers import one_thread

from backends.runners.triton import ops  # isort: skip
from backends.runners.triton.walk import commit_kernel, walk_kernel  # isort: skip
from backends.runners.triton.weights import HeadShape  # isort: skip

__all__ = ["one_thread"]

EPS = 1e-5


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_chains_are_added_in_order_and_normed(dtype: torch.dtype) -> None:
    made = torch.Generator().manual_seed(0)
    x, part = torch.randn(5, 96, generator=made).to(dtype), torch.randn(3, 5, 96, generator=made)
    weight = torch.rand(96, generator=made).to(dtype)
    summed = x + (part[0] + part[1] + part[2]).to(dtype)
    found, out = on_device(x.clone()), on_device(torch.empty_like(x))
    ops.add_norm(found, on_device(part), on_device(weight), out, 5, EPS, 3)
    assert torch.equal(found.cpu(), summed)
    expected = normed(summed.double(), weight.double())
    assert (out.cpu().double() - expected).abs().max() < (1e-6 if dtype == torch.float32 else 4e-2)
    alone, out_alone = on_device(x[4:].clone()), on_device(torch.empty_like(x[4:]))
    ops.add_norm(alone, on_device(part[:, 4:].contiguous()), on_device(weight), out_alone, 1, EPS, 3)
    assert torch.equal(out_alone[0], out[4])


@pytest.mark.parametrize("with_norms", [False, True])
def test_queries_and_keys_are_rotated_and_stored(with_norms: bool) -> None:
    shape, made = HeadShape(heads=6, kv_heads=2, size=16), torch.Generator().manual_seed(0)
    qkv = torch.randn(3, shape.projected, generator=made)
    angles = torch.arange(32)[:, None] * (1e4 ** (-torch.arange(0, 16, 2) / 16))[None]
    rotation = on_device(angles.cos()), on_device(angles.sin())
    positions, slots = torch.tensor([0, 7, 31]), [3, 17, 40]
    norms = [torch.rand(16, generator=made) + 0.5 for _ in range(2)]
    q = on_device(torch.empty(3, 6, 16))
    pools = tuple(on_device(torch.full((4, 2, 16, 16), torch.nan)) for _ in range(2))
    ops.rotate_store(
        ops.default_tiling(),
        shape,
        on_device(qkv),
        (on_device(norms[0]), on_device(norms[1])) if with_norms else None,
        q,
        (pools[0], pools[1]),
        ints(positions.tolist()),
        ints(slots),
        rotation,
        3,
        EPS,
    )
    heads = qkv.view(3, 10, 16).double()
    if with_norms:
        heads = torch.cat([normed(heads[:, :6], norms[0]), normed(heads[:, 6:8], norms[1]), heads[:, 8:]], 1)
    cos, sin = (torch.cat([each[positions]] * 2, -1)[:, None].double() for each in (angles.cos(), angles.sin()))
    turned = heads[:, :8] * cos + torch.cat([-heads[:, :8, 8:], heads[:, :8, :8]], -1) * sin
    assert (q.cpu().double() - turned[:, :6]).abs().max() < 1e-5
    for row, slot in enumerate(slots):
        assert (pools[0][slot // 16, :, slot % 16].cpu().double() - turned[row, 6:]).abs().max() < 1e-5
        assert torch.equal(pools[1][slot // 16, :, slot % 16].cpu(), qkv.view(3, 10, 16)[row, 8:])
    assert pools[0].isnan().sum() == pools[0].numel() - 3 * 2 * 16


def test_rows_and_slots_are_copied() -> None:
    table = torch.randn(9, 24, generator=torch.Generator().manual_seed(0))
    out = on_device(torch.empty(4, 24))
    ops.take(on_device(table), ints([8, 0, 3, 3]), out, 4)
    assert torch.equal(out.cpu(), table[[8, 0, 3, 3]])
    pool = torch.randn(3, 5, 2, 16, 16, generator=torch.Generator().manual_seed(1))
    pools = on_device(pool.clone()), on_device(-pool)
    ops.copy_slots(pools, ints([70, 64]), ints([3, 20]), 2)
    for source, target in ((70, 3), (64, 20)):
        for found, sign in zip(pools, (1, -1), strict=True):
            copied = found.cpu()[:, target // 16, :, target % 16]
            assert torch.equal(copied, sign * pool[:, source // 16, :, source % 16])
    changed = (pools[0].cpu() != pool).any(-1).any(0).any(1)
    assert changed.sum() == 2


def trees(rng: random.Random, count: int) -> list[tuple[Draft, list[int], list[int]]]:
    """Drafts with their rows' tokens, and the token drawn at each row; siblings may hold the same one."""
    found = []
    for _ in range(count):
        nodes = rng.randrange(9)
        parents = [rng.randrange(i + 1) for i in range(nodes)]
        draft = Draft(tokens=[rng.randrange(3) for _ in range(nodes)], parents=parents)
        found.append((draft, [5, *draft.tokens], [rng.choice((0, 1, 2, 2, -1)) for _ in range(nodes + 1)]))
    return found


def accepted(draft: Draft, drawn: list[int]) -> tuple[list[int], list[int]]:
    """What ``verify`` accepts."""
    children, at, tokens, rows = draft.children(), 0, [], []
    while True:
        tokens.append(drawn[at])
        rows.append(at)
        below = children[at].get(drawn[at])
        if below is None:
            return tokens, rows
        at = below


def test_the_walk_accepts_what_sample_and_match_accepts_and_its_keys_are_kept() -> None:
    depth, rng = 16, random.Random(3)
    found = trees(rng, 24)
    first, total = [], 0
    for draft, *_ in found:
        first.append(total)
        total += len(draft.tokens) + 1
    tokens, rows = (torch.full((24, depth + 1), -7, dtype=torch.int32, device=DEVICE) for _ in range(2))
    count, given = ints([0] * 24), {"first": ints(first), "num": ints([len(d.tokens) + 1 for d, *_ in found])}
    walk_kernel[(24,)](
        ints([token for *_, drawn in found for token in drawn]),
        ints([token for _, held, _ in found for token in held]),
        ints([parent for draft, *_ in found for parent in [-1, *draft.parents]]),
        given["first"],
        given["num"],
        tokens,
        rows,
        count,
        DEPTH=depth,
        B=16,
    )
    expected = [accepted(draft, drawn) for draft, _, drawn in found]
    for s, (want_tokens, want_rows) in enumerate(expected):
        assert tokens[s, : count[s]].tolist() == want_tokens
        assert rows[s, : count[s]].tolist() == want_rows
    # Each sequence has two pages, its root at position 10 or so; candidates lie behind all pages.
    slots = [48 * 16 + i for i in range(total)]
    positions = [9 + s % 4 for s in range(24)]
    pool = torch.randn(2, 48 + -(-total // 16), 1, 16, 16, generator=torch.Generator().manual_seed(0))
    pools = on_device(pool.clone()), on_device(pool.clone())
    arguments: Any = (rows, count, given["first"], ints(slots), ints(positions), ints([2 * s for s in range(24)]))
    commit_kernel[(24, 2)](*pools, *arguments, ints(list(range(48))), pool.stride(0), KV=1, D=16, DEPTH=depth, B=16)
    for s, (_, want_rows) in enumerate(expected):
        for step, row in enumerate(want_rows[1:], start=1):
            source, position = slots[first[s] + row], positions[s] + step
            kept = pools[0].cpu()[:, 2 * s + position // 16, :, position % 16]
            assert torch.equal(kept, pool[:, source // 16, :, source % 16])
