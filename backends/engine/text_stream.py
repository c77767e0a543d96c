"""From tokens to text that is safe to show: stop strings, held-back text, and the log-probabilities that go with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from backends.engine.stops import StopWatch
from backends.types import PositionLogprobs


@dataclass(slots=True)
class TextStream:
    """One sequence's text. Text that may be the beginning of a stop string is held back until it is decided.

    ``push`` a token's text piece; ``take`` what may be shown. A stop string is cut off together with everything after
    it, also when it begins in an earlier token. ``flush``: text that the tokens leave over at the end.
    """

    stops: tuple[str, ...]
    push_token: Callable[[int], str]
    flush: Callable[[], str] = lambda: ""
    length: int = 0
    """Characters so far, shown or not."""
    _watch: StopWatch = field(init=False)
    _watched: bool = True
    _hidden: str = ""
    _logprobs: list[tuple[int, int, PositionLogprobs]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._watch = StopWatch(self.stops)

    @property
    def hidden(self) -> str:
        """The text that is not shown yet."""
        return self._hidden

    def push(self, token_id: int, *, watch: bool) -> str | None:
        """Append one token; returns the stop string that it completes, if ``watch``. The text is then already cut."""
        self._watched = watch
        return self._append(self.push_token(token_id))

    def add_logprobs(self, start: int, entry: PositionLogprobs) -> None:
        """Log-probabilities of the token just pushed, whose text begins at ``start``; dropped if a stop cut it off."""
        if start > self.length:
            return
        self._logprobs.append((start, self.length, entry))

    def take(self, *, final: bool) -> tuple[str, tuple[PositionLogprobs, ...]]:
        """Text not yet shown that can be shown now, and the log-probabilities of the tokens shown whole by it."""
        if final:
            self._append(self.flush())
        held = 0 if final else min(self._watch.held, len(self._hidden))
        piece, self._hidden = self._hidden[: len(self._hidden) - held], self._hidden[len(self._hidden) - held :]
        shown = self.length - held
        ready = 0
        # A token without text of its own belongs to what follows: a stop string that begins there still drops it.
        while ready < len(self._logprobs) and (
            final or (self._logprobs[ready][0] < shown and self._logprobs[ready][1] <= shown)
        ):
            ready += 1
        entries = tuple(entry for _, _, entry in self._logprobs[:ready])
        del self._logprobs[:ready]
        return piece, entries

    def _append(self, piece: str) -> str | None:
        if not piece:
            return None
        before = self.length
        self._hidden += piece
        self.length += len(piece)
        # Also text that is not watched may begin a stop; only one that it completes doesn't count.
        found = self._watch.feed(piece) if self.stops else None
        if found is None or not self._watched:
            return None
        number, start = found[0], before + found[1]
        self._hidden = self._hidden[: len(self._hidden) - (self.length - start)]
        self.length = start
        self._logprobs = [entry for entry in self._logprobs if entry[0] < start]
        return self.stops[number]
