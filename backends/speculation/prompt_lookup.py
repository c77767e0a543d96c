"""Candidates from the text itself: what followed the last time that the same tokens stood here.

Prompt lookup (Saxena, 2023; the "n-gram" drafter of several engines): answers repeat their prompt and themselves, code
above all. Looking up costs no arithmetic of the model; verification makes a wrong guess harmless. The guesses join the
heads' in one tree, see :mod:`backends.speculation.tree_builder`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from backends.speculation.tree_builder import Chain

# Tokens that must agree before a place counts as seen before; longer agreement is worth more, up to _LONGEST.
_GRAM = 3
_LONGEST = 12
_DEPTH = 8
# Chance that the next token agrees as well, by how many before it do: 3, 4-5, 6-8, 9 and more. Where every text begins;
# its own record takes over within a few guesses.
_PRIOR = (0.55, 0.65, 0.75, 0.85)
_PRIOR_WEIGHT = 3.0
_DECAY = 0.95
# Places that one look may take into the index: more than a step adds. A prompt's are taken in beside, some a step.
_MOST_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Continuation(Chain):
    """Tokens that followed last time. ``agreed``: how many before them are the same here and there."""

    agreed: int


class Lookup:
    """The index of one sequence's tokens, and the record of its guesses. Not thread-safe."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens  # the sequence's own list, which grows
        self._indexed = 0
        self._after: dict[tuple[int, ...], int] = {}
        self._tried = [_PRIOR_WEIGHT] * len(_PRIOR)
        self._right = [chance * _PRIOR_WEIGHT for chance in _PRIOR]

    def find(self) -> Continuation | None:
        """What followed the last occurrence of the present end; None when it has not been seen before."""
        tokens, end = self._tokens, len(self._tokens)
        if end <= _GRAM:
            return None
        self.index(_MOST_AT_ONCE)
        place = self._after.get(tuple(tokens[end - _GRAM :]))
        if place is None:
            return None
        agreed = _GRAM
        while agreed < _LONGEST and agreed < place and tokens[place - agreed - 1] == tokens[end - agreed - 1]:
            agreed += 1
        found = list(tokens[place : place + _DEPTH])
        while len(found) < _DEPTH:  # a text that repeats itself runs on into its own repetition
            found += found[: min(end - place, _DEPTH - len(found))]
        rates = [right / tried for right, tried in zip(self._right, self._tried, strict=True)]
        return Continuation(found, [rates[bucket] for bucket in _BUCKETS[agreed]], agreed)

    @property
    def is_complete(self) -> bool:
        """All tokens are indexed."""
        return self._indexed >= len(self._tokens)

    def index(self, most: int) -> int:
        """Take in the next ``most`` places, and return how many there were; what is not indexed yet is not found, or an
        older place in its stead."""
        tokens, begin = self._tokens, max(self._indexed, _GRAM)
        # The place behind every gram but the last, which would find itself.
        end = min(begin + most, len(tokens))
        for place in range(begin, end):
            self._after[tuple(tokens[place - _GRAM : place])] = place
        self._indexed = max(begin, end)
        return max(end - begin, 0)

    def observe(self, guess: Continuation, emitted: Sequence[int]) -> None:
        """The tokens that came instead, or after all."""
        for depth, (token, guessed) in enumerate(zip(emitted, guess.tokens, strict=False)):
            bucket = _bucket(guess.agreed + depth)
            self._tried[bucket] = self._tried[bucket] * _DECAY + 1.0
            self._right[bucket] = self._right[bucket] * _DECAY + (token == guessed)
            if token != guessed:
                return


def _bucket(agreed: int) -> int:
    return 0 if agreed <= 3 else 1 if agreed <= 5 else 2 if agreed <= 8 else 3


# By how many tokens agree: the record of each token that follows.
_BUCKETS = [[_bucket(agreed + depth) for depth in range(_DEPTH)] for agreed in range(_LONGEST + 1)]
