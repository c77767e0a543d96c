"""How long an answer of an upstream takes, by its tokens. Read where its chunks come in, before any client's pace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from gateway.upstream.chunk import Chunk
from gateway.upstream.tally import Tally


class Measured(NamedTuple):
    """A whole answer. ``gap_tokens`` of its ``tokens`` came in the ``gap_s`` seconds after its first piece; 0 where
    that can't be told."""

    prompt_tokens: int
    tokens: int
    first_s: float
    gap_s: float
    gap_tokens: int


@dataclass(slots=True)
class Meter:
    """Made when the request is sent. Tokens are the upstream's own count, else a guess by length; a chunk may hold
    several, so those of the first piece are its share of the characters."""

    clock: Callable[[], float]
    tally: Tally
    sequences: int = 1
    stalled: bool = False
    """The client was slower than the upstream: from then on its pace was measured."""
    _began: float = field(init=False)
    _first_at: float | None = None
    _last_at: float = 0.0
    _first_characters: int = 0
    _characters: int = 0

    def __post_init__(self) -> None:
        self._began = self.clock()

    def take(self, chunk: Chunk) -> None:
        self.tally.take(chunk)
        if chunk.parts == 0:
            return
        self._last_at = self.clock()
        self._characters += chunk.characters
        if self._first_at is None:
            self._first_at, self._first_characters = self._last_at, chunk.characters

    def result(self) -> Measured | None:
        """None where nothing was said, or several answers shared the time."""
        if self._first_at is None or self.sequences > 1:
            return None
        tokens = self.tally.answer_tokens
        share = self._first_characters / self._characters if self._characters else 1.0
        later = max(tokens - max(round(tokens * share), 1), 0)
        gap_s = self._last_at - self._first_at
        if self.stalled or gap_s <= 0:
            later, gap_s = 0, 0.0
        return Measured(self.tally.prompt_tokens, tokens, self._first_at - self._began, gap_s, later)
