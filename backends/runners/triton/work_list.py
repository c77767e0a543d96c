"""What attention has to do in one step: a list of pieces, each with the adjacent rows that see the same keys in it.

Free of triton and torch. Which pieces a row has says its own length (R4); only who shares an item depends on the step.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from backends.runners.batch import PAGE_SIZE, StepBatch
from backends.runners.triton.tiling import Tiling

ITEM = 8
"""Numbers of an item: its first row, how many rows, first and last + 1 position, number of the piece, where its page
table begins, the position from which slots are told one by one, and where those begin in the tail."""
ALL_PAGED = 1 << 30


def lengths_of(batch: StepBatch) -> NDArray[np.int32]:
    """Keys that each row sees [R], itself included."""
    return batch.full_pages * PAGE_SIZE + np.diff(batch.tail_offsets)


def items_of(batch: StepBatch, tiling: Tiling, group: int, scratch_base: int) -> NDArray[np.int32]:
    """The items [n, 8] of a step. ``group``: query heads of a key head. ``scratch_base``: the first candidate's slot.

    Rows of a prompt share their pieces as far as a program holds them, also last pieces that end elsewhere: a row's
    own length hides the rest. Rows of a tree share the pieces that end before the first candidate; what holds
    candidates is each row's own, its slots told by the tail.
    """
    lengths = lengths_of(batch).tolist()
    sequence, slots = batch.sequence.tolist(), batch.slots.tolist()
    full_pages, tails, tables = batch.full_pages.tolist(), batch.tail_offsets.tolist(), batch.page_offsets.tolist()
    held = tiling.queries // group
    items: list[list[int]] = []
    end_of_sequence = 0
    while end_of_sequence < batch.rows:
        first = end_of_sequence
        while end_of_sequence < batch.rows and sequence[end_of_sequence] == sequence[first]:
            end_of_sequence += 1
        certain = all(slot < scratch_base for slot in slots[first:end_of_sequence])
        opened: dict[tuple[int, int], list[int]] = {}
        for row in range(first, end_of_sequence):
            n = lengths[row]
            for start, end, number in tiling.pieces(n):
                shared = certain or end <= lengths[first]
                # Last pieces of a prompt's rows differ in their ends only.
                key = (start, -1 if certain and end % tiling.tile else end)
                item = opened.get(key) if shared else None
                if item is not None and item[0] + item[1] == row and item[1] < held:
                    item[1] += 1
                    item[3] = max(item[3], end)
                    continue
                paged = ALL_PAGED if shared else full_pages[row] * PAGE_SIZE
                item = [row, 1, start, end, number, tables[sequence[row]], paged, tails[row]]
                items.append(item)
                if shared:
                    opened[key] = item
    return np.array(items, np.int32).reshape(-1, ITEM)


def most_items(max_rows: int, max_context: int, tiling: Tiling) -> int:
    """Items that a step of ``max_rows`` rows can have: as if none were shared."""
    return max_rows * tiling.splits(max_context)
