"""The page manager's books, under any sequence of what can be asked of it: no page is lost, freed too early, or found
under a name that it does not deserve."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from backends.engine.kv_cache import IntegrityError, PageManager
from backends.engine.prefix_chain import PrefixChain, chain_root
from backends.runners.batch import PAGE_SIZE
from tests.support import engine_helpers as _  # noqa: F401  (sets the hypothesis profile)

OWNERS = st.sampled_from("abcdefgh")
TOKENS = st.integers(0, 6 * PAGE_SIZE)
# Texts that often begin alike: a letter stands for a page full of it.
TEXTS = st.text("xy", min_size=1, max_size=6)


def chain_of(text: str) -> PrefixChain:
    return PrefixChain(chain_root("tests"), [ord(letter) for letter in text for _at in range(PAGE_SIZE)])


class PageMachine(RuleBasedStateMachine):
    """The model: a list of pages per owner, the text that each writes, what is in every page, and what is published."""

    @initialize(num_pages=st.integers(1, 12))
    def start(self, num_pages: int) -> None:
        self.manager, self.size = PageManager(num_pages), num_pages
        self.owned: dict[str, list[int]] = {}
        self.text: dict[str, str] = {}
        self.written: dict[str, int] = {}
        self.content: dict[int, str] = {}
        self.published: dict[str, int] = {}

    @property
    def held(self) -> list[int]:
        return [page for pages in self.owned.values() for page in pages]

    def taken(self, owner: str, kept: list[int]) -> None:
        """``owner`` keeps ``kept`` in front; behind it are pages that nobody held, and what was in them is gone."""
        pages = list(self.manager.pages_of(owner))
        assert pages[: len(kept)] == kept
        assert not set(pages[len(kept) :]) & (set(self.held) | set(kept))
        for page in pages[len(kept) :]:
            self.published = {text: at for text, at in self.published.items() if at != page}
            self.content.pop(page, None)
        self.owned[owner] = pages

    @rule(owner=OWNERS, text=TEXTS, more=TOKENS, spare=st.integers(0, 3))
    def begin(self, owner: str, text: str, more: int, spare: int) -> None:
        if owner in self.owned:
            with pytest.raises(ValueError, match="already holds"):
                self.manager.allocate(owner, more)
            return
        found = self.manager.find(chain_of(text), len(text))
        beginnings = [text[: at + 1] for at in range(len(text))]
        expected = []
        while len(expected) < len(text) and beginnings[len(expected)] in self.published:
            expected.append(self.published[beginnings[len(expected)]])
        assert found == expected
        # What is found holds what the text says, whoever has written it and however long ago.
        assert [self.content[page] for page in found] == beginnings[: len(found)]
        tokens = len(found) * PAGE_SIZE + more
        wanted = len(range(0, tokens, PAGE_SIZE)) - len(found)
        left = self.size - len(set(self.held) | set(found))
        done = self.manager.allocate(owner, tokens, found, spare=spare)
        assert done == (wanted + spare <= left)
        if done:
            self.text[owner], self.written[owner] = text, len(found)
            self.taken(owner, found)

    @rule(owner=OWNERS, tokens=TOKENS)
    def grow(self, owner: str, tokens: int) -> None:
        if owner in self.owned:
            has = self.owned[owner]
            wanted = len(range(0, tokens, PAGE_SIZE)) - len(has)
            done = self.manager.grow(owner, tokens)
            assert done == (wanted <= self.size - len(set(self.held)))
            if done:
                self.taken(owner, has)

    @rule(owner=OWNERS)
    def write_and_publish(self, owner: str) -> None:
        """The next page of its text, if there is room for it."""
        if owner not in self.owned:
            return
        at, text, pages = self.written[owner], self.text[owner], self.owned[owner]
        if at >= min(len(text), len(pages)):
            return
        page, name = pages[at], text[: at + 1]
        assert self.held.count(page) == 1 and page not in self.published.values(), "others read what is written into"
        self.content[page] = name
        self.manager.publish(owner, at, chain_of(text)[at])
        self.written[owner] += 1
        pages[at] = self.published.setdefault(name, page)

    @rule(owner=OWNERS)
    def catch_up(self, owner: str) -> None:
        if owner not in self.owned:
            return
        at, text, pages = self.written[owner], self.text[owner], self.owned[owner]
        if at < min(len(text), len(pages)):
            known = self.published.get(text[: at + 1])
            assert self.manager.adopt(owner, at, chain_of(text)[at]) == (known is not None)
            if known is not None:
                pages[at] = known
                self.written[owner] += 1

    @rule(owner=OWNERS)
    def free(self, owner: str) -> None:
        self.manager.free(owner)
        self.owned.pop(owner, None)

    @rule(owner=OWNERS)
    def give_up(self, owner: str) -> None:
        self.manager.forget(owner)
        self.manager.free(owner)
        gone = set(self.owned.pop(owner, ()))
        self.published = {text: page for text, page in self.published.items() if page not in gone}

    @invariant()
    def every_page_counts_its_owners(self) -> None:
        for owner, pages in self.owned.items():
            assert list(self.manager.pages_of(owner)) == pages
            assert len(set(pages)) == len(pages)
        assert [self.manager.num_owners(page) for page in range(self.size)] == [
            self.held.count(page) for page in range(self.size)
        ]
        assert self.manager.used_pages == len(set(self.held))
        assert self.manager.cached_pages == len(self.published)
        self.manager.check_integrity(self.owned)

    @invariant()
    def strangers_are_noticed(self) -> None:
        with pytest.raises(IntegrityError, match="zz"):
            self.manager.check_integrity([*self.owned, "zz"])
        for owner in self.owned:
            with pytest.raises(IntegrityError, match=owner):
                self.manager.check_integrity(set(self.owned) - {owner})


PageMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=30)
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
    with pytest.raises(IntegrityError, match="3 free pages, 0 idle and 2 held ones, 4 in all"):
        manager.check_integrity({"a"})


def test_a_hash_that_leads_elsewhere_is_noticed() -> None:
    manager, chain = PageManager(4), chain_of("xy")
    assert manager.allocate("a", 2 * PAGE_SIZE)
    manager.publish("a", 0, chain[0])
    manager.publish("a", 1, chain[1])
    manager._page_of[chain[1]] = 0
    with pytest.raises(IntegrityError, match="hashes differ"):
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


def test_the_longest_unused_goes_first_and_the_end_of_a_text_before_its_beginning() -> None:
    manager = PageManager(6)
    for owner, text in (("a", "xxx"), ("b", "yyy")):
        assert manager.allocate(owner, 3 * PAGE_SIZE)
        for at in range(3):
            manager.publish(owner, at, chain_of(text)[at])
    manager.free("a")
    manager.free("b")
    left = []
    for taken in range(1, 7):
        assert manager.allocate(f"c{taken}", 1)
        left.append((len(manager.find(chain_of("xxx"), 3)), len(manager.find(chain_of("yyy"), 3))))
    assert left == [(2, 3), (1, 3), (0, 3), (0, 2), (0, 1), (0, 0)]
    assert manager.evictions == 6


@given(TEXTS, TEXTS)
def test_hashes_are_equal_where_and_only_where_beginnings_are(one: str, other: str) -> None:
    for at in range(min(len(one), len(other))):
        assert (chain_of(one)[at] == chain_of(other)[at]) == (one[: at + 1] == other[: at + 1])


def test_what_pages_hang_on_beside_their_tokens_can_not_be_shifted_from_one_part_to_the_next() -> None:
    roots = [
        chain_root("ab", "c"),
        chain_root("a", "bc"),
        chain_root("abc", ""),
        chain_root("", "abc"),
        chain_root("ab"),
    ]
    assert len(set(roots)) == 5


def test_a_page_that_is_not_full_has_no_hash() -> None:
    tokens = [1] * (2 * PAGE_SIZE - 1)
    chain = PrefixChain(b"", tokens)
    assert chain[0]
    with pytest.raises(IndexError, match="not full"):
        chain[1]
    tokens.append(1)
    assert chain[1] == PrefixChain(b"", [1] * 2 * PAGE_SIZE)[1]
