"""One step's rows in flat arrays: what a model runner is given.

All sequences of a step share one row axis. A sequence contributes adjacent rows: a chunk of its prompt, or its pending
token (the *root*) followed by candidate nodes. Rows that are certain (prompt and root) store their key and value in
the sequence's own pages; candidate nodes store them in scratch slots, from which the accepted ones are copied.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

PAGE_SIZE = 16
ARRAYS = (
    "tokens",
    "positions",
    "slots",
    "sequence",
    "full_pages",
    "tail_offsets",
    "tail_slots",
    "page_offsets",
    "pages",
    "out_row",
)
Ints = NDArray[np.int32]

# The builder's lists, in the order of ARRAYS.
_PARTS = attrgetter(*(f"_{name}" for name in ARRAYS))


@dataclass(frozen=True, slots=True)
class StepBatch:
    """``memory`` holds all arrays one behind the other, in the order of :data:`ARRAYS`; ``ends``: where each ends.

    Arrays are int32. ``rows`` R, ``sequences`` S, ``outputs`` O.

    ``tokens``, ``positions``, ``slots``, ``sequence``, ``full_pages``: [R]. ``slots`` says where a row's key and value
    go: page * 16 + offset. A row sees the first ``full_pages`` pages of its sequence whole, then the keys in
    ``tail_slots[tail_offsets[r] : tail_offsets[r + 1]]`` in order of position, itself last: at most 31, as a tree has
    at most 16 levels. ``pages[page_offsets[s] : page_offsets[s + 1]]``: the page table of sequence s.
    ``out_row`` [O]: rows whose hidden state is wanted.
    """

    memory: array[int]
    ends: tuple[int, ...]

    @property
    def rows(self) -> int:
        return self.ends[0]

    @property
    def outputs(self) -> int:
        return self.ends[-1] - self.ends[-2]

    def __getattr__(self, name: str) -> Ints:
        """One of :data:`ARRAYS`, not copied."""
        if name not in ARRAYS:
            raise AttributeError(name)
        index = ARRAYS.index(name)
        return np.frombuffer(self.memory, np.int32)[self.ends[index - 1] if index else 0 : self.ends[index]]


class BatchBuilder:
    """Collects one step. ``scratch_base`` is the first scratch slot; node k of the whole step gets the k-th."""

    def __init__(self, scratch_base: int) -> None:
        self._scratch_base = scratch_base
        self._nodes = 0
        self._tokens: list[int] = []
        self._positions: list[int] = []
        self._slots: list[int] = []
        self._sequence: list[int] = []
        self._full_pages: list[int] = []
        self._tail_offsets: list[int] = [0]
        self._tail_slots: list[int] = []
        self._page_offsets: list[int] = [0]
        self._pages: list[int] = []
        self._out_row: list[int] = []

    @property
    def rows(self) -> int:
        return len(self._tokens)

    @property
    def outputs(self) -> int:
        return len(self._out_row)

    def add_chunk(self, pages: Sequence[int], tokens: Sequence[int], start: int, *, last_output: bool) -> None:
        """Prompt tokens at positions ``start`` on; ``last_output``: the last one's hidden state is wanted."""
        for offset, token in enumerate(tokens):
            self._certain_row(pages, token, start + offset)
        if last_output:
            self._out_row.append(self.rows - 1)
        self._close_sequence(pages)

    def add_outputs(self, first_row: int, count: int) -> None:
        """The hidden states of rows already added are wanted too; they come last."""
        self._out_row.extend(range(first_row, first_row + count))

    def add_tree(
        self, pages: Sequence[int], root: int, position: int, nodes: Sequence[int], parents: Sequence[int]
    ) -> list[int]:
        """The pending token ``root`` at ``position`` and candidate ``nodes`` below it.

        ``parents[i]`` is the row of node i's parent counted from the root's row 0. Every row is an output. Returns the
        scratch slots of the nodes.
        """
        first = self.rows
        self._certain_row(pages, root, position)
        full = (position + 1) // PAGE_SIZE
        shared = [pages[full] * PAGE_SIZE + i for i in range((position + 1) % PAGE_SIZE)]
        paths: list[list[int]] = [[]]
        node_slots = []
        for token, parent in zip(nodes, parents, strict=True):
            slot = self._scratch_base + self._nodes
            self._nodes += 1
            node_slots.append(slot)
            path = [*paths[parent], slot]
            paths.append(path)
            self._tokens.append(token)
            self._positions.append(position + len(path))
            self._slots.append(slot)
            self._full_pages.append(full)
            self._tail_slots.extend(shared)
            self._tail_slots.extend(path)
            self._tail_offsets.append(len(self._tail_slots))
        self._out_row.extend(range(first, self.rows))
        self._sequence.extend([len(self._page_offsets) - 1] * len(nodes))
        self._close_sequence(pages)
        return node_slots

    def build(self) -> StepBatch:
        parts: tuple[list[int], ...] = _PARTS(self)
        return StepBatch(array("i", chain.from_iterable(parts)), tuple(accumulate(map(len, parts))))

    def _certain_row(self, pages: Sequence[int], token: int, position: int) -> None:
        full, offset = divmod(position + 1, PAGE_SIZE)
        slot = pages[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE
        self._tokens.append(token)
        self._positions.append(position)
        self._slots.append(slot)
        self._sequence.append(len(self._page_offsets) - 1)
        self._full_pages.append(full)
        if offset:
            base = pages[full] * PAGE_SIZE
            self._tail_slots.extend(range(base, base + offset))
        self._tail_offsets.append(len(self._tail_slots))

    def _close_sequence(self, pages: Sequence[int]) -> None:
        self._pages.extend(pages)
        self._page_offsets.append(len(self._pages))
