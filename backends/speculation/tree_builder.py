"""From guesses to the candidate nodes of one step, for all sequences at once.

The heads' lists and others' chains are joined in one tree for each sequence; every node remembers who guessed it.

Goodput planning: a node is worth its chance of being accepted; a step of n more rows costs what :class:`StepCost` says.
Nodes are taken best first over *all* sequences, and as many are kept as maximise expected tokens per millisecond. When
the batch is large, or the heads are unsure, that is none, which is vanilla decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from types import MappingProxyType
from typing import NamedTuple

from backends.cost.step_cost import StepCost
from backends.heads.expansion import LEAST_SURVIVAL
from backends.runners.base import Proposals
from backends.speculation.guided import GuidedProposals
from backends.tree import CandidateTree

# The source of nodes that come from lists of siblings (:class:`Proposals`).
HEADS = "heads"
# The source of nodes that the text's own repetition gives (:mod:`backends.speculation.prompt_lookup`).
LOOKUP = "lookup"
# The source of nodes that a grammar forces (:mod:`backends.speculation.guided`).
GRAMMAR = "grammar"


@dataclass(frozen=True, slots=True)
class Chain:
    """Tokens guessed to follow each other; ``chances[d]``: that token d is right, given those before it."""

    tokens: list[int]
    chances: list[float]


# What one drafter offers for one sequence.
Offer = Proposals | Chain
NO_OFFERS: Mapping[str, Offer] = MappingProxyType({})


@dataclass(slots=True)
class Draft:
    """Candidate nodes of one sequence for one step.

    Of node i, ``parents[i]`` is the row of its parent, the root being row 0 and node i row i + 1; ``sources[i]`` names
    who guessed it; ``survivals[i]`` is its chance that it and all above it are right.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    survivals: list[float] = field(default_factory=list)

    @property
    def expected(self) -> float:
        """Tokens that the nodes are expected to add."""
        return sum(self.survivals)

    def expected_from(self, source: str) -> float:
        """Tokens that the nodes of one source are expected to add."""
        return sum([chance for chance, each in zip(self.survivals, self.sources, strict=True) if each == source])

    def add(self, token: int, parent: int, source: str, survival: float) -> None:
        self.tokens.append(token)
        self.parents.append(parent)
        self.sources.append(source)
        self.survivals.append(survival)

    def children(self) -> list[dict[int, int]]:
        """For every row (root first): token -> row of the child that holds it."""
        if not self.tokens:
            return [{}]
        below: list[dict[int, int]] = [{} for _ in range(len(self.tokens) + 1)]
        for row, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True), start=1):
            below[parent].setdefault(token, row)
        return below


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """What one sequence may draft. ``trust`` scales the heads' probabilities by this sequence's own record.

    ``chains``: other guesses by their source. ``max_depth`` bounds the heads' levels, ``longest`` also those of chains
    (None: as the heads). A ``tree`` is drafted from ``proposals`` alone.
    """

    proposals: Proposals | None
    max_nodes: int
    max_depth: int
    trust: float = 1.0
    tree: CandidateTree | None = None
    chains: Mapping[str, Chain] = field(default_factory=dict)
    longest: int | None = None

    @property
    def best_chance(self) -> float:
        """How likely the best candidate is."""
        of_heads = 0.0 if self.proposals is None else min(self.proposals.best_probability(0) * self.trust, 1.0)
        return max([of_heads, *(chain.chances[0] for chain in self.chains.values() if chain.chances)])


def draft_from_tree(request: DraftRequest, max_nodes: int) -> Draft:
    """The operator's or client's own tree, cut to what the step has room for and the request can still use."""
    assert request.tree is not None and request.proposals is not None
    proposals, ranks = request.proposals, request.proposals.k
    draft = Draft()
    # Of the nodes taken: row, survival, and the list of guesses below.
    taken: dict[tuple[int, ...], tuple[int, float, int]] = {(): (0, 1.0, 0)}
    for path in request.tree.nodes:
        if len(draft.tokens) >= max_nodes:
            break
        rank, above = path[-1], taken.get(path[:-1])
        if above is None or len(path) > request.max_depth or rank >= ranks:
            continue
        parent, survival, siblings = above
        if siblings < 0:
            continue
        survival *= proposals.probabilities_of(siblings)[rank]
        draft.add(proposals.tokens_of(siblings)[rank], parent, HEADS, survival)
        taken[path] = (len(draft.tokens), survival, proposals.following(siblings)[rank])
    return draft


