"""Text that remembers which of its characters were written by a chat template, and which came from a client.

What a template's operations lose track of counts as a client's: then a special token that the template made is spelled
out, never the other way round.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, SupportsIndex

Spans = tuple[tuple[int, int], ...]
"""Places [start, end) in a text: sorted, apart from one another, none empty."""

_CONVERSION = re.compile(r"%(?:\(\w*\))?[-#0 +]*\d*(?:\.\d+)?[a-zA-Z%]")


class TracedText(str):
    """A string like any other, to a template's eyes too; ``own`` are the places that the template wrote.

    Made with nothing in ``own``, all of it is a client's.
    """

    __slots__ = ("_own",)
    _own: Spans

    def __new__(cls, text: object = "", own: Spans = ()) -> TracedText:
        made = super().__new__(cls, text)
        made._own = own
        return made

    def __str__(self) -> str:
        return self

    def __add__(self, other: Any) -> Any:
        # What escapes (markupsafe's) has its own way to add, and knows nothing of places.
        if not isinstance(other, str) or hasattr(other, "__html__"):
            return NotImplemented
        return _pair(self, self._own, other, own_of(other))

    def __radd__(self, other: Any) -> Any:
        return _pair(other, own_of(other), self, self._own) if isinstance(other, str) else NotImplemented

    def __mul__(self, times: SupportsIndex) -> TracedText:
        return joined([self] * times.__index__())

    def __rmul__(self, times: SupportsIndex) -> TracedText:
        return self * times

    def __mod__(self, values: Any) -> TracedText:
        whole = str.__mod__(self, values)
        if not self._own:
            return TracedText(whole)
        parts: list[str] = []
        rest = list(values) if isinstance(values, tuple) else [values]
        at = 0
        try:
            for found in _CONVERSION.finditer(self):
                parts.append(self._cut(at, found.start()))
                conversion, at = found.group(), found.end()
                if conversion == "%%":
                    parts.append(self._cut(at - 1, at))
                elif conversion.startswith("%("):
                    parts.append(conversion % values)
                else:
                    value = rest.pop(0)
                    parts.append(value if conversion == "%s" and isinstance(value, str) else conversion % (value,))
        except (IndexError, KeyError, TypeError, ValueError):
            return TracedText(whole)
        return _checked(joined([*parts, self._cut(at, len(self))]), whole)

    def __getitem__(self, key: SupportsIndex | slice) -> TracedText:
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            if step == 1:
                return self._cut(start, max(start, stop))
            text = super().__getitem__(key)
            return joined([self._cut(i, i + 1) for i in range(start, stop, step)]) if self._own else TracedText(text)
        text = super().__getitem__(key)
        i = key.__index__()
        i += len(self) if i < 0 else 0
        return TracedText(text, self._clip(i, i + 1))

    def __iter__(self) -> Iterator[str]:
        for i in range(len(self)):
            yield self._cut(i, i + 1)

    def strip(self, chars: str | None = None, /) -> TracedText:
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None, /) -> TracedText:
        return self._cut(len(self) - len(super().lstrip(chars)), len(self))

    def rstrip(self, chars: str | None = None, /) -> TracedText:
        return self._cut(0, len(super().rstrip(chars)))

    def removeprefix(self, prefix: str, /) -> TracedText:
        return self._cut(len(self) - len(super().removeprefix(prefix)), len(self))

    def removesuffix(self, suffix: str, /) -> TracedText:
        return self._cut(0, len(super().removesuffix(suffix)))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[Any]:
        return self._placed(super().split(sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[Any]:
        return self._placed(super().rsplit(sep, maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[Any]:
        found, at = [], 0
        for line, shown in zip(super().splitlines(True), super().splitlines(keepends), strict=True):
            found.append(self._cut(at, at + len(shown)))
            at += len(line)
        return found

    def partition(self, sep: str, /) -> Any:
        before, middle, _ = super().partition(sep)
        return self._three(len(before), len(before) + len(middle))

    def rpartition(self, sep: str, /) -> Any:
        before, middle, _ = super().rpartition(sep)
        return self._three(len(before), len(before) + len(middle))

    def join(self, parts: Iterable[Any], /) -> TracedText:
        listed = list(parts)
        whole = super().join(listed)
        between: list[str] = []
        for i, part in enumerate(listed):
            if i:
                between.append(self)
            between.append(part)
        return _checked(joined(between), whole)

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> TracedText:
        whole = super().replace(old, new, count)
        if not old:
            return TracedText(whole)
        return _checked(TracedText(new, own_of(new)).join(self.split(old, count)), whole)

    def ljust(self, width: SupportsIndex, fill: str = " ", /) -> TracedText:
        return joined((self, super().ljust(width, fill)[len(self) :]))

    def rjust(self, width: SupportsIndex, fill: str = " ", /) -> TracedText:
        padded = super().rjust(width, fill)
        return joined((padded[: len(padded) - len(self)], self))

    def capitalize(self) -> TracedText:
        return self._by_place(str.capitalize)

    def casefold(self) -> TracedText:
        return self._by_place(str.casefold)

    def lower(self) -> TracedText:
        return self._by_place(str.lower)

    def swapcase(self) -> TracedText:
        return self._by_place(str.swapcase)

    def title(self) -> TracedText:
        return self._by_place(str.title)

    def upper(self) -> TracedText:
        return self._by_place(str.upper)

    def translate(self, table: Any, /) -> TracedText:
        return self._by_place(lambda text: str.translate(text, table))

    def _cut(self, start: int, end: int) -> TracedText:
        return TracedText(super().__getitem__(slice(start, end)), self._clip(start, end))

    def _clip(self, start: int, end: int) -> Spans:
        own = self._own
        if not own or end <= start:
            return ()
        found = []
        i = max(bisect_right(own, (start, len(self) + 1)) - 1, 0)
        while i < len(own) and own[i][0] < end:
            if own[i][1] > start:
                found.append((max(own[i][0], start) - start, min(own[i][1], end) - start))
            i += 1
        return tuple(found)

    def _placed(self, pieces: list[str], sep: str | None) -> list[Any]:
        found, at = [], 0
        for piece in pieces:
            # Between words there is only white space, which no word begins with.
            at = str.index(self, piece, at) if sep is None else at
            found.append(self._cut(at, at + len(piece)))
            at += len(piece) + len(sep or "")
        return found

    def _three(self, start: int, end: int) -> tuple[TracedText, TracedText, TracedText]:
        return self._cut(0, start), self._cut(start, end), self._cut(end, len(self))

    def _by_place(self, change: Callable[[str], str]) -> TracedText:
        """``change`` made to what is the template's and what is not, each for itself, if that comes to the same."""
        plain = str.__getitem__(self, slice(None))
        whole = change(plain)
        parts: list[str] = []
        at = 0
        for start, end in self._own:
            parts += [change(plain[at:start]), own_text(change(plain[start:end]))]
            at = end
        return _checked(joined([*parts, change(plain[at:])]), whole)


