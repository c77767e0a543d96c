"""The heads' guesses as a grammar allows them, and the tokens that it forces behind them. Pure but for the look-ahead.

Forbidden guesses go, the chance that they had is shared out among the others, and where only one continuation is
possible it follows with certainty, for as long as it goes, whatever the heads say; their lists are found again behind
it. All in the form of the heads' own lists, so the planner needs to know nothing of grammars.
"""

from __future__ import annotations

from array import array
from heapq import heappop, heappush

from backends.runners.base import Proposals
from backends.types import GrammarOutlook

_MOST_LISTS = 24
# Guesses that are less likely than this, with all above them, are not worth asking the grammar about.
_LEAST_SURVIVAL = 0.03


class GuidedProposals(Proposals):
    """``forced``: lists whose only guess is certain, since the grammar allows nothing else."""

    __slots__ = ("forced",)

    forced: frozenset[int]


def guided(
    proposals: Proposals | None, outlook: GrammarOutlook, *, trust: float, heads_depth: int, longest: int
) -> GuidedProposals | None:
    """The lists below a sequence's pending token, as its grammar allows them; None where there are none.

    ``outlook``: where the answer stands. ``trust`` scales the heads' probabilities. ``heads_depth``: levels of
    the heads' own guesses at most; ``longest``: of all.
    """
    walk = _Walk(proposals, trust, heads_depth, longest)
    walk.run(outlook)
    return walk.result()


class _Walk:
    """Best first: lists of likely paths are made before those of unlikely ones."""

    def __init__(self, proposals: Proposals | None, trust: float, heads_depth: int, longest: int) -> None:
        self._heads, self._trust = proposals, trust
        self._heads_depth, self._longest = heads_depth, longest
        self._tokens: list[list[int]] = []
        self._probabilities: list[list[float]] = []
        self._below: list[list[int]] = []
        self._forced: set[int] = set()
        # (-survival, serial, depth of the list, the heads' list, outlook before ``tokens``, tokens, list above, rank)
        self._heap: list[tuple[float, int, int, int, GrammarOutlook, list[int], int, int]] = []
        self._serial = 0

    def run(self, outlook: GrammarOutlook) -> None:
        self._push(1.0, 1, 0 if self._heads is not None else -1, outlook, [], -1, 0)
        while self._heap and len(self._tokens) < _MOST_LISTS:
            negative, _, depth, heads_list, before, tokens, above, rank = heappop(self._heap)
            here = before.after(tokens) if tokens else before
            if here is None:
                continue
            if forced := here.forced()[: self._longest - depth + 1]:
                self._add_forced(-negative, depth, heads_list, here, above, rank, forced)
            elif heads_list >= 0 and depth <= self._heads_depth:
                self._add_guesses(-negative, depth, heads_list, here, above, rank)

    def result(self) -> GuidedProposals | None:
        if not self._tokens:
            return None
        k = max(map(len, self._tokens))
        tokens, probabilities, below = array("i"), array("f"), array("i")
        for row, chances, lists in zip(self._tokens, self._probabilities, self._below, strict=True):
            rest = k - len(row)
            # Padded with guesses of no chance, which are never taken.
            tokens.extend([*row, *[row[-1]] * rest])
            probabilities.extend([*chances, *[0.0] * rest])
            below.extend([*lists, *[-1] * rest])
        found = GuidedProposals.of_memory(tokens, probabilities, below, k, 0)
        assert isinstance(found, GuidedProposals)
        found.forced = frozenset(self._forced)
        return found

    def _add_forced(
        self,
        survival: float,
        depth: int,
        heads_list: int,
        here: GrammarOutlook,
        above: int,
        rank: int,
        forced: list[int],
    ) -> None:
        for token in forced:
            above, rank = self._append(above, rank, [token], [1.0]), 0
            self._forced.add(above)
            heads_list = self._behind(heads_list, token)
        depth += len(forced)
        if depth <= self._longest:
            self._push(survival, depth, heads_list, here, forced, above, rank)

    def _add_guesses(
        self, survival: float, depth: int, heads_list: int, here: GrammarOutlook, above: int, rank: int
    ) -> None:
        heads = self._heads
        assert heads is not None
        chances = heads.probabilities_of(heads_list)
        guesses, forbidden = [], 0.0
        for token, chance, below in zip(heads.tokens_of(heads_list), chances, heads.following(heads_list), strict=True):
            # What likelier guesses can't have, the less likely ones get.
            if survival * chance < _LEAST_SURVIVAL * (1.0 - forbidden):
                continue
            if here.allows(token):
                guesses.append((token, chance, below))
            else:
                forbidden += chance
        if not guesses:
            return
        scale = self._trust / max(1.0 - forbidden, 1e-3)
        scaled = [min(chance * scale, 1.0) for _, chance, _ in guesses]
        index = self._append(above, rank, [token for token, _, _ in guesses], scaled)
        if depth >= self._longest:
            return
        for at, ((token, _, below), chance) in enumerate(zip(guesses, scaled, strict=True)):
            if survival * chance >= _LEAST_SURVIVAL:
                self._push(survival * chance, depth + 1, below, here, [token], index, at)

    def _behind(self, heads_list: int, token: int) -> int:
        """The heads' list that follows ``token`` in one of theirs; -1 for none."""
        if self._heads is None or heads_list < 0:
            return -1
        following = self._heads.following(heads_list)
        if not self._heads.look_ahead:
            return following[0]
        tokens = self._heads.tokens_of(heads_list)
        return following[tokens.index(token)] if token in tokens else -1

    def _append(self, above: int, rank: int, tokens: list[int], probabilities: list[float]) -> int:
        index = len(self._tokens)
        self._tokens.append(tokens)
        self._probabilities.append(probabilities)
        self._below.append([-1] * len(tokens))
        if above >= 0:
            self._below[above][rank] = index
        return index

    def _push(
        self,
        survival: float,
        depth: int,
        heads_list: int,
        before: GrammarOutlook,
        tokens: list[int],
        above: int,
        rank: int,
    ) -> None:
        self._serial += 1
        heappush(self._heap, (-survival, self._serial, depth, heads_list, before, tokens, above, rank))
