"""From measured acceptance to a candidate tree, and to how far the engine's own per-step planning need look.

The engine plans every step from the heads' own probabilities. Those are only the heads' opinion: what a class of
prompts has really accepted says which heads and how many nodes are worth considering at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from backends.tree import CandidateTree, best_first_paths

NEGLIGIBLE = 0.01
"""What may be given up: the share of all expected tokens that the nodes or levels that are cut would have brought.

Little, since the engine knows more at each step than an average says: a bound is there to stop heads that are sure of
themselves and wrong, not to plan in the engine's place.
"""
MIN_ATTEMPTS = 20.0
"""A head's rates count once it was checked this often."""
THIN_ATTEMPTS = 50.0
"""With fewer checks of the first head, that deeper ones were hardly ever reached says nothing of them."""
MOST_NODES = 64


@dataclass(frozen=True, slots=True)
class Proposal:
    """What the statistics speak for. ``tree`` None: no node is worth a row."""

    heads: int
    nodes: int
    tree: CandidateTree | None
    expected_tokens: float


def propose(accuracies: Sequence[Sequence[float]], attempts: Sequence[float]) -> Proposal | None:
    """None while not even the first head has been checked often enough.

    The first head without evidence of its own is taken to be as good as the one before it: only use makes evidence.
    While there is little evidence at all, so are the heads below it.
    """
    known: list[Sequence[float]] = []
    for rates, checked in zip(accuracies, attempts, strict=False):
        if checked < MIN_ATTEMPTS:
            break
        # A little for every rank: a guess that was never right in a few steps may well be in the next.
        known.append([min((rate * checked + 0.3) / (checked + 1.0), 1.0) for rate in rates])
    if not known:
        return None
    unknown = len(attempts) - len(known)
    known += [known[-1]] * (unknown if attempts[0] < THIN_ATTEMPTS else min(unknown, 1))
    # Best first, whatever order the ranks have really earned: the enumeration relies on it.
    paths, survival = best_first_paths([sorted(rates, reverse=True) for rates in known], MOST_NODES)
    spare = NEGLIGIBLE * (1.0 + sum(survival))
    kept = len(paths)
    while kept and (spare := spare - survival[kept - 1]) >= 0:
        kept -= 1
    if kept == 0:
        return Proposal(heads=1, nodes=0, tree=None, expected_tokens=1.0)
    tree = CandidateTree(paths[:kept], survival[:kept])
    return Proposal(heads=tree.depth, nodes=kept, tree=tree, expected_tokens=1.0 + sum(tree.survival))
