"""Flat arrays of a step against a naive picture of the cache: who sees what, in which order."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from backends.runners.batch import ARRAYS, PAGE_SIZE, BatchBuilder, StepBatch
from tests.support.engine_helpers import path_rows, random_parents

SCRATCH = 1000 * PAGE_SIZE


@dataclass
class ExpectedRow:
    token: int
    position: int
    slot: int
    sees: list[int]


def seen_slots(batch: StepBatch, row: int) -> list[int]:
    """What the documentation of :class:`StepBatch` says that a row sees."""
    first = batch.page_offsets[batch.sequence[row]]
    table = batch.pages[first : batch.page_offsets[batch.sequence[row] + 1]]
    assert batch.full_pages[row] <= len(table)
    whole = [int(page) * PAGE_SIZE + i for page in table[: batch.full_pages[row]] for i in range(PAGE_SIZE)]
    return whole + batch.tail_slots[batch.tail_offsets[row] : batch.tail_offsets[row + 1]].tolist()


def place(pages: list[int], position: int) -> int:
    return pages[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE


def add_random_sequence(
    rng: random.Random, builder: BatchBuilder, pages: list[int], nodes_before: int
) -> tuple[list[ExpectedRow], list[bool], int]:
    """Adds a chunk or a tree; returns its rows as they should be, which are outputs, and how many nodes there were."""
    room = len(pages) * PAGE_SIZE
    history = [place(pages, position) for position in range(room)]
    if rng.random() < 0.4:
        start = rng.randrange(room)
        tokens = [rng.randrange(99) for _ in range(rng.randint(1, room - start))]
        last_output = rng.random() < 0.5
        builder.add_chunk(pages, tokens, start, last_output=last_output)
        positions = range(start, start + len(tokens))
        rows = [
            ExpectedRow(token, at, history[at], history[: at + 1]) for token, at in zip(tokens, positions, strict=True)
        ]
        return rows, [False] * (len(rows) - 1) + [last_output], 0
    root = rng.randrange(room)
    parents = random_parents(rng, rng.randint(0, 20))
    tokens = [rng.randrange(99) for _ in parents]
    slots = builder.add_tree(pages, 7, root, tokens, parents)
    assert slots == [SCRATCH + nodes_before + i for i in range(len(parents))]
    rows = [ExpectedRow(7, root, history[root], history[: root + 1])]
    for row, token in enumerate(tokens, start=1):
        path = [slots[above - 1] for above in path_rows(parents, row)]
        rows.append(ExpectedRow(token, root + len(path), slots[row - 1], history[: root + 1] + path))
    return rows, [True] * len(rows), len(parents)


@given(st.integers(0, 2**32).map(random.Random), st.integers(1, 5))
def test_rows_see_exactly_their_own_path_in_order(rng: random.Random, sequences: int) -> None:
    builder = BatchBuilder(SCRATCH)
    all_pages = rng.sample(range(1000), 4 * sequences)
    expected: list[ExpectedRow] = []
    outputs: list[int] = []
    owner: list[int] = []
    nodes = 0
    for i in range(sequences):
        pages = all_pages[4 * i : 4 * i + rng.randint(1, 4)]
        rows, is_output, more = add_random_sequence(rng, builder, pages, nodes)
        outputs += [len(expected) + j for j, wanted in enumerate(is_output) if wanted]
        expected += rows
        owner += [i] * len(rows)
        nodes += more
        assert (builder.rows, builder.outputs) == (len(expected), len(outputs))
    batch = builder.build()
    assert batch.rows == len(expected)
    assert batch.sequence.tolist() == owner
    assert batch.out_row.tolist() == outputs
    assert [
        ExpectedRow(int(batch.tokens[i]), int(batch.positions[i]), int(batch.slots[i]), seen_slots(batch, i))
        for i in range(batch.rows)
    ] == expected
    tails = np.diff(batch.tail_offsets)
    assert tails.min() >= 0
    assert tails.max() <= 31, "the kernels have room for two pages of tail"
    assert {getattr(batch, name).dtype for name in ARRAYS} == {np.dtype(np.int32)}


def test_a_root_that_fills_its_page_leaves_nodes_only_their_path() -> None:
    builder = BatchBuilder(SCRATCH)
    builder.add_tree([5, 6], 1, PAGE_SIZE - 1, [2, 3], [0, 1])
    batch = builder.build()
    assert batch.full_pages.tolist() == [1, 1, 1]
    assert batch.tail_slots.tolist() == [SCRATCH, SCRATCH, SCRATCH + 1]
    assert batch.positions.tolist() == [15, 16, 17]


def test_the_last_position_of_the_last_page_can_be_a_root() -> None:
    builder = BatchBuilder(SCRATCH)
    assert builder.add_tree([3], 1, PAGE_SIZE - 1, [], []) == []
    assert seen_slots(builder.build(), 0) == list(range(3 * PAGE_SIZE, 4 * PAGE_SIZE))


def test_an_empty_step_builds() -> None:
    batch = BatchBuilder(SCRATCH).build()
    assert (batch.rows, batch.tail_offsets.tolist(), batch.page_offsets.tolist()) == (0, [0], [0])
