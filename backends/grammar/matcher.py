"""One answer's place in its grammar: which tokens may come next."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import llguidance
import numpy as np
from numpy.typing import NDArray

from backends.types import GRAMMAR_LIMIT, GRAMMAR_STUCK

log = logging.getLogger(__name__)


def _byte_masks() -> NDArray[np.float32]:
    """For each byte of a bitmask, lowest bit first: 0 where the bit is set, else minus infinity. [256, 8]"""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return np.where(bits, np.float32(0), np.float32(-np.inf)).astype(np.float32)


_BYTE_MASKS = _byte_masks()
_BITS = np.arange(32, dtype=np.int32)
# Words of a mask in which something is allowed, up to which the few are picked out one by one.
_FEW_WORDS = 64
# Bytes of a mask that are looked at together.
_CHUNK = 1024


class MaskBuffers:
    """Room for one mask of ``vocab_size`` tokens, shared by all answers of an engine: used within one call. Masks that
    are made ahead lie in memory of their answer's own."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.bits = np.zeros(-(-vocab_size // 32), np.int32)
        self._values = np.empty((_CHUNK, 8), np.float32)
        self._row = self._values.reshape(-1)

    def apply(self, bits: NDArray[np.int32], row: NDArray[np.float32]) -> None:
        """Set what the mask ``bits`` [ceil(V / 32)] forbids to minus infinity in ``row`` [V]."""
        words = np.flatnonzero(bits)
        if len(words) <= _FEW_WORDS:
            within, bit = np.nonzero((bits[words][:, None] >> _BITS) & 1)
            ids = words[within] * 32 + bit
            kept = row[ids]
            row.fill(-np.inf)
            row[ids] = kept
            return
        # In pieces that stay in the fastest cache: between two forwards nothing else is.
        of_bytes = bits.view(np.uint8)
        for start in range(0, len(of_bytes), _CHUNK):
            some = of_bytes[start : start + _CHUNK]
            np.take(_BYTE_MASKS, some, axis=0, out=self._values[: len(some)], mode="clip")
            part = row[8 * start : 8 * (start + _CHUNK)]
            part += self._row[: len(part)]


class Outlook:
    """See :class:`backends.types.GrammarOutlook`."""

    __slots__ = ("_matcher",)

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher

    def forced(self) -> list[int]:
        return self._matcher.compute_ff_tokens()

    def allows(self, token: int) -> bool:
        return self._matcher.validate_tokens([token]) == 1

    def after(self, tokens: Sequence[int]) -> Outlook | None:
        copy = self._matcher.deep_copy()
        ahead = list(tokens)
        if copy.try_consume_tokens(ahead) < len(ahead) or copy.is_stopped():
            return None
        return Outlook(copy)


class GrammarMatcher:
    """See :class:`backends.types.TokenGrammar`. ``matcher``: llguidance's, for this answer alone: a copy of another's
    would share its lexer, whose limits one answer could then use up for all. ``looking``: another one, and for the same
    reason no copy, that looks ahead: whatever that costs, the answer ends where it would without."""

    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        buffers: MaskBuffers,
        *,
        is_document: bool,
        looking: llguidance.LLMatcher | None = None,
    ) -> None:
        self._matcher, self._buffers, self._looking = matcher, buffers, looking
        self._ahead: NDArray[np.int32] | None = None
        self._prepared = False
        self._unseen: list[int] = []
        self._tokens = 0
        self.complete_after: int | None = None
        self.is_document = is_document
        self.error: str | None = None
        self._look()

    def allows(self, token: int) -> bool:
        return self.error is None and token >= 0 and self._matcher.validate_tokens([token]) == 1

    def prepare(self) -> None:
        if self.error is None and not self._prepared:
            if self._ahead is None:
                self._ahead = np.zeros_like(self._buffers.bits)
            self._compute(self._ahead)
            self._prepared = True

    def mask(self, row: Any) -> None:
        if self.error is None:
            bits = self._ahead if self._prepared else None
            if bits is None:
                bits = self._buffers.bits
                self._compute(bits)
            # After a limit the mask allows the end, without a word: a cut answer would look finished.
            self._look()
            if self.error is None:
                self._buffers.apply(bits, row)
                return
        row.fill(-np.inf)

    def advance(self, token: int) -> None:
        self._prepared = False
        if self.error is None and not self._matcher.is_stopped():
            self._matcher.consume_token(token)
            self._tokens += 1
            self._unseen.append(token)
            self._look()

    def outlook(self) -> Outlook | None:
        looking = self._looking
        if looking is None or self.error is not None:
            return None
        if self._unseen:
            looking.consume_tokens(self._unseen)
            self._unseen = []
        if looking.is_stopped():
            # At its end, or failed: drafts are then made without it.
            self._looking = None
            return None
        return Outlook(looking)

    def _compute(self, bits: NDArray[np.int32]) -> None:
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)

    def _look(self) -> None:
        if self._matcher.is_error():
            self.error = GRAMMAR_STUCK if "NoExtension" in self._matcher.get_error() else GRAMMAR_LIMIT
            log.warning("a grammar fails: %s", self._matcher.get_error().partition("\n")[0][:200])
        elif self.complete_after is None and self._matcher.is_stopped() and self._matcher.is_accepting():
            self.complete_after = self._tokens
