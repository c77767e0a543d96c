"""Pages for sequences: taken as they grow, found again where texts begin alike, left behind for those to come."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from backends.engine.kv_cache import PageManager
from backends.engine.sequence import Sequence
from backends.runners.batch import PAGE_SIZE
from backends.tree import MAX_DEPTH


class SequenceMemory:
    """The pages of the sequences that run, and what of them others may use.

    Only what is committed is published: tokens that can't be taken back, whose keys and values are computed. The last
    token of a text is never taken from the cache, since what comes after it follows from its hidden state.
    """

    def __init__(self, num_pages: int, spare_pages: int) -> None:
        """``spare_pages``: what admission leaves free for each sequence that runs. Else the next page that one of them
        needs would put out who has just come in."""
        self._spare_pages = spare_pages
        self.pages = PageManager(num_pages)
        self.prompt_tokens = self.cached_tokens = 0
        """Of prompts that were looked up in the cache, and of these found there, since the start."""

    def begin(self, sequence: Sequence, num_running: int) -> bool:
        """Pages for what a sequence has so far, and for its next step; False, and nothing is taken, when that would
        bring the pages below the watermark of ``num_running`` others."""
        chain = sequence.chain
        found = [] if chain is None else self.pages.find(chain, _full_pages(sequence))
        spare = self._spare_pages * num_running
        if not self.pages.allocate(sequence.id, _next_length(sequence), found, spare=spare):
            return False
        sequence.num_computed_tokens, sequence.published = len(found) * PAGE_SIZE, len(found)
        if chain is not None and not sequence.preemptions:
            self.prompt_tokens += sequence.prompt_length
            self._count_cached(sequence, sequence.num_computed_tokens)
        return True

    def grow(self, sequence: Sequence) -> bool:
        """Pages for its next step, however many candidates are accepted; False, and nothing is taken: too few."""
        return self.pages.grow(sequence.id, _next_length(sequence))

    def catch_up(self, sequence: Sequence) -> int:
        """Take over pages that others have published since it began, such as another choice of the same prompt; returns
        how many tokens it need not read any more."""
        chain, before = sequence.chain, sequence.num_computed_tokens
        if chain is None:
            return 0
        index = before // PAGE_SIZE
        while index < _full_pages(sequence) and self.pages.adopt(sequence.id, index, chain[index]):
            index += 1
            sequence.num_computed_tokens, sequence.published = index * PAGE_SIZE, index
        gained = sequence.num_computed_tokens - before
        if gained and not sequence.preemptions:
            self._count_cached(sequence, gained)
        return gained

    @staticmethod
    def next_page(sequence: Sequence) -> bytes | None:
        """What the page is that it reads next, if others could use it; None: they could not."""
        chain, index = sequence.chain, sequence.num_computed_tokens // PAGE_SIZE
        return None if chain is None or index >= _full_pages(sequence) else chain[index]

    def publish(self, sequence: Sequence) -> None:
        """Let others find the pages that are full by now."""
        chain = sequence.chain
        if chain is not None:
            for index in range(sequence.published, sequence.num_computed_tokens // PAGE_SIZE):
                self.pages.publish(sequence.id, index, chain[index])
                sequence.published = index + 1

    def release(self, sequence: Sequence, *, keep: bool) -> None:
        """Its pages are no longer its own. ``keep`` False: what it has published is not to be trusted."""
        if not keep:
            self.pages.forget(sequence.id)
        self.pages.free(sequence.id)

    def slots(self, sequence: Sequence, first: int, count: int) -> list[int]:
        return self.pages.slots(sequence.id, first, count)

    def pages_of(self, sequence: Sequence) -> SequenceOf[int]:
        return self.pages.pages_of(sequence.id)

    def _count_cached(self, sequence: Sequence, tokens: int) -> None:
        sequence.cached_tokens += tokens
        self.cached_tokens += tokens


def _full_pages(sequence: Sequence) -> int:
    """Pages that may be taken from the cache: all but the one with the last token."""
    return (len(sequence.tokens) - 1) // PAGE_SIZE


def _next_length(sequence: Sequence) -> int:
    """Positions that it needs for its next step: the pending token, and the longest path of candidates behind it."""
    path = min(MAX_DEPTH, sequence.remaining - 1) if sequence.speculation.enabled else 0
    return len(sequence.tokens) + path
