"""From tokens to text that is safe to show: stop strings, held-back text, and the log-probabilities that go with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from backends.types import PositionLogprobs


@dataclass(slots=True)
class TextStream:
    """One sequence's text. Text that may be the beginning of a stop string is held back until it is decided.

    ``push`` a token's text piece; ``take`` what may be shown. A stop string is cut off together with everything after
    it, also when it begins in an earlier token.
    """

    stops: tuple[str, ...]
    push_token: Callable[[int], str]
    text: str = ""
    _shown: int = 0
    _logprobs: list[tuple[int, int, PositionLogprobs]] = field(default_factory=list)

    def push(self, token_id: int, *, watch: bool) -> str | None:
        """Append one token; returns the stop string that it completes, if ``watch``. The text is then already cut."""
        piece = self.push_token(token_id)
        if not piece:
            return None
        before = len(self.text)
        self.text += piece
        if not watch or not self.stops:
            return None
        # A match must end inside the new piece, so an earlier part that watching had ignored can't count.
        found: tuple[int, str] | None = None
        for stop in self.stops:
            start = self.text.find(stop, max(before - len(stop) + 1, self._shown, 0))
            if start >= 0 and (found is None or start < found[0]):
                found = (start, stop)
        if found is None:
            return None
        self.text = self.text[: found[0]]
        self._logprobs = [entry for entry in self._logprobs if entry[0] < found[0]]
        return found[1]

    def add_logprobs(self, start: int, entry: PositionLogprobs) -> None:
        """Log-probabilities of the token just pushed, whose text begins at ``start``; dropped if a stop cut it off."""
        if start > len(self.text):
            return
        self._logprobs.append((start, len(self.text), entry))

    def take(self, *, final: bool) -> tuple[str, tuple[PositionLogprobs, ...]]:
        """Text not yet shown that can be shown now, and the log-probabilities of the tokens shown whole by it."""
        end = len(self.text) if final else len(self.text) - self._held_back()
        piece = self.text[self._shown : end] if end > self._shown else ""
        self._shown = max(self._shown, end)
        ready = 0
        # A token without text of its own belongs to what follows: a stop string that begins there still drops it.
        while ready < len(self._logprobs) and (
            final or (self._logprobs[ready][0] < self._shown and self._logprobs[ready][1] <= self._shown)
        ):
            ready += 1
        entries = tuple(entry for _, _, entry in self._logprobs[:ready])
        del self._logprobs[:ready]
        return piece, entries

    def _held_back(self) -> int:
        """Length of the longest suffix that is a proper prefix of a stop string."""
        longest = 0
        for stop in self.stops:
            for size in range(min(len(stop) - 1, len(self.text)), longest, -1):
                if self.text.endswith(stop[:size]):
                    longest = size
                    break
        return longest
