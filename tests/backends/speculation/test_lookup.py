"""Prompt lookup: what is found, how it is trusted, and how it joins the heads' guesses in one tree."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.cost.step_cost import StepCost
from backends.runners.base import Proposals
from backends.speculation.prompt_lookup import Continuation, Lookup
from backends.speculation.tree_builder import HEADS, LOOKUP, Chain, Draft, DraftRequest, plan_drafts

CHEAP = StepCost.from_measurements([(1, 10.0), (64, 10.1)])
DEAR = StepCost.from_measurements([(1, 10.0), (2, 18.0), (64, 600.0)])


def plan(request: DraftRequest, cost: StepCost = CHEAP) -> Draft:
    return plan_drafts({0: request}, sequences=1, num_prefill_rows=0, node_budget=32, cost=cost)[0]


def ordered_paths(draft: Draft) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        found.append((*found[parent], token))
    return found[1:]


def paths(draft: Draft) -> set[tuple[int, ...]]:
    return set(ordered_paths(draft))


def rows_of(draft: Draft, source: str) -> set[int]:
    return {row for row, each in enumerate(draft.sources, start=1) if each == source}


def test_finds_what_followed_the_last_time() -> None:
    found = Lookup([1, 2, 3, 4, 5, 9, 1, 2, 3, 7, 8, 6, 1, 2, 3]).find()
    assert found is not None
    assert found.tokens[:6] == [7, 8, 6, 1, 2, 3]


def test_nothing_is_found_in_a_text_that_does_not_repeat() -> None:
    assert Lookup([]).find() is None
    assert Lookup(list(range(50))).find() is None


def test_a_long_prompt_is_taken_in_bit_by_bit() -> None:
    """No single look, between two steps that others wait for, indexes all of it; in the end it is all there."""
    prompt = [*range(5000), 7, 8, 9]
    index, seen = Lookup(prompt), 0
    while seen < 5000:
        index.find()
        assert len(index._after) - seen <= 1024
        seen = len(index._after)
    found = index.find()
    assert found is not None and found.tokens[:3] == [10, 11, 12]
    chunked = Lookup(prompt)
    for _ in range(0, len(prompt), 64):
        chunked.index(64)
    assert chunked._after == index._after and chunked.find() == found


def test_a_repetition_goes_on_into_itself() -> None:
    found = Lookup([5, 6, 5, 6, 5, 6, 5]).find()
    assert found is not None
    assert found.tokens == [6, 5, 6, 5, 6, 5, 6, 5]


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 5))
def test_growing_token_by_token_finds_what_a_fresh_index_finds(tokens: list[int], stride: int) -> None:
    grown: list[int] = []
    index = Lookup(grown)
    for start in range(0, len(tokens), stride):
        grown.extend(tokens[start : start + stride])
        found, fresh = index.find(), Lookup(list(grown)).find()
        assert found == fresh
        if found is not None:
            last = max(
                place
                for place in range(3, len(grown))
                if grown[place - 3 : place] == grown[len(grown) - 3 : len(grown)]
            )
            assert found.tokens[0] == grown[last]
            assert all(0.0 < chance < 1.0 for chance in found.chances)
            assert found.chances == sorted(found.chances)


def test_its_own_record_raises_and_lowers_trust() -> None:
    text = [1, 2, 3, 4, 1, 2, 3]
    hopeful, doubtful = Lookup(text), Lookup(text)
    for _ in range(20):
        for lookup, came in ((hopeful, [4, 1]), (doubtful, [9])):
            guess = lookup.find()
            assert guess is not None
            lookup.observe(guess, came)
    high, low = hopeful.find(), doubtful.find()
    assert high is not None and low is not None
    assert high.chances[0] > 0.9
    assert low.chances[0] < 0.1


def heads(*rows: dict[int, float]) -> Proposals:
    return Proposals(np.array([list(row) for row in rows], np.int32), np.array([list(row.values()) for row in rows]))


def test_drafts_from_lookup_alone_and_beyond_the_heads() -> None:
    lookup = Continuation([4, 5, 6, 7], [0.9] * 4, 5)
    draft = plan(DraftRequest(None, max_nodes=8, max_depth=2, chains={LOOKUP: lookup}, longest=4))
    assert paths(draft) == {(4,), (4, 5), (4, 5, 6), (4, 5, 6, 7)}
    assert rows_of(draft, LOOKUP) == {1, 2, 3, 4}
    assert draft.expected_from(HEADS) == 0.0
    assert draft.expected == pytest.approx(sum(0.9**depth for depth in range(1, 5)))


def test_an_answer_is_not_drafted_past_its_end() -> None:
    lookup = Continuation([4, 5, 6, 7], [0.9] * 4, 5)
    assert paths(plan(DraftRequest(None, 8, 2, chains={LOOKUP: lookup}, longest=2))) == {(4,), (4, 5)}


def test_unlikely_continuations_are_not_worth_a_dear_row() -> None:
    lookup = Continuation([4, 5], [0.4, 0.4], 3)
    assert plan(DraftRequest(None, 8, 2, chains={LOOKUP: lookup}, longest=2), DEAR).tokens == []


def test_both_sources_share_a_tree_without_duplicates() -> None:
    proposals = heads({4: 0.6, 8: 0.3}, {5: 0.5, 9: 0.2})
    lookup = Continuation([8, 5, 6], [0.7, 0.8, 0.8], 5)
    draft = plan(DraftRequest(proposals, max_nodes=12, max_depth=2, chains={LOOKUP: lookup}, longest=5))
    assert {(8,), (8, 5), (8, 5, 6), (4,), (4, 5), (4, 9)} <= paths(draft)
    assert len(paths(draft)) == len(draft.tokens)
    by_path = {path: row for row, path in enumerate(ordered_paths(draft), start=1)}
    assert {by_path[8,], by_path[8, 5], by_path[8, 5, 6]} == rows_of(draft, LOOKUP)


def test_a_guess_that_heads_trust_more_stays_theirs() -> None:
    draft = plan(DraftRequest(heads({4: 0.95, 8: 0.01}), 4, 1, chains={LOOKUP: Continuation([4], [0.6], 3)}, longest=1))
    assert draft.tokens[0] == 4
    assert rows_of(draft, LOOKUP) == set()
    # All the way down, and past the heads' last list.
    lookup = Continuation([4, 5, 6], [0.6, 0.6, 0.6], 3)
    deep = plan(DraftRequest(heads({4: 0.95, 8: 0.01}, {5: 0.9, 9: 0.05}), 8, 2, chains={LOOKUP: lookup}, longest=3))
    assert {(4,), (4, 5), (4, 5, 6), (8,)} <= paths(deep)
    assert len(rows_of(deep, LOOKUP)) == 1
    lookup = Continuation([4, 5], [0.6, 0.6], 3)
    both = plan(DraftRequest(heads({4: 0.95, 8: 0.01}, {5: 0.9, 9: 0.05}), 8, 2, chains={LOOKUP: lookup}))
    assert {(4,), (4, 5)} <= paths(both) and not rows_of(both, LOOKUP)


def test_three_sources_share_a_tree() -> None:
    """Chains go apart, run together, and heads' guesses follow where a chain ends."""
    proposals = heads({4: 0.5, 8: 0.2}, {5: 0.5, 9: 0.2}, {6: 0.5, 3: 0.2})
    chains = {LOOKUP: Chain([7, 2, 1], [0.6, 0.7, 0.8]), "corpus": Chain([7, 5], [0.3, 0.6])}
    draft = plan(DraftRequest(proposals, max_nodes=24, max_depth=3, chains=chains, longest=3))
    source = dict(zip(ordered_paths(draft), draft.sources, strict=True))
    assert len(source) == len(draft.tokens)
    assert {path: name for path, name in source.items() if name != HEADS} == {
        (7,): LOOKUP,
        (7, 2): LOOKUP,
        (7, 2, 1): LOOKUP,
        (7, 5): "corpus",
    }
    assert {(4,), (4, 5), (4, 5, 6)} <= source.keys()


