"""From the heads' guesses to the candidate nodes of one step, for all sequences at once.

Goodput planning: a node is worth its chance of being accepted; a step of n more rows costs what :class:`StepCost` says.
Nodes are taken best first over *all* sequences, and as many are kept as maximise expected tokens per millisecond. When
the batch is large, or the heads are unsure, that is none, which is vanilla decoding.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from backends.cost import StepCost
from backends.runner import Proposals
from backends.tree import CandidateTree


@dataclass(slots=True)
class Draft:
    """Candidate nodes of one sequence for one step.

    ``parents[i]`` is the row of node i's parent, the root being row 0 and node i row i + 1. ``expected``: tokens that
    the nodes are expected to add.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    expected: float = 0.0

    def children(self) -> list[dict[int, int]]:
        """For every row (root first): token -> row of the child that holds it."""
        below: list[dict[int, int]] = [{} for _ in range(len(self.tokens) + 1)]
        for row, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True), start=1):
            below[parent].setdefault(token, row)
        return below


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """What one sequence may draft. ``trust`` scales the heads' probabilities by this sequence's own record."""

    proposals: Proposals
    max_nodes: int
    max_depth: int
    trust: float = 1.0
    tree: CandidateTree | None = None


def draft_from_tree(request: DraftRequest, max_nodes: int) -> Draft:
    """The operator's or client's own tree, cut to what the step has room for and the request can still use."""
    assert request.tree is not None
    ranks = request.proposals.tokens.shape[1]
    draft = Draft()
    tokens, probabilities = request.proposals.tokens, request.proposals.probabilities
    following = request.proposals.following()
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
        draft.tokens.append(int(tokens[siblings, rank]))
        draft.parents.append(parent)
        survival *= float(probabilities[siblings, rank])
        draft.expected += survival
        taken[path] = (len(draft.tokens), survival, following[siblings][rank])
    return draft


def plan_drafts(
    requests: dict[int, DraftRequest], *, sequences: int, other_rows: int, room: int, cost: StepCost
) -> dict[int, Draft]:
    """Nodes for every sequence in ``requests`` (keys are the caller's).

    ``sequences`` decode in this step, ``other_rows`` are prompt rows beside them, ``room`` is how many node rows the
    step can hold. Sequences with a tree of their own get it first; the rest share what is left by goodput.
    """
    drafts: dict[int, Draft] = {}
    planned: dict[int, DraftRequest] = {}
    for key, request in requests.items():
        if request.tree is None:
            planned[key] = request
        else:
            drafts[key] = draft_from_tree(request, min(room, request.max_nodes))
            room -= len(drafts[key].tokens)
    base_rows = sequences + other_rows + sum(len(draft.tokens) for draft in drafts.values())
    base_tokens = sequences + sum(draft.expected for draft in drafts.values())
    searches = {key: _Search(request) for key, request in planned.items()}
    order = _best_first(searches, base_rows, base_tokens, room, cost)
    for key in planned:
        drafts[key] = Draft()
    for key, node in order:
        draft = drafts[key]
        draft.tokens.append(node.token)
        draft.parents.append(node.parent_row)
        draft.expected += node.survival
    return drafts


@dataclass(frozen=True, slots=True)
class _Node:
    survival: float
    depth: int
    siblings: int  # the list of guesses it comes from
    rank: int
    token: int
    parent_row: int
    above: float  # survival of the parent


class _Search:
    """Best-first enumeration of one sequence's nodes; :meth:`take` opens the next sibling and the first child."""

    __slots__ = ("_depth", "_following", "_nodes", "_probabilities", "_tokens", "taken")

    def __init__(self, request: DraftRequest) -> None:
        scaled: NDArray[np.float32] = np.minimum(request.proposals.probabilities * request.trust, 1.0)
        self._probabilities: list[list[float]] = scaled.tolist()
        self._tokens: list[list[int]] = request.proposals.tokens.tolist()
        self._following = request.proposals.following()
        self._depth = request.max_depth
        self._nodes = request.max_nodes
        self.taken = 0

    def first(self) -> _Node | None:
        return self._node(1, 0, 0, 0, 1.0) if self._nodes > 0 else None

    @property
    def full(self) -> bool:
        return self.taken >= self._nodes

    def take(self, node: _Node) -> list[_Node]:
        self.taken += 1
        if self.full:
            return []
        below = self._following[node.siblings][node.rank]
        opened = (
            self._node(node.depth, node.siblings, node.rank + 1, node.parent_row, node.above),
            self._node(node.depth + 1, below, 0, self.taken, node.survival),
        )
        return [found for found in opened if found is not None]

    def _node(self, depth: int, siblings: int, rank: int, parent_row: int, above: float) -> _Node | None:
        if depth > self._depth or siblings < 0 or rank >= len(self._tokens[siblings]):
            return None
        survival = above * self._probabilities[siblings][rank]
        if survival <= 0.0:
            return None
        return _Node(survival, depth, siblings, rank, self._tokens[siblings][rank], parent_row, above)


# A dip in the ratio may only be a step in the cost table, so the search goes on a little past the best point.
_GIVE_UP = 0.93


def _best_first(
    searches: dict[int, _Search], base_rows: int, base_tokens: float, room: int, cost: StepCost
) -> list[tuple[int, _Node]]:
    heap: list[tuple[float, int, int, int, _Node]] = []
    for key, search in searches.items():
        node = search.first()
        if node is not None:
            heap.append((-node.survival, node.depth, key, 0, node))
    heapify(heap)
    order: list[tuple[int, _Node]] = []
    tokens, serial = base_tokens, 0
    best_ratio, best_count = tokens / cost.forward_ms(base_rows), 0
    while heap and len(order) < room:
        _, _, key, _, node = heappop(heap)
        if searches[key].full:
            continue
        order.append((key, node))
        tokens += node.survival
        ratio = tokens / cost.forward_ms(base_rows + len(order))
        if ratio > best_ratio:
            best_ratio, best_count = ratio, len(order)
        elif ratio < best_ratio * _GIVE_UP:
            break
        for opened in searches[key].take(node):
            serial += 1
            heappush(heap, (-opened.survival, opened.depth, key, serial, opened))
    return order[:best_count]
