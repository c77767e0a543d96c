"""Which pages of the KV pool belong to whom. Bookkeeping only; the tensors live in the model runner."""

from __future__ import annotations

from collections.abc import Iterable

from backends.runners.batch import PAGE_SIZE


class IntegrityError(AssertionError):
    """The pool's books don't add up: a page is lost, or owned twice."""


class PagePool:
    """Pages of :data:`PAGE_SIZE` positions, reserved whole for a sequence's longest possible life.

    A sequence that has its pages can never run out half way, so admission is the only place where memory is refused.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages is {num_pages}; at least one page is needed")
        self.num_pages = num_pages
        # Taken from the end, so low pages are used first and again soonest, while they are still in the caches.
        self._free = list(range(num_pages - 1, -1, -1))
        self._owned: dict[str, list[int]] = {}

    @staticmethod
    def pages_for(tokens: int) -> int:
        return -(-tokens // PAGE_SIZE)

    @property
    def free_pages(self) -> int:
        return len(self._free)

    @property
    def used_pages(self) -> int:
        return self.num_pages - len(self._free)

    def reserve(self, owner: str, tokens: int) -> list[int] | None:
        """Pages for ``tokens`` positions, or None when too few are free. An owner reserves once."""
        if owner in self._owned:
            raise ValueError(f"{owner!r} already holds pages")
        wanted = self.pages_for(tokens)
        if wanted > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(wanted)]
        self._owned[owner] = pages
        return pages

    def release(self, owner: str) -> None:
        """Give an owner's pages back; an unknown owner is no error, so that closing twice is harmless."""
        self._free.extend(reversed(self._owned.pop(owner, ())))

    def check_integrity(self, live: Iterable[str]) -> None:
        """Raises :class:`IntegrityError` unless exactly ``live`` own pages and every page has one place."""
        owners = set(live)
        if owners != set(self._owned):
            strangers = set(self._owned) ^ owners
            raise IntegrityError(f"owners of pages and live sequences differ in {sorted(strangers)[:5]}")
        everywhere = [*self._free, *(page for pages in self._owned.values() for page in pages)]
        if sorted(everywhere) != list(range(self.num_pages)):
            raise IntegrityError(f"{len(everywhere)} pages on the books, {self.num_pages} in the pool")