def test_the_heads_go_on_where_a_chain_ends() -> None:
    proposals = heads({4: 0.6, 8: 0.3}, {5: 0.8, 9: 0.1})
    draft = plan(DraftRequest(proposals, 12, 2, chains={"corpus": Chain([4], [0.9])}))
    assert dict(zip(ordered_paths(draft), draft.sources, strict=True))[4, 5] == HEADS
    assert rows_of(draft, "corpus") == {1}


guesses = st.lists(
    st.dictionaries(st.integers(0, 6), st.floats(0.01, 0.9), min_size=3, max_size=3), min_size=1, max_size=4
)
links = st.lists(st.tuples(st.integers(0, 6), st.floats(0.05, 0.95)), max_size=8)


@given(guesses, st.dictionaries(st.sampled_from([LOOKUP, "corpus", "model"]), links), st.integers(1, 12))
def test_joined_trees_are_trees(
    rows: list[dict[int, float]], found: dict[str, list[tuple[int, float]]], nodes: int
) -> None:
    """No sibling twice, parents first, at most the nodes allowed, nothing deeper than its source reaches."""
    ordered = [dict(sorted(row.items(), key=lambda item: -item[1])) for row in rows]
    chains = {name: Chain([token for token, _ in each], [chance for _, chance in each]) for name, each in found.items()}
    draft = plan(DraftRequest(heads(*ordered), nodes, len(rows), chains=chains, longest=6))
    assert len(draft.tokens) <= nodes
    assert len(paths(draft)) == len(draft.tokens)
    assert all(parent <= row for row, parent in enumerate(draft.parents))
    assert draft.expected == pytest.approx(sum(map(draft.expected_from, (HEADS, *chains))))
    for path, source in zip(ordered_paths(draft), draft.sources, strict=True):
        assert len(path) <= (len(rows) if source == HEADS else 6)
        if source != HEADS:
            assert path == tuple(chains[source].tokens[: len(path)])
