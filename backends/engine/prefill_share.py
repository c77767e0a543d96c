"""Whose prompt is read in a step, and how much of it. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def share_rows(left: Sequence[int], rows: int) -> list[int]:
    """How many of its ``left`` tokens each prompt may read, of ``rows`` altogether; prompts are in order of arrival.

    The oldest prompt gets half of the rows in any case, so it always comes to its end; the rest goes to the shortest
    first, so that a short prompt does not wait for a long one. What neither needs goes to the others. Rows don't
    influence each other: the answers are the same whatever the shares.
    """
    shares = [0] * len(left)
    if not left or rows <= 0:
        return shares
    shares[0] = min(left[0], -(-rows // 2))
    rows -= shares[0]
    for index in sorted(range(len(left)), key=lambda index: (left[index] - shares[index], index)):
        more = min(left[index] - shares[index], rows)
        shares[index] += more
        rows -= more
    return shares
