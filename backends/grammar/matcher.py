"""One answer's place in its grammar: which tokens may come next."""

from __future__ import annotations

import logging
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


class MaskBuffers:
    """Room for one mask of ``vocab_size`` tokens, shared by all answers of an engine: used within one call."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.bits = np.zeros(-(-vocab_size // 32), np.int32)
        self.address, self.size = self.bits.ctypes.data, self.bits.nbytes
        self.bytes = self.bits.view(np.uint8)
        self.values = np.empty((len(self.bytes), 8), np.float32)
        self.row = self.values.reshape(-1)[:vocab_size]


class GrammarMatcher:
    """See :class:`backends.types.TokenGrammar`. ``matcher``: llguidance's, for this answer alone: a copy of another's
    would share its lexer, whose limits one answer could then use up for all."""

    def __init__(self, matcher: llguidance.LLMatcher, buffers: MaskBuffers, *, is_document: bool) -> None:
        self._matcher, self._buffers = matcher, buffers
        self.is_document = is_document
        self.error: str | None = None
        self._look()

    @property
    def complete(self) -> bool:
        return self.error is None and self._matcher.is_stopped() and self._matcher.is_accepting()

    def mask(self, row: Any) -> None:
        if self.error is None:
            buffers = self._buffers
            self._matcher.unsafe_compute_mask_ptr(buffers.address, buffers.size)
            # After a limit the mask allows the end, without a word: a cut answer would look finished.
            self._look()
            if self.error is None:
                np.take(_BYTE_MASKS, buffers.bytes, axis=0, out=buffers.values, mode="clip")
                row += buffers.row
                return
        row.fill(-np.inf)

    def advance(self, token: int) -> None:
        if self.error is None and not self._matcher.is_stopped():
            self._matcher.consume_token(token)
            self._look()

    def _look(self) -> None:
        if self._matcher.is_error():
            self.error = GRAMMAR_STUCK if "NoExtension" in self._matcher.get_error() else GRAMMAR_LIMIT
            log.warning("a grammar fails: %s", self._matcher.get_error().partition("\n")[0][:200])
