"""Which pages of the KV pool hold whose keys and values. Bookkeeping only; the tensors live in the model runner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

from backends.runners.batch import PAGE_SIZE


class SupportsPages(Protocol):
    """What each full page of a text holds, see :class:`backends.engine.prefix_chain.PrefixChain`."""

    def __getitem__(self, page: int, /) -> bytes: ...


class IntegrityError(AssertionError):
    """The books don't add up: a page is lost, or has other owners than it counts."""


class PageManager:
    """Owns the pages, of :data:`PAGE_SIZE` positions each; who wants some is an *owner* with a name of its own.

    A page that is full may be *published* under the hash of all that it depends on. Others that begin alike then hold
    it too, and it stays when its last owner lets go, until its place is needed: the longest unused goes first, and of
    one text the end before the beginning. Nobody writes into a published page.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages is {num_pages}; at least one page is needed")
        self.num_pages = num_pages
        # Taken from the end, so low pages are used first and again soonest, while they are still in the caches.
        self._free = list(range(num_pages - 1, -1, -1))
        self._owned: dict[str, list[int]] = {}
        self._num_owners = [0] * num_pages
        self._page_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        # Published pages without an owner, the longest unused first.
        self._idle: dict[int, None] = {}
        # Pages that an owner has let go and that still count it, to be settled from the end: wherever a step breaks,
        # the next operation goes on with them.
        self._leaving: list[int] = []
        self.evictions = 0
        """Published pages that had to give way, since the start."""

    @staticmethod
    def pages_for(tokens: int) -> int:
        return -(-tokens // PAGE_SIZE)

    @property
    def used_pages(self) -> int:
        """Those that have an owner."""
        return self.num_pages - self.available_pages

    @property
    def available_pages(self) -> int:
        """Those that can be had: free, or published and without an owner."""
        return len(self._free) + len(self._idle)

    @property
    def cached_pages(self) -> int:
        """Published ones, with an owner or without."""
        return len(self._hash_of)

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

    def find(self, chain: SupportsPages, most: int) -> list[int]:
        """The published pages that a text begins with, at most its first ``most``, which must be full. They may be gone
        as soon as pages are taken."""
        found = []
        for index in range(most):
            page = self._page_of.get(chain[index])
            if page is None:
                break
            found.append(page)
        return found

    def allocate(self, owner: str, tokens: int, shared: Sequence[int] = (), *, spare: int = 0) -> bool:
        """Pages for ``tokens`` positions, the first of them ``shared``: what :meth:`find` has just found.

        False, and nothing is taken, when fewer than ``spare`` pages would be left. Raises ValueError for who holds
        pages already: it may :meth:`grow`.
        """
        if owner in self._owned:
            raise ValueError(f"{owner!r} already holds pages")
        self._settle()
        wanted = self.pages_for(tokens) - len(shared)
        waking = sum([page in self._idle for page in shared])
        if wanted + spare > self.available_pages - waking:
            return False
        # Held before others are taken, which may put out what nobody holds.
        for page in shared:
            self._idle.pop(page, None)
            self._num_owners[page] += 1
        pages = self._owned[owner] = list(shared)
        try:
            taken = self._take(wanted)
        except BaseException:
            self.free(owner)
            raise
        pages += taken
        return True

    def grow(self, owner: str, tokens: int) -> bool:
        """More pages, so that there is room for ``tokens`` positions altogether; False, and nothing is taken, when too
        few can be had. Never gives any back."""
        pages = self._owned[owner]
        wanted = self.pages_for(tokens) - len(pages)
        if wanted <= 0:  # in nearly all steps
            return True
        self._settle()
        if wanted > self.available_pages:
            return False
        pages += self._take(wanted)
        return True

    def publish(self, owner: str, index: int, content: bytes) -> None:
        """Its page ``index`` is full and holds what ``content`` is the hash of. If another page does so already, the
        owner holds that one instead: their bits are the same."""
        if not self.adopt(owner, index, content):
            page = self._owned[owner][index]
            self._page_of[content], self._hash_of[page] = page, content

    def adopt(self, owner: str, index: int, content: bytes) -> bool:
        """Hold the page that is published as ``content`` in place of its page ``index``; False: there is none."""
        found, pages = self._page_of.get(content), self._owned[owner]
        if found is None:
            return False
        if found != pages[index]:
            self._idle.pop(found, None)
            self._num_owners[found] += 1
            self._leaving.append(pages[index])
            pages[index] = found
            self._settle()
        return True

    def forget(self, owner: str) -> None:
        """Nobody shall find its pages any more; who holds them goes on."""
        for page in self._owned.get(owner, ()):
            self._unpublish(page)

    def free(self, owner: str) -> None:
        """Let an owner's pages go; an unknown owner is no error, so that closing twice is harmless."""
        self._leaving += self._owned.pop(owner, ())
        self._settle()

    def check_integrity(self, live: Iterable[str]) -> None:
        """Raises :class:`IntegrityError` unless exactly ``live`` own pages, and every page is either free or counts the
        owners that it has."""
        self._settle()
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
        if sorted([*self._free, *self._idle, *held]) != list(range(self.num_pages)):
            raise IntegrityError(
                f"{len(self._free)} free pages, {len(self._idle)} idle and {len(held)} held ones, "
                f"{self.num_pages} in all"
            )
        published = {page: content for content, page in self._page_of.items()}
        if (
            published != self._hash_of
            or len(published) != len(self._page_of)
            or not published.keys() >= self._idle.keys()
        ):
            raise IntegrityError("published pages and their hashes differ")

    def _take(self, count: int) -> list[int]:
        """So many pages, free ones first, each of which then has one owner: the caller gives them to it at once."""
        while len(self._free) < count:
            page = next(iter(self._idle))
            self.evictions += 1
            self._unpublish(page)
        first = len(self._free) - max(count, 0)
        taken = self._free[first:][::-1]
        del self._free[first:]
        for page in taken:
            self._num_owners[page] = 1
        return taken

    def _settle(self) -> None:
        """The pages that were let go have an owner less."""
        while self._leaving:
            page = self._leaving[-1]
            self._num_owners[page] -= 1
            if not self._num_owners[page]:
                if page in self._hash_of:
                    self._idle[page] = None
                else:
                    self._free.append(page)
            self._leaving.pop()

    def _unpublish(self, page: int) -> None:
        content = self._hash_of.pop(page, None)
        if content is not None:
            del self._page_of[content]
            if page in self._idle:
                del self._idle[page]
                self._free.append(page)
