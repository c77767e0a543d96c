"""A step's rows put into their arrays by C (``csrc/rows.h``): what :class:`backends.runners.batch.BatchBuilder` builds,
in a fraction of the time and without Python's lock. That class is what this is tested against."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from ctypes import c_int, c_int32, c_void_p
from typing import Any

from backends.runners.batch import ARRAYS, PAGE_SIZE, BatchBuilder, StepBatch
from backends.runners.native.bindings import NativeUnavailable, load_library
from backends.tree import MAX_DEPTH

_CHUNK, _CHUNK_WITH_OUTPUT, _TREE = range(3)
# Slots that a row names one by one, at most.
_LONGEST_TAIL = PAGE_SIZE + MAX_DEPTH


def batches_here() -> Callable[[int], BatchBuilder | NativeRows]:
    """Makes builders from the first scratch slot: those in C, or their reference where there is no C compiler."""
    try:
        function = load_library().library.mg_rows
    except NativeUnavailable:
        return BatchBuilder
    function.restype = c_int
    arrays, number = [c_void_p] * 4, c_int32
    function.argtypes = [c_void_p, number, *arrays[:3], number, number, number, c_void_p, number, c_void_p]
    return lambda scratch_base: NativeRows(function, scratch_base)


class NativeRows:
    """See :class:`backends.runners.batch.BatchBuilder`."""

    __slots__ = ("_function", "_of", "_pages", "_parents", "_scratch_base", "_tokens", "outputs")

    def __init__(self, function: Any, scratch_base: int) -> None:
        self._function, self._scratch_base = function, scratch_base
        self._of: list[int] = []
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._pages: list[int] = []
        self.outputs = 0

    @property
    def rows(self) -> int:
        return len(self._tokens)

    def add_chunk(self, pages: Sequence[int], tokens: Sequence[int], start: int, *, last_output: bool) -> None:
        self._of += (_CHUNK_WITH_OUTPUT if last_output else _CHUNK, start, len(tokens), len(pages))
        self._tokens += tokens
        self._pages += pages
        self.outputs += last_output

    def add_tree(
        self, pages: Sequence[int], root: int, position: int, nodes: Sequence[int], parents: Sequence[int]
    ) -> Sequence[int]:
        count = len(nodes)
        if count != len(parents):
            raise ValueError(f"{count} nodes with {len(parents)} parents")
        self._of += (_TREE, position, count + 1, len(pages))
        self._tokens.append(root)
        self._pages += pages
        self.outputs += count + 1
        if not count:
            return ()
        first = self._scratch_base + len(self._parents)
        self._tokens += nodes
        self._parents += parents
        return range(first, first + count)

    def build(self) -> StepBatch:
        """Raises ValueError for a sequence without pages for its rows, or a node before its parent."""
        rows, sequences = len(self._tokens), len(self._of) // 4
        capacity = (7 + _LONGEST_TAIL) * rows + sequences + 2 + len(self._pages) + PAGE_SIZE
        given = array("i", [*self._of, *self._tokens, *self._parents, *self._pages])
        memory, ends = array("i", bytes(4 * capacity)), array("i", bytes(4 * len(ARRAYS)))
        of = given.buffer_info()[0]
        tokens = of + 4 * len(self._of)
        parents = tokens + 4 * rows
        pages = parents + 4 * len(self._parents)
        done = self._function(
            of,
            sequences,
            tokens,
            parents,
            pages,
            rows,
            PAGE_SIZE,
            self._scratch_base,
            memory.buffer_info()[0],
            capacity,
            ends.buffer_info()[0],
        )
        if not done:
            raise ValueError("a sequence lacks pages for its rows, or a node comes before its parent or too deep")
        del memory[ends[-1] :]
        return StepBatch(memory, tuple(ends))