def plan_drafts(
    requests: dict[int, DraftRequest],
    *,
    sequences: int,
    num_prefill_rows: int,
    node_budget: int,
    cost: StepCost,
    num_prefilling: int = 0,
    row_cost_factor: float = 1.0,
    best_first: BestFirst | None = None,
) -> dict[int, Draft]:
    """Nodes for every sequence in ``requests`` (keys are the caller's).

    ``sequences`` decode in this step, with ``num_prefill_rows`` rows of prompts beside them; ``node_budget``: node rows
    that the step can hold. Sequences with a tree of their own get it first; the rest share what is left by goodput.
    ``num_prefilling`` more sequences will decode when their prompts are read: what a token is worth is the time it
    will save among all of them. ``row_cost_factor``: measured time of one more row / what ``cost`` says of it, see
    :meth:`backends.cost.calibration.Calibration.row_cost_factor`. ``best_first``: who takes the nodes, with the same
    result as :func:`best_first_nodes`, which does by default.
    """
    drafts: dict[int, Draft] = {}
    if not requests:
        return drafts
    planned: dict[int, DraftRequest] = {}
    for key, request in requests.items():
        if request.tree is None:
            planned[key] = request
        else:
            drafts[key] = draft_from_tree(request, min(node_budget, request.max_nodes))
            node_budget -= len(drafts[key].tokens)
    nodes = sum(len(draft.tokens) for draft in drafts.values())
    base_tokens = sequences + num_prefilling + sum(draft.expected for draft in drafts.values())
    base_ms = cost.decode_ms(sequences + num_prefilling, nodes, num_prefill_rows)
    goodput = Goodput(base_tokens, node_budget, cost, base_ms, sequences + num_prefill_rows + nodes, row_cost_factor)
    return {**drafts, **(best_first or best_first_nodes)(planned, goodput)}


class Goodput(NamedTuple):
    """What a step brings and costs before candidates: tokens, milliseconds by the table ``cost``, and rows."""

    base_tokens: float
    node_budget: int
    cost: StepCost
    base_ms: float
    base_rows: int
    row_cost_factor: float


# Takes the nodes that maximise tokens per millisecond; a draft for each request, empty where none of its is worth it.
BestFirst = Callable[[dict[int, DraftRequest], Goodput], dict[int, Draft]]


# Rows over which the price of one more is taken: the table has steps.
_AHEAD = 4
# A node must be likelier than this before looking up is given up: about what looked-up tokens are, as a rule.
_MOST_PRICE_OF_LOOKUP = 0.5
# How likely the best guess of a list is, as a rule, and bounds of what is returned.
_BEST_OF_LIST = 0.6
_MOST_SURVIVAL = 0.9


def min_survival(
    cost: StepCost, *, sequences: int, rows: int, tokens: float, row_cost_factor: float, num_heads: int
) -> float:
    """How likely a guess must be for a list of guesses below it to pay, for heads that make lists one after the other.

    Of a step like the last one, with ``rows`` rows and ``tokens`` expected from it: the best guess of the list would
    have to be worth the row that it takes in the next step, and the list itself. In a large batch, where both buy time
    for many, the heads then stop after the first level.
    """
    step_ms = cost.forward_ms(rows) + cost.heads_ms(sequences)
    list_ms = cost.heads_ms(sequences) / (num_heads * sequences)
    needed = tokens / step_ms * (_row_ms(cost, rows) * row_cost_factor + list_ms) / _BEST_OF_LIST
    return min(max(needed, LEAST_SURVIVAL), _MOST_SURVIVAL)


