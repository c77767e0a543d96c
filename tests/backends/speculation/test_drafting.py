"""From guesses to nodes: trees stay trees, limits hold, and the planner's choice is the best there is."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.cost.step_cost import StepCost
from backends.heads.expansion import LEAST_SURVIVAL
from backends.runners.base import Proposals
from backends.speculation.tree_builder import Draft, DraftRequest, lookup_pays, min_survival, plan_drafts
from backends.tree import CandidateTree
from tests.support.engine_helpers import FLAT_COST, path_rows, random_tree
from tests.support.pace import yardsticks

seeds = st.integers(0, 2**32).map(random.Random)
GIVE_UP = 0.93  # how far below the best ratio the search goes on, as the planner documents


def guesses(rng: random.Random, heads: int, ranks: int) -> Proposals:
    """Distinct tokens per head, descending probabilities that sum to at most 1."""
    tokens = np.array([rng.sample(range(1000), ranks) for _ in range(heads)], np.int32)
    weights = np.array([sorted((rng.random() ** 3 for _ in range(ranks)), reverse=True) for _ in range(heads)])
    return Proposals(tokens, (weights / max(weights.sum(1).max(), 1.0)).astype(np.float32))


def token_paths(draft: Draft) -> list[tuple[int, ...]]:
    """Every node as the tokens on its path; fails on a parent that is not an earlier row."""
    paths: list[tuple[int, ...]] = []
    for row, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True), start=1):
        assert 0 <= parent < row
        assert path_rows(draft.parents, row)[-1] == row
        paths.append((*(paths[parent - 1] if parent else ()), token))
    return paths


def chance(request: DraftRequest, path: tuple[int, ...]) -> float:
    result = 1.0
    for depth, token in enumerate(path):
        rank = request.proposals.tokens[depth].tolist().index(token)
        result *= min(float(request.proposals.probabilities[depth, rank]) * request.trust, 1.0)
    return result


def check_draft(request: DraftRequest, draft: Draft) -> None:
    paths = token_paths(draft)
    assert len(set(paths)) == len(paths), "the same branch twice"
    assert len(paths) <= request.max_nodes
    assert all(len(path) <= min(request.max_depth, len(request.proposals.tokens)) for path in paths)
    assert draft.expected == pytest.approx(sum(chance(request, path) for path in paths), rel=1e-4, abs=1e-6)


def random_cost(rng: random.Random) -> StepCost:
    """Steps and slopes, as real tables have."""
    rows = sorted(rng.sample(range(1, 80), rng.randint(1, 6)))
    return StepCost.from_measurements([(size, rng.choice([1.0, 1.1, 1.2, 2.0, 4.0]) + size / 50) for size in rows])


@given(seeds, st.integers(1, 6), st.integers(0, 60), st.booleans())
def test_every_limit_holds_for_mixed_requests(rng: random.Random, sequences: int, node_budget: int, flat: bool) -> None:
    requests = {}
    for key in range(sequences):
        tree = random_tree(rng, rng.randint(0, 20), depth=5, ranks=8) if rng.random() < 0.4 else None
        requests[key] = DraftRequest(
            guesses(rng, heads=rng.randint(1, 4), ranks=rng.randint(1, 6)),
            max_nodes=rng.randint(0, 15) if tree is None else len(tree),
            max_depth=rng.randint(0, 5),
            trust=1.0 if tree is not None else rng.choice([0.3, 1.0, 2.5]),
            tree=tree,
        )
    drafts = plan_drafts(
        requests,
        sequences=sequences + 1,
        num_prefill_rows=rng.randint(0, 30),
        node_budget=node_budget,
        cost=FLAT_COST if flat else random_cost(rng),
    )
    assert drafts.keys() == requests.keys()
    assert sum(len(draft.tokens) for draft in drafts.values()) <= node_budget
    for key, draft in drafts.items():
        check_draft(requests[key], draft)


@given(seeds, st.integers(0, 25))
def test_a_given_tree_is_used_as_it_is(rng: random.Random, node_budget: int) -> None:
    tree, proposals = random_tree(rng, 25, depth=4, ranks=4), guesses(rng, heads=3, ranks=3)
    request = DraftRequest(proposals, max_nodes=len(tree), max_depth=rng.randint(1, 4), tree=tree)
    [draft] = plan_drafts(
        {9: request}, sequences=1, num_prefill_rows=0, node_budget=node_budget, cost=FLAT_COST
    ).values()
    possible = [
        tuple(int(proposals.tokens[depth, rank]) for depth, rank in enumerate(path))
        for path in tree.nodes
        if len(path) <= min(3, request.max_depth) and max(path) < 3
    ]
    assert token_paths(draft) == possible[:node_budget]


def best_goodput(
    requests: dict[int, DraftRequest],
    sequences: int,
    others: int,
    num_prefilling: int,
    node_budget: int,
    cost: StepCost,
) -> tuple[float, list[float]]:
    """By brute force: the best ratio over every prefix of all nodes sorted by chance, and all ratios. Time is that of a
    vanilla step of all sequences, ``num_prefilling`` among them, and what the nodes add to the rows that there are.

    Stops where the planner may: the first time that the ratio is ``GIVE_UP`` below the best so far.
    """
    chances: list[float] = []
    for request in requests.values():
        level = [1.0]
        for ranks in request.proposals.probabilities[: request.max_depth].tolist():
            level = [above * min(value * request.trust, 1.0) for above in level for value in ranks]
            chances += [value for value in level if value > 0]
    chances = sorted(chances, reverse=True)[:node_budget]
    vanilla, rows = cost.forward_ms(sequences + num_prefilling), sequences + others
    tokens = float(sequences + num_prefilling)
    best = tokens / vanilla
    ratios = [best]
    for count, value in enumerate(chances, start=1):
        tokens += value
        ratios.append(tokens / (vanilla + cost.forward_ms(rows + count) - cost.forward_ms(rows)))
        best = max(best, ratios[-1])
        if ratios[-1] < best * (GIVE_UP - 1e-6):
            break
    return best, ratios


@settings(max_examples=150)
@given(seeds, st.integers(1, 4), st.integers(0, 40))
def test_planned_nodes_give_the_best_goodput(rng: random.Random, sequences: int, node_budget: int) -> None:
    requests = {
        key: DraftRequest(
            guesses(rng, 3, 3), max_nodes=99, max_depth=rng.randint(1, 3), trust=rng.choice([0.5, 1, 1.5])
        )
        for key in range(sequences)
    }
    cost, others, num_prefilling = random_cost(rng), rng.randint(0, 10), rng.randint(0, 4)
    drafts = plan_drafts(
        requests,
        sequences=sequences,
        num_prefill_rows=others,
        node_budget=node_budget,
        cost=cost,
        num_prefilling=num_prefilling,
    )
    best, ratios = best_goodput(requests, sequences, others, num_prefilling, node_budget, cost)
    nodes = sum(len(draft.tokens) for draft in drafts.values())
    reached = sequences + num_prefilling + sum(draft.expected for draft in drafts.values())
    spent = (
        cost.decode_ms(sequences, nodes, others)
        - cost.forward_ms(sequences)
        + cost.forward_ms(sequences + num_prefilling)
    )
    assert reached / spent == pytest.approx(best, rel=1e-4)
    assert ratios[nodes] == pytest.approx(best, rel=1e-4)


def test_no_nodes_when_a_row_costs_as_much_as_a_step() -> None:
    request = DraftRequest(guesses(random.Random(1), 4, 4), max_nodes=32, max_depth=4)
    dear = StepCost(rows=((1, 1.0), (2, 2.0)))
    [draft] = plan_drafts({0: request}, sequences=1, num_prefill_rows=0, node_budget=50, cost=dear).values()
    assert draft == Draft()


def test_a_dip_in_the_ratio_is_looked_past() -> None:
    """A first node that is not worth its price alone, but brings a second one for nothing."""
    request = DraftRequest(
        Proposals(np.array([[1, 2]], np.int32), np.array([[0.4, 0.39]], np.float32)), max_nodes=9, max_depth=1
    )
    stairs = StepCost(rows=((1, 1.0), (2, 1.45), (3, 1.45)))
    [draft] = plan_drafts({0: request}, sequences=1, num_prefill_rows=0, node_budget=9, cost=stairs).values()
    assert draft.tokens == [1, 2]


@pytest.mark.parametrize("max_nodes", range(7))
def test_max_nodes_bounds_planned_drafts(max_nodes: int) -> None:
    """Siblings and children that were opened before the limit was reached must not slip in after it."""
    request = DraftRequest(guesses(random.Random(3), 4, 4), max_nodes=max_nodes, max_depth=4, trust=9.0)
    [draft] = plan_drafts(
        {0: request}, sequences=1, num_prefill_rows=0, node_budget=50, cost=StepCost(rows=((1, 1.0),))
    ).values()
    assert len(draft.tokens) == max_nodes


def test_trees_of_their_own_come_before_planned_ones() -> None:
    rng = random.Random(4)
    own = DraftRequest(guesses(rng, 4, 4), max_nodes=6, max_depth=4, tree=CandidateTree.parse("2x2"))
    planned = DraftRequest(guesses(rng, 4, 4), max_nodes=30, max_depth=4)
    drafts = plan_drafts(
        {0: planned, 1: own}, sequences=2, num_prefill_rows=0, node_budget=8, cost=StepCost(rows=((1, 1.0),))
    )
    assert (len(drafts[0].tokens), len(drafts[1].tokens)) == (2, 6)


def test_children_of_repeated_tokens_are_those_of_the_first() -> None:
    """A walk that meets two equal siblings follows one of them, always the same."""
    draft = Draft(tokens=[5, 5, 7, 8], parents=[0, 0, 1, 2])
    assert draft.children() == [{5: 1}, {7: 3}, {8: 4}, {}, {}]


def test_nodes_are_no_cheaper_beside_a_prompt() -> None:
    """A long step hides a node's time, but the node still takes it: prompts beside must not make poor guesses pay."""
    cost = StepCost(rows=((1, 10.0), (4, 10.0), (100, 106.0)))  # from four rows on, a millisecond each
    request = DraftRequest(Proposals(np.array([[5]], dtype=np.int32), np.array([[0.3]], dtype=np.float32)), 8, 1)

    def drafted(**step: int) -> int:
        drafts = plan_drafts(dict.fromkeys(range(4), request), sequences=4, node_budget=50, cost=cost, **step)
        return sum(len(draft.tokens) for draft in drafts.values())

    assert drafted(num_prefill_rows=0) == 0
    assert drafted(num_prefill_rows=60) == 0
    assert drafted(num_prefill_rows=60, num_prefilling=12) == 0, "and there will be more to share a step's time"


