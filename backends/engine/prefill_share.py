"""How much of the prompts is read in a step, and whose. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from backends.cost.step_cost import StepCost
from backends.types import PrefillBudget

PATIENCE_STEPS = 16
"""After so many steps in which others were read before it, the oldest prompt has half of the rows for itself."""
LEAST_ROWS = 4
"""Prompts get so many rows in any case, however dear: else nothing would ever begin beside a stream."""


def budget_rows(budget: PrefillBudget, cost: StepCost, num_decoding: int, most: int) -> int:
    """Rows for prompts beside ``num_decoding`` sequences; at most ``most``.

    "auto": as many as make a vanilla step last at most ``budget.factor`` times as long, by the cost table. Candidates
    are not counted: they are planned after this, at the price that a row then has.
    """
    if budget.rows is not None:
        return max(min(budget.rows, most), 1)
    bound = cost.forward_ms(num_decoding) * budget.factor
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if cost.forward_ms(num_decoding + middle) <= bound:
            low = middle
        else:
            high = middle - 1
    return min(max(low, LEAST_ROWS), most)


def share_rows(left: Sequence[int], rows: int, passed_over: int = PATIENCE_STEPS) -> list[int]:
    """How many of its ``left`` tokens each prompt may read, of ``rows`` altogether; prompts are in order of arrival.

    The one that has least left comes first, so that a short prompt does not wait for a long one. The oldest has a part
    for itself that grows with the steps in which it was ``passed_over``, up to half: so it always comes to its end.
    Rows don't influence each other: the answers are the same whatever the shares.
    """
    shares = [0] * len(left)
    if not left or rows <= 0:
        return shares
    shares[0] = min(left[0], -(-rows * min(passed_over, PATIENCE_STEPS) // (2 * PATIENCE_STEPS)))
    rows -= shares[0]
    for index in sorted(range(len(left)), key=lambda index: (left[index] - shares[index], index)):
        more = min(left[index] - shares[index], rows)
        shares[index] += more
        rows -= more
    return shares
