"""Stop strings, looked for as text comes in."""

from __future__ import annotations

import re


class StopWatch:
    """Follows a text through all stop strings at once (Knuth, Morris and Pratt 1977, a table for each).

    A character costs a few operations for every stop that it stands inside of, whatever their lengths; where no stop
    has begun, the text is searched for one's first character at the speed of ``re``. Tables are made as far as text
    has come into them.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._begin: dict[str, list[int]] = {}
        for i, stop in enumerate(stops):
            self._begin.setdefault(stop[0], []).append(i)
        self._next = re.compile("[" + re.escape("".join(self._begin)) + "]") if stops else None
        # borders[i][k]: length of the longest proper border of the first k characters of stop i.
        self._borders = [[0, 0] for _ in stops]
        self._inside: dict[int, int] = {}
        self.operations = 0
        """Characters compared since the start: what the work is counted in."""

    @property
    def held(self) -> int:
        """Length of the longest suffix of the text that is a proper prefix of a stop string."""
        return max(self._inside.values(), default=0)

    def feed(self, text: str) -> tuple[int, int] | None:
        """Go on with ``text``; the leftmost stop that ends in it, of several at one place the first named.

        As its number and where it begins, counted from the beginning of ``text``: negative if it began earlier.
        """
        found: tuple[int, int] | None = None
        at = 0
        while at < len(text):
            if not self._inside:
                begun = self._next.search(text, at) if self._next else None
                if begun is None:
                    break
                at = begun.start()
            for i in self._step(text[at]):
                place = (at + 1 - len(self._stops[i]), i)
                if found is None or place < found:
                    found = place
            at += 1
        return None if found is None else (found[1], found[0])

    def _step(self, character: str) -> list[int]:
        """The stops that ``character`` completes."""
        done: list[int] = []
        inside: dict[int, int] = {}
        for i, length in self._inside.items():
            stop = self._stops[i]
            self.operations += 1
            while length and stop[length] != character:
                length = self._border(i, length)
                self.operations += 1
            if stop[length] == character:
                length += 1
            if length == len(stop):
                done.append(i)
                length = self._border(i, length)
            if length:
                inside[i] = length
        for i in self._begin.get(character, ()):
            if i in self._inside:
                continue
            if len(self._stops[i]) == 1:
                done.append(i)
            else:
                inside[i] = 1
        self._inside = inside
        return done

    def _border(self, i: int, length: int) -> int:
        borders, stop = self._borders[i], self._stops[i]
        while len(borders) <= length:
            self.operations += 1
            last = stop[len(borders) - 1]
            border = borders[-1]
            while border and stop[border] != last:
                border = borders[border]
            borders.append(border + 1 if stop[border] == last else 0)
        return borders[length]