def lookup_pays(cost: StepCost, *, sequences: int, row_cost_factor: float) -> bool:
    """Whether looked-up tokens can be worth their rows in a batch of this size; if not, nor is finding them."""
    return row_price(cost, sequences=sequences, row_cost_factor=row_cost_factor) <= _MOST_PRICE_OF_LOOKUP


def row_price(cost: StepCost, *, sequences: int, row_cost_factor: float) -> float:
    """How many tokens a vanilla step of this batch brings in the time that one more row takes."""
    return sequences / cost.forward_ms(sequences) * _row_ms(cost, sequences) * row_cost_factor


def _row_ms(cost: StepCost, rows: int) -> float:
    return (cost.forward_ms(rows + _AHEAD) - cost.forward_ms(rows)) / _AHEAD


class _Node(NamedTuple):
    """A node that is worth taking; its row is one more than the number of its sequence's nodes before it."""

    key: int
    token: int
    parent_row: int
    source: str
    survival: float


class _Guesses(NamedTuple):
    """A list of siblings, best first: ``below[rank]`` is the list that follows a guess, -1 for none."""

    tokens: list[int]
    probabilities: list[float]
    below: list[int]


_NO_GUESSES = _Guesses([], [], [])


class _Lists:
    """One sequence's lists of guesses, unpacked when they are first looked at: of many sequences few nodes are taken.

    ``taken`` counts the nodes.
    """

    __slots__ = ("_lists", "_of_paths", "_proposals", "_sources", "_trust", "depth", "nodes", "taken")

    def __init__(self, request: DraftRequest) -> None:
        self._proposals, self._trust = request.proposals, request.trust
        self._lists: dict[int, _Guesses] = {}
        self.depth, self.nodes, self.taken = request.max_depth, request.max_nodes, 0
        # Who has guessed a token of a list, where that is not the heads; and the lists that follow one path only.
        self._sources: dict[tuple[int, int], str] = {}
        if isinstance(request.proposals, GuidedProposals):
            self._sources = {
                (index, request.proposals.tokens_of(index)[0]): GRAMMAR for index in request.proposals.forced
            }
        self._of_paths: set[int] = set()
        longest = request.max_depth if request.longest is None else request.longest
        for source, chain in request.chains.items():
            self._join(source, chain, longest)

    def first(self, depth: int, index: int) -> float:
        """The probability of a list's best guess; 0 where there is none, or ``depth`` is too deep for it."""
        if depth <= self.depth and self._proposals is not None and index not in self._lists:
            return min(self._proposals.best_probability(index) * self._trust, 1.0)
        guesses = self.guesses(index)
        if not guesses.tokens or not self.reaches(depth, index, guesses.tokens[0]):
            return 0.0
        return guesses.probabilities[0]

    def source(self, index: int, token: int) -> str:
        return self._sources.get((index, token), HEADS) if self._sources else HEADS

    def reaches(self, depth: int, index: int, token: int) -> bool:
        """Whether a guess may stand as deep as this: those of the heads end before the others."""
        return depth <= self.depth or self.source(index, token) != HEADS

    def guesses(self, index: int) -> _Guesses:
        found = self._lists.get(index)
        if found is None:
            found = self._lists[index] = self._unpacked(index)
        return found

    def _unpacked(self, index: int) -> _Guesses:
        proposals = self._proposals
        if proposals is None or not 0 <= index < proposals.lists:
            return _NO_GUESSES
        probabilities = proposals.probabilities_of(index)
        if self._trust != 1.0:
            probabilities = [min(p * self._trust, 1.0) for p in probabilities]
        return _Guesses(proposals.tokens_of(index), probabilities, proposals.following(index))

    def _join(self, source: str, chain: Chain, longest: int) -> None:
        """Put the chain's tokens among the guesses that are there, each in a list of its own path."""
        index = 0
        for depth, (token, chance) in enumerate(zip(chain.tokens, chain.chances, strict=True)):
            if depth >= longest:
                return
            guesses = list(zip(*self.guesses(index), strict=True))
            _, known, below = next((guess for guess in guesses if guess[0] == token), (token, 0.0, -1))
            if known < chance:
                # The other guesses share what is left.
                left = min((1.0 - chance) / max(1.0 - known, 1e-6), 1.0)
                guesses = [(t, p * left, following) for t, p, following in guesses if t != token]
                guesses.append((token, chance, below))
                guesses.sort(key=lambda guess: -guess[1])
                self._sources[index, token] = source
            # The next token's list follows this path only, whatever else the list below follows.
            path = below
            if path not in self._of_paths:
                path = (0 if self._proposals is None else self._proposals.lists) + len(self._of_paths) + 1
                self._of_paths.add(path)
                self._lists[path] = self.guesses(below) if depth + 1 < self.depth else _NO_GUESSES
                for each in self._lists[path].tokens if self._sources else ():
                    if (below, each) in self._sources:
                        self._sources[path, each] = self._sources[below, each]
            followed = [path if guess[0] == token else guess[2] for guess in guesses]
            self._lists[index] = _Guesses([guess[0] for guess in guesses], [guess[1] for guess in guesses], followed)
            index = path


