"""Candidate trees: reading shapes, refusing bad ones, cutting them down, and building the best ones."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.tree import MAX_DEPTH, MAX_NODES, MAX_RANKS, CandidateTree, TreeError, best_first_paths
from tests.support.engine_helpers import random_tree

seeded = st.integers(0, 2**32).map(random.Random)


def is_prefix_closed(paths: tuple[tuple[int, ...], ...]) -> bool:
    return all(path[:-1] == () or path[:-1] in paths[:i] for i, path in enumerate(paths))


def test_branching_is_the_full_product_level_by_level() -> None:
    tree = CandidateTree.parse("2x3X1")
    level_two = [(a, b) for a in range(2) for b in range(3)]
    assert tree.nodes == ((0,), (1,), *level_two, *((*path, 0) for path in level_two))
    assert (tree.depth, tree.ranks_per_depth, len(tree)) == (3, (2, 3, 1), 14)
    assert tree == CandidateTree.from_branching([2, 3, 1])


def test_list_of_paths_keeps_its_order() -> None:
    tree = CandidateTree.parse([[1], [1, 0], [0]])
    assert tree.nodes == ((1,), (1, 0), (0,))
    assert tree.parents == (0, 1, 0)
    assert tree.ranks_per_depth == (2, 1)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ("", "not a branching"),
        ("4x", "not a branching"),
        ("4x2.5", "not a branching"),
        ("four", "not a branching"),
        ("4x0", "at least 1"),
        ("-1", "at least 1"),
        ("16x16", f"more than {MAX_NODES} nodes"),
        ("9" * 400, f"more than {MAX_NODES} nodes"),
        ("x".join("1" * (MAX_DEPTH + 1)), f"deeper than {MAX_DEPTH} levels"),
        ([[]], "a path is empty"),
        ([[0], [0]], "listed twice"),
        ([[0, 1], [0]], "before its parent"),
        ([[0], [1, 0]], "before its parent"),
        ([[-1]], "rank outside 0 to 31"),
        ([[MAX_RANKS]], "rank outside 0 to 31"),
        ([[rank] for rank in range(MAX_NODES + 1)], f"at most {MAX_NODES} are allowed"),
        ([[0] * depth for depth in range(1, MAX_DEPTH + 2)], f"deeper than {MAX_DEPTH} levels"),
    ],
)
def test_bad_shapes_are_refused_with_the_reason(shape: str | list[list[int]], message: str) -> None:
    with pytest.raises(TreeError, match=message):
        CandidateTree.parse(shape)


def test_limits_themselves_are_allowed() -> None:
    assert len(CandidateTree.parse("16x15")) == MAX_NODES
    assert CandidateTree.parse([[rank] for rank in range(MAX_RANKS)]).ranks_per_depth == (MAX_RANKS,)
    assert CandidateTree.parse("x".join("1" * MAX_DEPTH)).depth == MAX_DEPTH


def test_empty_branching_and_wrong_survival_are_refused() -> None:
    with pytest.raises(TreeError, match="branching is empty"):
        CandidateTree.from_branching([])
    with pytest.raises(TreeError, match="one probability per node"):
        CandidateTree(((0,), (1,)), (0.5,))


def test_empty_tree_has_no_depth() -> None:
    assert (CandidateTree(()).depth, CandidateTree(()).parents, CandidateTree(()).ranks_per_depth) == (0, (), ())


@given(seeded, st.integers(0, 40), st.none() | st.integers(0, 5), st.none() | st.integers(-1, 45))
def test_clamp_keeps_what_fits_in_order(rng: random.Random, size: int, heads: int | None, nodes: int | None) -> None:
    shape = random_tree(rng, size).nodes
    tree = CandidateTree(shape, tuple(1.0 / (i + 1) for i in range(len(shape))))
    shallow = [path for path in shape if heads is None or len(path) <= heads]
    expected = shallow if nodes is None else shallow[: max(nodes, 0)]
    clamped = tree.clamp(heads=heads, nodes=nodes)
    assert list(clamped.nodes) == expected
    assert list(clamped.survival) == [tree.survival[shape.index(path)] for path in expected]
    bare = CandidateTree(shape).clamp(heads=heads, nodes=nodes)
    assert bare.nodes == clamped.nodes
    assert bare.survival == ()


@given(seeded, st.integers(1, 60))
def test_parents_point_at_the_row_of_the_path_above(rng: random.Random, size: int) -> None:
    tree = random_tree(rng, size)
    rows = [(), *tree.nodes]
    assert [rows[parent] for parent in tree.parents] == [path[:-1] for path in tree.nodes]
    for i in range(len(tree)):
        assert is_prefix_closed(tree.nodes[: i + 1])


probability = st.sampled_from([0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 0.9])
tables = st.lists(st.lists(probability, max_size=4), min_size=1, max_size=3)


@given(tables, st.integers(0, 30))
def test_best_first_equals_sorting_all_paths(table: list[list[float]], nodes: int) -> None:
    """Brute force: every path with a chance, by probability; the greedy list must have the same sums at every size."""
    everything = {}
    for depth in range(1, len(table) + 1):
        for path in itertools.product(*(range(len(ranks)) for ranks in table[:depth])):
            chance = math.prod(table[level][rank] for level, rank in enumerate(path))
            if chance > 0:
                everything[path] = chance
    best = sorted(everything.values(), reverse=True)[:nodes]
    paths, survival = best_first_paths(table, nodes)
    assert survival == pytest.approx(best)
    assert [everything[path] for path in paths] == pytest.approx(survival)
    assert len(set(paths)) == len(paths)
    assert is_prefix_closed(paths)


def test_tree_from_accuracies_is_valid_and_carries_survival() -> None:
    tree = CandidateTree.from_accuracies([[0.5, 0.2], [0.4]], 10)
    assert tree.nodes == ((0,), (0, 0), (1,), (1, 0))
    assert tree.survival == pytest.approx((0.5, 0.2, 0.2, 0.08))


def test_chances_that_are_not_numbers_open_nothing() -> None:
    assert best_first_paths([[math.nan, 0.5]], 5)[0] in ((), ((1,),))
    assert best_first_paths([[math.inf]], 5) == ((), ())
