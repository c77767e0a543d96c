"""Names for the beginnings of texts: a page of keys and values depends on its tokens and on all before them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from struct import Struct

from backends.runners.batch import PAGE_SIZE

_TOKENS = Struct(f"<{PAGE_SIZE}i")


def chain_root(*parts: str) -> bytes:
    """What all pages of a text depend on beside its tokens: model, tenant, salt. Different parts, different roots."""
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=32).digest()


class PrefixChain:
    """The hash of each full page of one sequence, made with that of the page before: equal hashes, equal beginnings.

    256 bits, since clients choose tokens: nobody finds two texts of one hash. Made as far as they are asked for, since
    a search ends at the first page that is not cached.
    """

    __slots__ = ("_hashes", "_root", "_tokens")

    def __init__(self, root: bytes, tokens: Sequence[int]) -> None:
        """``tokens``: the sequence's own list, which may grow, but not change."""
        self._root, self._tokens = root, tokens
        self._hashes: list[bytes] = []

    def __getitem__(self, page: int) -> bytes:
        """Raises IndexError for a page that is not full."""
        hashes, tokens = self._hashes, self._tokens
        if (page + 1) * PAGE_SIZE > len(tokens):
            raise IndexError(f"page {page} of {len(tokens)} tokens is not full")
        while len(hashes) <= page:
            start = len(hashes) * PAGE_SIZE
            before = hashes[-1] if hashes else self._root
            content = _TOKENS.pack(*tokens[start : start + PAGE_SIZE])
            hashes.append(hashlib.blake2b(before + content, digest_size=32).digest())
        return hashes[page]