# A dip in the ratio may only be a step in the cost table, so the search goes on a little past the best point.
GIVE_UP = 0.93


def best_first_nodes(requests: dict[int, DraftRequest], goodput: Goodput) -> dict[int, Draft]:
    """The nodes that maximise tokens per millisecond, each after its parent and its better siblings.

    Taking a guess opens its next sibling and the first guess below it. Plain tuples and one loop: this runs in every
    step, for all sequences. The reference for :mod:`backends.speculation.native_planner`, and what runs without it.
    """
    base_tokens, node_budget, cost, base_ms, base_rows, row_cost_factor = goodput
    # (-survival, depth, key, serial, list, rank, parent row, survival of the parent)
    heap: list[tuple[float, int, int, int, int, int, int, float]] = []
    lists: dict[int, _Lists] = {}
    for key, request in requests.items():
        if request.max_nodes <= 0 or request.max_depth <= 0:
            continue
        if not request.chains and request.proposals is not None:
            survival = min(request.proposals.best_probability(0) * request.trust, 1.0)
        else:
            lists[key] = _Lists(request)
            survival = lists[key].first(1, 0)
        if survival > 0.0:
            heap.append((-survival, 1, key, 0, 0, 0, 0, 1.0))
    heapify(heap)
    order: list[_Node] = []
    forward_ms, base_forward_ms = cost.forward_ms, cost.forward_ms(base_rows)
    tokens, serial = base_tokens, 0
    best_ratio, best_count = tokens / base_ms, 0
    while heap and len(order) < node_budget:
        negative, depth, key, _, index, rank, parent_row, above = heappop(heap)
        found = lists.get(key)
        if found is None:
            found = lists[key] = _Lists(requests[key])
        if found.taken >= found.nodes:
            continue
        survival, (siblings, probabilities, below) = -negative, found.guesses(index)
        order.append(_Node(key, siblings[rank], parent_row, found.source(index, siblings[rank]), survival))
        tokens += survival
        ratio = tokens / (base_ms + (forward_ms(base_rows + len(order)) - base_forward_ms) * row_cost_factor)
        if ratio > best_ratio:
            best_ratio, best_count = ratio, len(order)
        elif ratio < best_ratio * GIVE_UP:
            break
        found.taken += 1
        if found.taken >= found.nodes:
            continue
        serial += 2
        rank += 1
        if rank < len(siblings) and found.reaches(depth, index, siblings[rank]):
            sibling = above * probabilities[rank]
            if sibling > 0.0:
                heappush(heap, (-sibling, depth, key, serial, index, rank, parent_row, above))
        following = below[rank - 1]
        if following >= 0:
            child = survival * found.first(depth + 1, following)
            if child > 0.0:
                heappush(heap, (-child, depth + 1, key, serial + 1, following, 0, found.taken, survival))
    drafts = {key: Draft() for key in requests}
    for node in order[:best_count]:
        drafts[node.key].add(node.token, node.parent_row, node.source, node.survival)
    return drafts
