"""A step's rows in C are those of the builder in Python, number by number."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.runners.batch import PAGE_SIZE, BatchBuilder
from backends.runners.native.bindings import NativeUnavailable, load_library
from backends.runners.native.rows import NativeRows, batches_here
from backends.tree import MAX_DEPTH

SCRATCH = 5000 * PAGE_SIZE


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    try:
        load_library()
    except NativeUnavailable as error:
        pytest.skip(f"no C compiler: {error}")


def native() -> NativeRows:
    found = batches_here()(SCRATCH)
    assert isinstance(found, NativeRows)
    return found


def random_parents(rng: random.Random, nodes: int) -> list[int]:
    """Of any tree that is no deeper than a path may be."""
    parents, depths = [], [0]
    for row in range(1, nodes + 1):
        parent = rng.choice([at for at in range(row) if depths[at] < MAX_DEPTH])
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return parents


@given(st.integers(0, 2**32).map(random.Random))
def test_same_arrays_as_the_reference(rng: random.Random) -> None:
    ours, reference = native(), BatchBuilder(SCRATCH)
    for _ in range(rng.randint(0, 6)):
        pages = rng.sample(range(5000), rng.randint(1, 8))
        room = len(pages) * PAGE_SIZE
        if rng.random() < 0.4:
            start = rng.randrange(room)
            tokens = [rng.randrange(50_000) for _ in range(rng.randint(1, room - start))]
            last_output = rng.random() < 0.5
            for builder in (ours, reference):
                builder.add_chunk(pages, tokens, start, last_output=last_output)
        else:
            # The page behind a full one belongs to a sequence that goes on.
            position, nodes = rng.randrange(room - 1), rng.choice((0, 0, 1, 5, 30))
            tokens, parents = [rng.randrange(50_000) for _ in range(nodes)], random_parents(rng, nodes)
            slots = [list(builder.add_tree(pages, 7, position, tokens, parents)) for builder in (ours, reference)]
            assert slots[0] == slots[1]
        assert (ours.rows, ours.outputs) == (reference.rows, reference.outputs)
    assert ours.build() == reference.build()


@pytest.mark.parametrize("parents", [[1], [-1], [0, 5]])
def test_a_node_without_an_earlier_parent_is_refused(parents: list[int]) -> None:
    builder = native()
    builder.add_tree([1], 7, 3, [5] * len(parents), parents)
    with pytest.raises(ValueError, match="before its parent"):
        builder.build()


def test_rows_without_a_page_are_refused() -> None:
    builder = native()
    builder.add_chunk([1], [5] * (PAGE_SIZE + 1), 0, last_output=True)
    with pytest.raises(ValueError, match="lacks pages"):
        builder.build()
    with pytest.raises(ValueError, match="1 nodes with 2 parents"):
        native().add_tree([1], 7, 3, [5], [0, 0])
