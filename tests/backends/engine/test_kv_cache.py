"""The page manager's books, under any sequence of what can be asked of it: no page is lost, or freed too early."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from backends.engine.kv_cache import IntegrityError, PageManager
from backends.runners.batch import PAGE_SIZE
from tests.support import engine_helpers as _  # noqa: F401  (sets the hypothesis profile)

OWNERS = st.sampled_from("abcdefgh")
TOKENS = st.integers(0, 6 * PAGE_SIZE)


class PageMachine(RuleBasedStateMachine):
    """The model: a list of pages per owner."""

    @initialize(num_pages=st.integers(1, 12))
    def start(self, num_pages: int) -> None:
        self.manager, self.size = PageManager(num_pages), num_pages
        self.owned: dict[str, list[int]] = {}

    @property
    def held(self) -> list[int]:
        return [page for pages in self.owned.values() for page in pages]

    def expect(self, done: bool, owner: str, kept: list[int], tokens: int) -> None:
        """``owner`` keeps ``kept`` in front and has free pages behind it; or nothing, for there are too few."""
        wanted = len(range(0, tokens, PAGE_SIZE)) - len(kept)
        assert done == (wanted <= self.size - len(set(self.held)))
        if done:
            pages = list(self.manager.pages_of(owner))
            assert pages[: len(kept)] == kept
            assert len(pages) == len(kept) + max(wanted, 0)
            assert not set(pages[len(kept) :]) & set(self.held)
            self.owned[owner] = pages

    @rule(owner=OWNERS, tokens=TOKENS)
    def allocate(self, owner: str, tokens: int) -> None:
        if owner in self.owned:
            with pytest.raises(ValueError, match="already holds"):
                self.manager.allocate(owner, tokens)
        else:
            self.expect(self.manager.allocate(owner, tokens), owner, [], tokens)

    @rule(owner=OWNERS, tokens=TOKENS)
    def grow(self, owner: str, tokens: int) -> None:
        if owner in self.owned:
            self.expect(self.manager.grow(owner, tokens), owner, self.owned[owner], tokens)

    @rule(owner=OWNERS, child=OWNERS, shared=TOKENS, more=TOKENS)
    def fork(self, owner: str, child: str, shared: int, more: int) -> None:
        if owner not in self.owned:
            return
        has, tokens = self.owned[owner], shared + more
        if child in self.owned or shared > len(has) * PAGE_SIZE:
            with pytest.raises(ValueError, match=r"already holds|which has less"):
                self.manager.fork(owner, child, shared=shared, tokens=tokens)
            return
        done = self.manager.fork(owner, child, shared=shared, tokens=tokens)
        self.expect(done, child, has[: shared // PAGE_SIZE], tokens)

    @rule(owner=OWNERS)
    def free(self, owner: str) -> None:
        self.manager.free(owner)
        self.owned.pop(owner, None)

    @invariant()
    def every_page_counts_its_owners(self) -> None:
        for owner, pages in self.owned.items():
            assert list(self.manager.pages_of(owner)) == pages
            assert len(set(pages)) == len(pages)
        assert [self.manager.num_owners(page) for page in range(self.size)] == [
            self.held.count(page) for page in range(self.size)
        ]
        assert self.manager.used_pages == len(set(self.held))
        self.manager.check_integrity(self.owned)

    @invariant()
    def strangers_are_noticed(self) -> None:
        with pytest.raises(IntegrityError, match="zz"):
            self.manager.check_integrity([*self.owned, "zz"])
        for owner in self.owned:
            with pytest.raises(IntegrityError, match=owner):
                self.manager.check_integrity(set(self.owned) - {owner})


PageMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25)
TestPages = PageMachine.TestCase


@pytest.mark.parametrize("broken", [[0, 1, 0], [0], [0, 2], [1, 1]])
def test_a_page_owned_twice_or_lost_is_noticed(broken: list[int]) -> None:
    manager = PageManager(4)
    assert manager.allocate("a", 2 * PAGE_SIZE)
    manager.check_integrity({"a"})
    manager._owned["a"][:] = broken
    with pytest.raises(IntegrityError, match=r"holds a page twice|other owners than they have"):
        manager.check_integrity({"a"})


def test_a_free_page_that_is_held_is_noticed() -> None:
    manager = PageManager(4)
    assert manager.allocate("a", 2 * PAGE_SIZE)
    manager._free.append(1)
    with pytest.raises(IntegrityError, match="3 free pages and 2 held ones, 4 in all"):
        manager.check_integrity({"a"})


def test_there_must_be_a_page() -> None:
    with pytest.raises(ValueError, match="at least one"):
        PageManager(0)


def test_low_pages_are_used_first_and_again() -> None:
    manager = PageManager(8)
    for owner, tokens, pages in (("a", 20, [0, 1]), ("b", 1, [2])):
        assert manager.allocate(owner, tokens) and manager.pages_of(owner) == pages
    manager.free("a")
    assert manager.allocate("c", 40) and manager.pages_of("c") == [0, 1, 3]


def test_slots_of_positions() -> None:
    manager = PageManager(8)
    assert manager.allocate("a", 16) and manager.allocate("b", 1) and manager.grow("a", 40)
    assert manager.slots("a", 14, 4) == [14, 15, 32, 33]


def test_a_shared_page_outlives_its_first_owner() -> None:
    manager = PageManager(4)
    assert manager.allocate("a", 40)
    assert manager.fork("a", "b", shared=39, tokens=48)
    assert (manager.pages_of("a"), manager.pages_of("b")) == ([0, 1, 2], [0, 1, 3])
    manager.free("a")
    assert manager.used_pages == 3
    assert not manager.allocate("c", 17) and manager.allocate("c", 16)
    manager.check_integrity({"b", "c"})
