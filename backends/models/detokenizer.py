"""From tokens to text, one by one: what the pieces add up to is the text of the whole.

Where a tokenizer's decoder can be said in bytes (byte-level, or ``▁`` for a space with or without byte fallback: all
families that are served), every token has its bytes, and an incremental UTF-8 decoder makes text of them: a character
is shown once it is complete, bytes that are no character as U+FFFD once that is certain, and what is unfinished at the
end as U+FFFD too. For other decoders a few tokens are decoded again in context.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
CONTEXT = 4
UNDECIDED = 8
"""Of decoders that are not understood: how many tokens are decoded again, and how many may wait for their text."""


class Detokenizer(Protocol):
    """One sequence's tokens to text, piece by piece. A piece never ends inside a character."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that was begun."""
        ...

    def next_bytes(self, token_id: int) -> bytes:
        """The bytes of the text that this token would add now. Nothing is remembered."""
        ...


@dataclass(frozen=True, slots=True)
class ByteRules:
    """How the pieces of a vocabulary stand for bytes.

    ``drop_first``: this mark is dropped from the first token. ``strip``: so many spaces are, at most, from the text's
    beginning.
    """

    byte_level: bool = False
    replace: tuple[tuple[str, str], ...] = ()
    fallback: bool = False
    drop_first: str = ""
    strip: tuple[bytes, int] = (b"", 0)

    def bytes_of(self, piece: str, *, first: bool = False) -> bytes:
        if self.byte_level:
            try:
                return bytes(BYTE_OF_CHARACTER[character] for character in piece)
            except KeyError:
                # As the decoder has it: an added token that is not written in the alphabet is itself.
                return piece.encode()
        if first and self.drop_first:
            piece = piece.replace(self.drop_first, "")
        for old, new in self.replace:
            piece = piece.replace(old, new)
        if self.fallback and (found := _BYTE_TOKEN.fullmatch(piece)):
            return bytes([int(found[1], 16)])
        return piece.encode()


def byte_rules(decoder: dict[str, Any] | None) -> ByteRules | None:
    """The rules that ``decoder`` (of a tokenizer.json) comes to; None if it does something else with tokens."""
    if decoder is None:
        return None
    steps = _flat(decoder)
    if [step["type"] for step in steps if step["type"] != "Fuse"] == ["ByteLevel"]:
        return ByteRules(byte_level=True)
    replace: list[tuple[str, str]] = []
    drop_first, fallback, strip = "", False, (b"", 0)
    if steps and steps[0]["type"] == "Metaspace":
        step = steps.pop(0)
        mark, always = step.get("replacement", "▁"), step.get("add_prefix_space", True)
        replace.append((mark, " "))
        if step.get("prepend_scheme", "always" if always else "never") != "never":
            drop_first = mark
    while steps and steps[0]["type"] == "Replace" and "String" in steps[0]["pattern"]:
        step = steps.pop(0)
        replace.append((step["pattern"]["String"], step["content"]))
    if steps and steps[0]["type"] == "ByteFallback":
        steps.pop(0)
        fallback = True
    if steps and steps[0]["type"] == "Fuse":
        steps.pop(0)
        if steps and steps[0]["type"] == "Strip" and steps[0]["stop"] == 0:
            step = steps.pop(0)
            strip = (step["content"].encode(), step["start"])
    if steps or not (replace or fallback):
        return None
    return ByteRules(replace=tuple(replace), fallback=fallback, drop_first=drop_first, strip=strip)


class ByteDetokenizer:
    """``bytes_of(token, first)``: of a token that is not special, see :class:`ByteRules`; None if it has no text.

    ``before``: tokens in front of the text that it goes on from.
    """

    def __init__(
        self, rules: ByteRules, bytes_of: Callable[[int, bool], bytes | None], before: Iterable[int] = ()
    ) -> None:
        self._bytes_of = bytes_of
        self._first = bool(rules.drop_first)
        self._space, self._strip = rules.strip
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        for token_id in before:
            if not (self._first or self._strip):
                break
            self._take(token_id)

    def push(self, token_id: int) -> str:
        raw = self._take(token_id)
        return self._decode(raw) if raw else ""

    def flush(self) -> str:
        return self._decode(b"", True)

    def next_bytes(self, token_id: int) -> bytes:
        return self._stripped(self._bytes_of(token_id, self._first) or b"")[0]

    def _take(self, token_id: int) -> bytes:
        raw = self._bytes_of(token_id, self._first)
        if raw is None:
            return b""
        self._first = False
        raw, self._strip = self._stripped(raw)
        return raw

    def _stripped(self, raw: bytes) -> tuple[bytes, int]:
        """``raw`` without what is still to be stripped, and how much then is."""
        left = self._strip
        while left and raw.startswith(self._space):
            raw, left = raw[len(self._space) :], left - 1
        return raw, 0 if raw else left


class WindowDetokenizer:
    """For any decoder: the newest tokens are decoded with a few older ones in front, which say what they add."""

    def __init__(self, decode: Callable[[list[int]], str], has_text: Callable[[int], bool], before: Sequence[int] = ()):
        self._decode, self._has_text = decode, has_text
        self._shown = [token_id for token_id in before[-4 * CONTEXT :] if has_text(token_id)][-CONTEXT:]
        self._waiting: list[int] = []

    def push(self, token_id: int) -> str:
        if not self._has_text(token_id):
            return ""
        self._waiting.append(token_id)
        text = self._added(self._waiting)
        if text.endswith("\ufffd") and len(self._waiting) < UNDECIDED:
            return ""
        return self._show(text)

    def flush(self) -> str:
        return self._show(self._added(self._waiting)) if self._waiting else ""

    def next_bytes(self, token_id: int) -> bytes:
        if not self._has_text(token_id):
            return b""
        older = self._added(self._waiting) if self._waiting else ""
        return self._added([*self._waiting, token_id])[len(older) :].encode()

    def _show(self, text: str) -> str:
        self._shown = [*self._shown, *self._waiting][-CONTEXT:]
        self._waiting = []
        return text

    def _added(self, token_ids: list[int]) -> str:
        before = self._decode(self._shown) if self._shown else ""
        return self._decode([*self._shown, *token_ids])[len(before) :]


def _flat(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] == "Sequence":
        return [step for each in decoder["decoders"] for step in _flat(each)]
    return [decoder]


def _byte_level_alphabet() -> dict[str, int]:
    """The byte-level BPE alphabet of GPT-2 (Radford et al., 2019): printable Latin-1 as is, the rest from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return alphabet


BYTE_OF_CHARACTER = _byte_level_alphabet()
