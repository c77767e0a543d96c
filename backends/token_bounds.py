"""How many bytes of text one token can stand for at most, so that what can't fit need not be tokenised. Pure."""

from __future__ import annotations

from typing import Any

from backends.detokenizer import BYTE_OF_CHARACTER

WHITE_SPACE = tuple(chr(c) for c in (*range(9, 14), *range(28, 33), 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B))) + (
    "\u2028",
    "\u2029",
    "\u202f",
    "\u205f",
    "\u3000",
)
_KEEPING_PRE_TOKENIZERS = {"ByteLevel", "Metaspace", "Split", "Digits", "Punctuation", "UnicodeScripts"}
# Canonical forms make UTF-8 at most three times shorter: the Kelvin sign (3 bytes) is K, three jamo (9) a syllable (3).
_CANONICAL_FACTOR = 3


class TokenBound:
    """``spec``: a tokenizer.json. ``longest``: bytes; None where no bound can be given, see :func:`longest_token`."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.longest = longest_token(spec)
        # Such tokens take all white space beside them with them.
        self._strips = any(token["lstrip"] or token["rstrip"] for token in spec["added_tokens"])

    def least_tokens(self, text: str) -> int:
        """How many tokens ``text`` has at least."""
        if self.longest is None:
            return 0
        if self._strips:
            size = len(text) - sum(text.count(blank) for blank in WHITE_SPACE)
        else:
            size = len(text) if text.isascii() else len(text.encode("utf-8", "replace"))
        return -(-size // self.longest)

    def most_bytes(self, tokens: int | None) -> int | None:
        """More bytes than this don't fit into ``tokens``; None: no telling."""
        return None if tokens is None or self.longest is None or self._strips else tokens * self.longest


def longest_token(spec: dict[str, Any]) -> int | None:
    """Bytes of text that a token stands for at most. None if some step may drop text, or unknown text becomes one."""
    factor = _normalizer_factor(spec["normalizer"])
    if factor is None or not all(_keeps_text(step) for step in _flat(spec["pre_tokenizer"], "pretokenizers")):
        return None
    model = spec["model"]
    vocab = model.get("vocab", {})
    pieces = vocab if isinstance(vocab, dict) else [piece for piece, _ in vocab]
    by_bytes = any(step["type"] == "ByteLevel" for step in _all_steps(spec))
    if model["type"] not in ("BPE", "Unigram") or not _knows_all(model, pieces, by_bytes=by_bytes):
        return None
    contents = [token["content"] for token in spec["added_tokens"]]
    longest = max(len(piece) if by_bytes else len(piece.encode("utf-8", "replace")) for piece in pieces)
    return factor * max([longest, 4, *(len(content.encode("utf-8", "replace")) for content in contents)])


def _knows_all(model: dict[str, Any], pieces: Any, *, by_bytes: bool) -> bool:
    """Whether every text has tokens for all of its parts, none of them for a whole run of unknown ones."""
    known = set(pieces)
    if by_bytes:
        return known.issuperset(BYTE_OF_CHARACTER)
    if model.get("byte_fallback") and all(f"<0x{byte:02X}>" in known for byte in range(256)):
        return True
    return model["type"] == "BPE" and model.get("unk_token") is not None and not model.get("fuse_unk")


def _normalizer_factor(normalizer: dict[str, Any] | None) -> int | None:
    factor = 1
    for step in _flat(normalizer, "normalizers"):
        if step["type"] in ("NFC", "NFD"):
            factor *= _CANONICAL_FACTOR
        elif step["type"] == "Replace" and "String" in step["pattern"]:
            if len(step["content"].encode()) < len(step["pattern"]["String"].encode()):
                return None
        elif step["type"] not in ("Prepend", "ByteLevel"):
            return None
    return factor


def _keeps_text(step: dict[str, Any]) -> bool:
    return step["type"] in _KEEPING_PRE_TOKENIZERS and step.get("behavior") != "Removed"


def _all_steps(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return [*_flat(spec["normalizer"], "normalizers"), *_flat(spec["pre_tokenizer"], "pretokenizers")]


def _flat(step: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    if step is None:
        return []
    if step["type"] == "Sequence":
        return [each for inner in step[name] for each in _flat(inner, name)]
    return [step]
