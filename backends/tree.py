"""Candidate trees: which continuations of a sequence are verified in one step.

A node is named by its *path*: the rank of the head's guess taken at each depth. ``(0,)`` is the first head's best
guess, ``(0, 2)`` the second head's third-best guess below it. This is the notation of the Medusa paper
(Cai et al., 2024, section 2.2). The root (the already sampled, *pending* token) is not a node.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heappop, heappush

MAX_NODES = 256
MAX_DEPTH = 16
MAX_RANKS = 32

Path = tuple[int, ...]


class TreeError(ValueError):
    """A candidate tree that can't be used; the message says which part and how to mend it."""


@dataclass(frozen=True)
class CandidateTree:
    """An ordered, prefix-closed list of nodes: every prefix of the list is itself a valid tree.

    ``survival[i]`` is the estimated probability that node ``i`` and all its ancestors are accepted; empty when the
    tree was given as a bare shape. Raises :class:`TreeError` for an empty path, a duplicate, a child before its
    parent, a rank of :data:`MAX_RANKS` or more, or a tree over :data:`MAX_NODES` nodes or :data:`MAX_DEPTH` levels.
    """

    nodes: tuple[Path, ...]
    survival: tuple[float, ...] = field(default=())

    def __post_init__(self) -> None:
        if len(self.nodes) > MAX_NODES:
            raise TreeError(f"tree has {len(self.nodes)} nodes; at most {MAX_NODES} are allowed")
        if self.survival and len(self.survival) != len(self.nodes):
            raise TreeError("survival must name one probability per node")
        seen: set[Path] = {()}
        for path in self.nodes:
            if not path:
                raise TreeError("a path is empty: the root is implied, list only the nodes below it")
            if len(path) > MAX_DEPTH:
                raise TreeError(f"path {list(path)} is deeper than {MAX_DEPTH} levels")
            if any(not 0 <= rank < MAX_RANKS for rank in path):
                raise TreeError(f"path {list(path)} has a rank outside 0 to {MAX_RANKS - 1}")
            if path in seen:
                raise TreeError(f"path {list(path)} is listed twice")
            if path[:-1] not in seen:
                raise TreeError(f"path {list(path)} comes before its parent {list(path[:-1])}; list the parent first")
            seen.add(path)

    def __len__(self) -> int:
        return len(self.nodes)

    @cached_property
    def depth(self) -> int:
        """Number of heads that the tree uses."""
        return max((len(path) for path in self.nodes), default=0)

    @cached_property
    def ranks_per_depth(self) -> tuple[int, ...]:
        """How many of each head's best guesses the tree needs, by depth."""
        widths = [0] * self.depth
        for path in self.nodes:
            widths[len(path) - 1] = max(widths[len(path) - 1], path[-1] + 1)
        return tuple(widths)

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """Row of each node's parent when the root is row 0 and node ``i`` is row ``i + 1``."""
        row_of: dict[Path, int] = {(): 0}
        parents = []
        for row, path in enumerate(self.nodes, start=1):
            parents.append(row_of[path[:-1]])
            row_of[path] = row
        return tuple(parents)

    def clamp(self, *, heads: int | None = None, nodes: int | None = None) -> CandidateTree:
        """The same tree without nodes below ``heads`` levels and without all but its first ``nodes`` nodes."""
        kept = [i for i, path in enumerate(self.nodes) if heads is None or len(path) <= heads]
        if nodes is not None:
            kept = kept[: max(nodes, 0)]
        if len(kept) == len(self.nodes):
            return self
        return CandidateTree(
            tuple(self.nodes[i] for i in kept), tuple(self.survival[i] for i in kept) if self.survival else ()
        )

    @classmethod
    def from_branching(cls, branching: Sequence[int]) -> CandidateTree:
        """The full product tree: ``[4, 2, 1]`` tries 4 guesses, 2 below each, then 1 below each of those."""
        if not branching:
            raise TreeError("branching is empty; give one width per depth, such as 4x2x1")
        if any(width < 1 for width in branching):
            raise TreeError("every width in a branching must be at least 1")
        total, level_size = 0, 1
        for width in branching:
            level_size *= width
            total += level_size
            if total > MAX_NODES:
                raise TreeError(f"branching {'x'.join(map(str, branching))} makes more than {MAX_NODES} nodes")
        level: list[Path] = [()]
        nodes: list[Path] = []
        for width in branching:
            level = [(*path, rank) for path in level for rank in range(width)]
            nodes.extend(level)
        return cls(tuple(nodes))

    @classmethod
    def parse(cls, shape: str | Iterable[Iterable[int]]) -> CandidateTree:
        """Read a shape as users write it: ``"4x2x1"`` (branching per depth) or a list of paths."""
        if isinstance(shape, str):
            try:
                branching = [int(width) for width in shape.lower().split("x")]
            except ValueError:
                raise TreeError(f"tree {shape!r} is not a branching such as 4x2x1") from None
            return cls.from_branching(branching)
        return cls(tuple(tuple(path) for path in shape))

    @classmethod
    def from_accuracies(cls, accuracies: Sequence[Sequence[float]], nodes: int) -> CandidateTree:
        """The best ``nodes`` nodes if head ``h``'s guess of rank ``r`` is right with probability ``accuracies[h][r]``.

        Heads are taken as independent, as in the Medusa paper's tree construction. Best-first, so any prefix is the
        best tree of its size under that model.
        """
        return cls(*best_first_paths(accuracies, nodes))


def best_first_paths(accuracies: Sequence[Sequence[float]], nodes: int) -> tuple[tuple[Path, ...], tuple[float, ...]]:
    """Best-first enumeration of paths by the product of per-depth probabilities, highest first.

    Ranks of one depth may have their probabilities in any order, as measured ones have.
    """
    # Siblings are opened from the likeliest on, so that the heap's top is the best of all nodes that can follow.
    ranks = [sorted(range(len(depth)), key=lambda rank, depth=depth: -depth[rank]) for depth in accuracies]
    heap: list[tuple[float, Path, int, float]] = []

    def push(parent: Path, place: int, above: float) -> None:
        depth = len(parent)
        if depth < len(ranks) and place < len(ranks[depth]):
            rank = ranks[depth][place]
            probability = above * accuracies[depth][rank]
            if probability > 0 and math.isfinite(probability):
                heappush(heap, (-probability, (*parent, rank), place, above))

    push((), 0, 1.0)
    order: list[Path] = []
    survival: list[float] = []
    while heap and len(order) < nodes:
        negative, path, place, above = heappop(heap)
        order.append(path)
        survival.append(-negative)
        # The next-best sibling and the best child are the only two nodes that this one opens up.
        push(path[:-1], place + 1, above)
        push(path, 0, -negative)
    return tuple(order), tuple(survival)
