"""The page pool's books, under any sequence of reservations and releases."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from backends.engine.kv_cache import IntegrityError, PagePool
from backends.runners.batch import PAGE_SIZE
from tests.support import engine_helpers as _  # noqa: F401  (sets the hypothesis profile)

OWNERS = st.sampled_from("abcdefgh")


class PoolMachine(RuleBasedStateMachine):
    """The model: a set of pages per owner."""

    @initialize(num_pages=st.integers(1, 12))
    def start(self, num_pages: int) -> None:
        self.pool, self.size = PagePool(num_pages), num_pages
        self.owned: dict[str, list[int]] = {}

    @rule(owner=OWNERS, tokens=st.integers(0, 6 * PAGE_SIZE))
    def reserve(self, owner: str, tokens: int) -> None:
        if owner in self.owned:
            with pytest.raises(ValueError, match="already holds"):
                self.pool.reserve(owner, tokens)
            return
        wanted = len(range(0, tokens, PAGE_SIZE))
        free = self.size - sum(map(len, self.owned.values()))
        pages = self.pool.reserve(owner, tokens)
        if wanted > free:
            assert pages is None
        else:
            assert pages is not None
            assert len(pages) == wanted
            self.owned[owner] = pages

    @rule(owner=OWNERS)
    def release(self, owner: str) -> None:
        self.pool.release(owner)
        self.owned.pop(owner, None)

    @invariant()
    def every_page_has_one_place(self) -> None:
        held = [page for pages in self.owned.values() for page in pages]
        assert len(set(held)) == len(held)
        assert set(held) <= set(range(self.size))
        assert (self.pool.used_pages, self.pool.free_pages) == (len(held), self.size - len(held))
        self.pool.check_integrity(self.owned)

    @invariant()
    def strangers_are_noticed(self) -> None:
        with pytest.raises(IntegrityError, match="zz"):
            self.pool.check_integrity([*self.owned, "zz"])
        for owner in self.owned:
            with pytest.raises(IntegrityError, match=owner):
                self.pool.check_integrity(set(self.owned) - {owner})


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25)
TestPool = PoolMachine.TestCase


@pytest.mark.parametrize("break_it", [lambda pages: pages.append(0), lambda pages: pages.pop()])
def test_a_page_owned_twice_or_lost_is_noticed(break_it) -> None:
    pool = PagePool(4)
    pages = pool.reserve("a", 2 * PAGE_SIZE)
    assert pages is not None
    pool.check_integrity({"a"})
    break_it(pages)
    with pytest.raises(IntegrityError, match="pages on the books"):
        pool.check_integrity({"a"})


def test_a_pool_needs_a_page() -> None:
    with pytest.raises(ValueError, match="at least one"):
        PagePool(0)


def test_low_pages_are_used_first_and_again() -> None:
    pool = PagePool(8)
    assert pool.reserve("a", 20) == [0, 1]
    assert pool.reserve("b", 1) == [2]
    pool.release("a")
    assert pool.reserve("c", 40) == [0, 1, 3]
