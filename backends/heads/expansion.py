"""Which guesses sequential heads follow: each list of guesses below another costs a row of the heads' work.

Where the shape of the tree is known, its inner nodes; elsewhere the likeliest guesses of each level.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from backends.tree import CandidateTree, Path

# Lists followed at each level, and how likely a guess must be: what comes below a less likely one is all but never
# worth a row of the next step, and where nothing is likely the heads below need not run at all.
WIDTH = 2
LEAST_SURVIVAL = 0.15


@dataclass(frozen=True, slots=True)
class FollowPlan:
    """The lists below list 0, in ascending level: list ``i + 1`` follows guess ``ranks[i]`` of list ``above[i]``."""

    above: tuple[int, ...]
    ranks: tuple[int, ...]

    @property
    def lists(self) -> int:
        return len(self.above) + 1

    @property
    def widest(self) -> int:
        """Lists of the largest level."""
        levels = [0]
        for above in self.above:
            levels.append(levels[above] + 1)
        return max(levels.count(level) for level in set(levels))


@lru_cache(maxsize=256)
def plan_of_tree(tree: CandidateTree, num_heads: int, k: int) -> FollowPlan:
    """The lists that a tree drafts from, as far as ``num_heads`` and ``k`` guesses a list reach."""
    inner = {path[:-1] for path in tree.nodes if 1 < len(path) <= num_heads and max(path[:-1]) < k}
    number: dict[Path, int] = {(): 0}
    above, ranks = [], []
    for path in sorted(inner, key=lambda path: (len(path), path)):
        number[path] = len(number)
        above.append(number[path[:-1]])
        ranks.append(path[-1])
    return FollowPlan(tuple(above), tuple(ranks))


def usual_tree(num_heads: int) -> CandidateTree:
    """A shape that costs the heads about what following the likeliest guesses does: a list at each level."""
    return CandidateTree.from_branching([1] * num_heads)


class GuessLists:
    """The lists of one sequence as they grow, level by level. The native kernels do the same (``follow_choose``)."""

    def __init__(self, plan: FollowPlan | None, min_survival: float = LEAST_SURVIVAL) -> None:
        self._plan, self._min_survival = plan, min_survival
        self._tokens: list[NDArray[np.int32]] = []
        self._probabilities: list[NDArray[np.float32]] = []
        self._rows: list[int] = []
        self._survival = [1.0]
        self._below: list[list[int]] = []
        self._first = 0

    def add(self, tokens: NDArray[np.int32], probabilities: NDArray[np.float32], row: int) -> None:
        """The guesses [k] of the next list, and the row of the level that its state lies in."""
        self._tokens.append(tokens)
        self._probabilities.append(probabilities)
        self._rows.append(row)
        self._below.append([-1] * len(tokens))

    def open(self) -> list[tuple[int, int]]:
        """Chooses the lists of the next level: of each the token it follows and the row of the state above."""
        first, end = self._first, len(self._tokens)
        if self._plan is not None:
            pairs = zip(self._plan.above[end - 1 :], self._plan.ranks[end - 1 :], strict=True)
            chosen = [(above, rank) for above, rank in pairs if above < end]
        else:
            reach = {
                (index, rank): self._survival[index] * float(p)
                for index in range(first, end)
                for rank, p in enumerate(self._probabilities[index])
            }
            chosen = sorted(
                (guess for guess in reach if reach[guess] >= self._min_survival), key=lambda g: (-reach[g], g)
            )
            chosen = chosen[:WIDTH]
        for number, (index, rank) in enumerate(chosen, start=end):
            self._below[index][rank] = number
            self._survival.append(self._survival[index] * float(self._probabilities[index][rank]))
        self._first = end
        return [(int(self._tokens[index][rank]), self._rows[index]) for index, rank in chosen]

    def arrays(self) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.int32]]:
        """Tokens, probabilities and lists below, [lists, k] each: the fields of ``Proposals``."""
        return np.stack(self._tokens), np.stack(self._probabilities), np.array(self._below, dtype=np.int32)
