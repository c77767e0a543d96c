"""The planner in C takes exactly the nodes that its reference in Python takes, bit for bit."""

from __future__ import annotations

import random
from array import array
from functools import cache

import pytest

from backends.cost.step_cost import StepCost
from backends.runners.base import Proposals
from backends.runners.native.bindings import NativeUnavailable, load_library
from backends.speculation.guided import GuidedProposals
from backends.speculation.native_planner import NativePlanner
from backends.speculation.tree_builder import Chain, Draft, DraftRequest, Goodput, best_first_nodes

CASES = 10_000


@pytest.fixture(scope="module")
def planner() -> NativePlanner:
    try:
        return NativePlanner(load_library())
    except NativeUnavailable as error:
        pytest.skip(f"no C compiler: {error}")


def random_proposals(rng: random.Random, vocabulary: int) -> Proposals:
    """Lists of any form: of parallel heads, of sequential ones, by a grammar; equal chances, none, and repeats too."""
    lists, k = rng.randint(1, 5), rng.randint(1, 6)
    steps = rng.choice((2, 1000))  # few different chances: many ties
    tokens, chances, below = array("i"), array("f"), array("i")
    for index in range(lists):
        guesses = [rng.randrange(vocabulary) for _ in range(k)]
        tokens.extend(guesses)
        chances.extend(sorted((rng.randint(0, steps) / steps for _ in guesses), reverse=True))
        below.extend(rng.choice((-1, rng.randint(index + 1, lists - 1))) if index + 1 < lists else -1 for _ in guesses)
    kind = rng.choice(("parallel", "sequential", "grammar"))
    if kind == "parallel":
        return Proposals.of_memory(tokens, chances, None, k, lists)  # type: ignore[arg-type]
    if kind == "sequential":
        return Proposals.of_memory(tokens, chances, below, k, lists)
    found = GuidedProposals.of_memory(tokens, chances, below, k, lists)
    assert isinstance(found, GuidedProposals)
    found.forced = frozenset(index for index in range(lists) if rng.random() < 0.3)
    return found


def random_request(rng: random.Random) -> DraftRequest:
    vocabulary = rng.choice((2, 5, 50))
    chains = {}
    for name in rng.sample(("lookup", "corpus", "draft model"), rng.choice((0, 0, 1, 1, 2))):
        length = rng.randint(1, 9)
        chances = [rng.choice((0.0, 1.0, rng.random())) for _ in range(length)]
        chains[name] = Chain([rng.randrange(vocabulary) for _ in range(length)], chances)
    return DraftRequest(
        proposals=random_proposals(rng, vocabulary) if rng.random() < 0.8 else None,
        max_nodes=rng.choice((0, 1, 3, 16, 64)),
        max_depth=rng.choice((0, 1, 2, 4, 8)),
        trust=rng.choice((1.0, 1.0, 0.5, 1.7, rng.random())),
        chains=chains,
        longest=rng.choice((None, 1, 4, 16)),
    )


@cache
def random_cost(seed: int) -> StepCost:
    """Steps and slopes, as real tables have."""
    rng = random.Random(seed)
    return StepCost.from_measurements([(1, 1.0), *((rng.randrange(2, 90), 1.0 + rng.random()) for _ in range(3))])


def random_step(rng: random.Random) -> tuple[dict[int, DraftRequest], Goodput]:
    keys = sorted(rng.sample(range(100), rng.choice((1, 1, 2, 5, 9))))
    cost, base_rows = random_cost(rng.randrange(40)), rng.choice((1, 7, 60, 510))
    goodput = Goodput(
        base_tokens=len(keys) + rng.random(),
        node_budget=rng.choice((0, 1, 5, 40, 300)),
        cost=cost,
        base_ms=cost.forward_ms(base_rows),
        base_rows=base_rows,
        row_cost_factor=rng.choice((1.0, 0.5, 4.0, rng.random())),
    )
    return {key: random_request(rng) for key in keys}, goodput


def test_same_nodes_as_the_reference_in_ten_thousand_random_steps(planner: NativePlanner) -> None:
    nodes = 0
    for seed in range(CASES):
        requests, goodput = random_step(random.Random(seed))
        expected, found = best_first_nodes(requests, goodput), planner(requests, goodput)
        assert found == expected, f"seed {seed}"
        assert list(found) == list(expected)
        nodes += sum(len(draft.tokens) for draft in found.values())
    assert nodes > 3 * CASES


def test_large_batches_and_a_dear_table(planner: NativePlanner) -> None:
    rng = random.Random(1)
    for slope in (0.0, 0.001, 0.05):
        requests = {key: random_request(rng) for key in range(256)}
        cost = StepCost.from_measurements([(1, 1.0), (2000, 1.0 + 2000 * slope)])
        goodput = Goodput(256.0, 768, cost, cost.forward_ms(256), 256, 1.0)
        assert planner(requests, goodput) == best_first_nodes(requests, goodput)


def test_another_table_is_noticed(planner: NativePlanner) -> None:
    """Buffers are kept from call to call; what is in them must not be."""
    request = {3: DraftRequest(None, 4, 4, chains={"lookup": Chain([5, 6], [0.6, 0.5])})}
    cheap, dear = (StepCost.from_measurements([(1, 1.0), (9, 1.0 + ms)]) for ms in (0.1, 90.0))
    for cost, drafted in ((cheap, [5, 6]), (dear, []), (cheap, [5, 6])):
        found = planner(request, Goodput(1.0, 8, cost, cost.forward_ms(1), 1, 1.0))
        assert found[3].tokens == drafted
    assert planner({}, Goodput(1.0, 8, cheap, 1.0, 1, 1.0)) == {}
    assert planner(request, Goodput(1.0, 0, cheap, 1.0, 1, 1.0)) == {3: Draft()}