@given(seeds)
def test_heads_go_deeper_for_one_request_than_for_many(rng: random.Random) -> None:
    """And not at all deeper where a row of the next step costs more than any guess can bring."""
    slope = rng.uniform(0.05, 0.4)
    cost = StepCost(rows=((1, 9.0), (129, 9.0 + 128 * slope)), heads=((1, 0.4), (32, 3.0)))

    def least(sequences: int, row_cost_factor: float = 1.0) -> float:
        rows, tokens = 2 * sequences, 1.5 * sequences
        return min_survival(
            cost, sequences=sequences, rows=rows, tokens=tokens, row_cost_factor=row_cost_factor, num_heads=4
        )

    assert LEAST_SURVIVAL <= least(1) <= least(4) <= least(16) <= 0.9
    assert least(4) <= least(4, row_cost_factor=2.0)
    dear = StepCost(rows=((1, 1.0), (2, 2.0)), heads=((1, 0.1),))
    assert min_survival(dear, sequences=4, rows=8, tokens=6.0, row_cost_factor=1.0, num_heads=4) == 0.9


def test_nothing_is_looked_up_where_no_guess_could_pay() -> None:
    cost = StepCost(rows=((1, 9.1), (8, 11.0), (16, 14.4), (32, 22.5), (64, 39.0), (128, 74.0)))
    assert [lookup_pays(cost, sequences=n, row_cost_factor=1.0) for n in (1, 4, 8, 16, 32)] == [
        True,
        True,
        True,
        False,
        False,
    ]
    assert not lookup_pays(cost, sequences=8, row_cost_factor=4.0)
    assert lookup_pays(StepCost(rows=((1, 9.0), (128, 9.5))), sequences=64, row_cost_factor=1.0), "as on a GPU"


def test_allocating_nodes_for_32_sequences_is_fast() -> None:
    """Some thirty microseconds where this was written: half a yardstick, on a table as a CPU's."""
    rng = random.Random(5)
    cost = StepCost(rows=((1, 9.1), (8, 11.0), (16, 14.4), (32, 22.5), (64, 39.0), (128, 74.0)))
    requests = {key: DraftRequest(guesses(rng, 4, 10), max_nodes=32, max_depth=4) for key in range(32)}
    taken = yardsticks(lambda: plan_drafts(requests, sequences=32, num_prefill_rows=0, node_budget=200, cost=cost))
    assert taken <= 2.5, taken