def own_of(text: str) -> Spans:
    """The places of ``text`` that a template wrote."""
    return text._own if isinstance(text, TracedText) else ()


def own_text(text: str) -> TracedText:
    """A template's own text."""
    return TracedText(text, ((0, len(text)),) if text else ())


def joined(parts: Iterable[str]) -> TracedText:
    """All parts one after another."""
    listed = list(parts)
    own: list[tuple[int, int]] = []
    at = 0
    for part in listed:
        for start, end in own_of(part):
            if own and own[-1][1] == at + start:
                own[-1] = (own[-1][0], at + end)
            else:
                own.append((at + start, at + end))
        at += len(part)
    return TracedText("".join(listed), tuple(own))


def traced(value: Any, own: bool) -> Any:
    """``value`` with every text in it marked, at any depth; everything in it is the template's, or nothing.

    Keys stay plain, which is to be a client's.
    """
    if isinstance(value, str):
        return own_text(value) if own else TracedText(value)
    if isinstance(value, Mapping):
        return {key: traced(each, own) for key, each in value.items()}
    if isinstance(value, list):
        return [traced(each, own) for each in value]
    if isinstance(value, tuple):
        return tuple(traced(each, own) for each in value)
    return value


def _pair(left: str, left_own: Spans, right: str, right_own: Spans) -> TracedText:
    at = len(left)
    if not right_own:
        own = left_own
    elif left_own and left_own[-1][1] == at and right_own[0][0] == 0:
        moved = [(start + at, end + at) for start, end in right_own[1:]]
        own = (*left_own[:-1], (left_own[-1][0], right_own[0][1] + at), *moved)
    else:
        own = (*left_own, *((start + at, end + at) for start, end in right_own))
    return TracedText(str.__add__(left, right), own)


def _checked(found: TracedText, whole: str) -> TracedText:
    """``found``, unless it is not the text that a plain string would have given."""
    return found if str.__eq__(found, whole) else TracedText(whole)
