"""How many tokens a text has at least, so that what can't fit need not be tokenised. Pure."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any

from backends.models.detokenizer import BYTE_OF_CHARACTER

WHITE_SPACE = [chr(code) for code in range(sys.maxunicode + 1) if chr(code).isspace()]
_BYTES_OF_TEXT = frozenset(range(0xF5)) - {0xC0, 0xC1}
"""The other bytes are in no UTF-8."""
_KEEPING_PRE_TOKENIZERS = {"ByteLevel", "Metaspace", "Split", "Digits", "Punctuation", "UnicodeScripts"}
# Canonical forms make UTF-8 at most three times shorter: the Kelvin sign (3 bytes) is K, three jamo (9) a syllable (3).
_CANONICAL_FACTOR = 3


class TokenBound:
    """``spec``: a tokenizer.json. ``longest``: bytes that a token stands for at most; None where there is no bound:
    some step may drop text, or make one token of any unknown text, or isn't known here."""

    def __init__(self, spec: dict[str, Any]) -> None:
        # Some added tokens take all white space beside them with them; bytes that no piece has are left out.
        strips = any(token["lstrip"] or token["rstrip"] for token in spec["added_tokens"])
        self._blanks = WHITE_SPACE if strips else []
        self._dropped: list[bytes] = []
        self.longest: int | None = None
        factor, model = _normalizer_factor(spec["normalizer"]), spec["model"]
        if factor is None or model["type"] not in ("BPE", "Unigram"):
            return
        steps = _flat(spec["pre_tokenizer"], "pretokenizers")
        if not all(step["type"] in _KEEPING_PRE_TOKENIZERS and step.get("behavior") != "Removed" for step in steps):
            return
        vocab = model["vocab"]
        pieces = vocab if isinstance(vocab, dict) else [piece for piece, _ in vocab]
        by_bytes = any(step["type"] == "ByteLevel" for step in [*steps, *_flat(spec["normalizer"], "normalizers")])
        if by_bytes:
            known = {BYTE_OF_CHARACTER[piece] for piece in pieces if piece in BYTE_OF_CHARACTER}
            self._dropped = [bytes([byte]) for byte in sorted(_BYTES_OF_TEXT - known)]
        elif not _knows_all(model, set(pieces)):
            return
        contents = [_size(token["content"]) for token in spec["added_tokens"]]
        self.longest = factor * max([4, *contents, *(len(each) if by_bytes else _size(each) for each in pieces)])

    def size(self, text: str) -> int:
        """Bytes of ``text`` that need tokens."""
        if text.isascii() and not self._dropped:
            size = len(text)
        else:
            raw = text.encode("utf-8", "replace")
            size = len(raw) - sum(raw.count(byte) for byte in self._dropped)
        return max(size - sum(text.count(blank) * _size(blank) for blank in self._blanks), 0)

    def least_tokens(self, size: int) -> int:
        return 0 if self.longest is None else -(-size // self.longest)

    def most_bytes(self, tokens: int | None) -> int | None:
        """A text of more bytes, as counted by :meth:`size`, has more than ``tokens``; None: no telling."""
        return None if tokens is None or self.longest is None else tokens * self.longest


def _knows_all(model: dict[str, Any], pieces: Collection[str]) -> bool:
    """Whether every text has tokens for all of its parts, none of them for a whole run of unknown ones."""
    if model.get("byte_fallback") and all(f"<0x{byte:02X}>" in pieces for byte in _BYTES_OF_TEXT):
        return True
    return model["type"] == "BPE" and model.get("unk_token") is not None and not model.get("fuse_unk")


def _normalizer_factor(normalizer: dict[str, Any] | None) -> int | None:
    """How much shorter it may make a text; None if there is no saying."""
    factor = 1
    for step in _flat(normalizer, "normalizers"):
        if step["type"] in ("NFC", "NFD"):
            factor *= _CANONICAL_FACTOR
        elif step["type"] == "Replace" and "String" in step["pattern"]:
            if _size(step["content"]) < _size(step["pattern"]["String"]):
                return None
        elif step["type"] not in ("Prepend", "ByteLevel"):
            return None
    return factor


def _size(text: str) -> int:
    return len(text.encode("utf-8", "replace"))


def _flat(step: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    if step is None:
        return []
    if step["type"] == "Sequence":
        return [each for inner in step[name] for each in _flat(inner, name)]
    return [step]
