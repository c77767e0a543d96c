"""Which pages of the KV pool hold whose keys and values. Bookkeeping only; the tensors live in the model runner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from backends.runners.batch import PAGE_SIZE


class IntegrityError(AssertionError):
    """The books don't add up: a page is lost, or has other owners than it counts."""


class PageManager:
    """Owns the pages, of :data:`PAGE_SIZE` positions each; who wants some is an *owner* with a name of its own.

    A page may have several owners: those of sequences that begin alike, or a cache that keeps a beginning for later.
    It is free again when the last one lets go. Only pages that are full are shared: nobody writes into them any more.

    The engine allocates a sequence's longest possible life at its admission. So a sequence never runs out half way, and
    admission is the only place where memory is refused.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages is {num_pages}; at least one page is needed")
        self.num_pages = num_pages
        # Taken from the end, so low pages are used first and again soonest, while they are still in the caches.
        self._free = list(range(num_pages - 1, -1, -1))
        self._owned: dict[str, list[int]] = {}
        self._num_owners = [0] * num_pages

    @staticmethod
    def pages_for(tokens: int) -> int:
        return -(-tokens // PAGE_SIZE)

    @property
    def used_pages(self) -> int:
        return self.num_pages - len(self._free)

    def pages_of(self, owner: str) -> Sequence[int]:
        """Its pages in order of position, not to be changed. Raises KeyError for one without."""
        return self._owned[owner]

    def num_owners(self, page: int) -> int:
        """Its reference count; 0: it is free."""
        return self._num_owners[page]

    def slots(self, owner: str, first: int, count: int) -> list[int]:
        """Where the keys and values of ``count`` positions from ``first`` on lie."""
        pages = self._owned[owner]
        return [pages[at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE for at in range(first, first + count)]

    def allocate(self, owner: str, tokens: int) -> bool:
        """Pages for ``tokens`` positions; False, and nothing is taken, when too few are free.

        Raises ValueError for who holds pages already: it may :meth:`grow`.
        """
        return self._add(owner, [], tokens)

    def fork(self, owner: str, child: str, *, shared: int, tokens: int) -> bool:
        """Pages for ``tokens`` positions of ``child``, which begins with the first ``shared`` positions of ``owner``.

        The full pages among these are shared; what is in a page that is not full must be computed (or copied) again.
        False, and nothing is taken, when too few are free. Raises ValueError when ``child`` holds pages already, or
        ``shared`` is more than either of the two has.
        """
        pages = self._owned[owner]
        if not 0 <= shared <= min(tokens, len(pages) * PAGE_SIZE):
            raise ValueError(f"{child!r} wants {tokens} positions, {shared} of them from {owner!r}, which has less")
        return self._add(child, pages[: shared // PAGE_SIZE], tokens)

    def grow(self, owner: str, tokens: int) -> bool:
        """More pages, so that there is room for ``tokens`` positions altogether; False, and nothing is taken, when too
        few are free. Never gives any back."""
        pages = self._owned[owner]
        wanted = self.pages_for(tokens) - len(pages)
        if wanted > len(self._free):
            return False
        pages += self._take(wanted)
        return True

    def free(self, owner: str) -> None:
        """Let an owner's pages go; an unknown owner is no error, so that closing twice is harmless."""
        for page in reversed(self._owned.pop(owner, ())):
            self._num_owners[page] -= 1
            if not self._num_owners[page]:
                self._free.append(page)

    def check_integrity(self, live: Iterable[str]) -> None:
        """Raises :class:`IntegrityError` unless exactly ``live`` own pages, and every page is either free or counts the
        owners that it has."""
        owners = set(live)
        if owners != set(self._owned):
            strangers = set(self._owned) ^ owners
            raise IntegrityError(f"owners of pages and live sequences differ in {sorted(strangers)[:5]}")
        held = Counter(page for pages in self._owned.values() for page in pages)
        for owner, pages in self._owned.items():
            if len(set(pages)) != len(pages):
                raise IntegrityError(f"{owner!r} holds a page twice")
        wrong = [page for page in range(self.num_pages) if held[page] != self._num_owners[page]]
        if wrong:
            raise IntegrityError(f"pages count other owners than they have: {wrong[:5]}")
        if sorted([*self._free, *held]) != list(range(self.num_pages)):
            raise IntegrityError(f"{len(self._free)} free pages and {len(held)} held ones, {self.num_pages} in all")

    def _add(self, owner: str, shared: list[int], tokens: int) -> bool:
        if owner in self._owned:
            raise ValueError(f"{owner!r} already holds pages")
        wanted = self.pages_for(tokens) - len(shared)
        if wanted > len(self._free):
            return False
        pages = [*shared, *self._take(wanted)]
        for page in shared:
            self._num_owners[page] += 1
        self._owned[owner] = pages
        return True

    def _take(self, count: int) -> list[int]:
        """So many free pages, which then have one owner each."""
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._num_owners[page] = 1
        return pages
