"""Why a request's steps had no candidates, so that its answer can say so."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from backends.cost.step_cost import StepCost
from backends.speculation.tree_builder import DraftRequest, row_price


class Why:
    """What stood in the way of drafting in one step, as an answer tells it. Texts, since an Enum's hash is slow."""

    PRICE = "one more row costs as much as {price:.2f} tokens here, and the best candidate brought {chance:.2f}"
    GATE = "the heads do not pay in a batch of this size (speedup {speedup:.2f})"
    REFERENCE = "steps without the heads were due, to compare with"
    PAUSED = "drafting was paused after drafts that did not pay"
    FAILED = "drafting had failed and was left alone for a while"
    NOTHING = "there are no heads to ask, and the text did not repeat itself"
    PLAN = "the plan allows no candidates"
    ROOM = "the batch had no rows left for candidates"
    RESUMED = "it had just gone on after its memory was taken by others"
    LAST = "only the last token was to come"


@dataclass(slots=True)
class Undrafted:
    """The record of one request. ``price``, ``chance``, ``speedup``: sums of what a reason quotes.

    ``unasked``: why the heads have made no guesses for the next step; ``gate_speedup``: what the batch gate said then.
    """

    unasked: str = Why.NOTHING
    gate_speedup: float = 0.0
    steps: Counter[str] = field(default_factory=Counter)
    price: float = 0.0
    chance: float = 0.0
    speedup: float = 0.0

    def note(self, why: str, *, price: float = 0.0, chance: float = 0.0, speedup: float = 0.0) -> None:
        """A step that was to draft and had no candidate."""
        self.steps[why] += 1
        self.price += price
        self.chance += chance
        self.speedup += speedup

    def note_step(
        self, request: DraftRequest | None, *, remaining: int, cost: StepCost, sequences: int, row_cost_factor: float
    ) -> None:
        """A step of ``sequences`` decoding sequences in which this one was to draft and had no candidate.

        ``request``: what it might have drafted. ``remaining``: tokens that it may still emit.
        """
        if remaining <= 1:
            self.note(Why.LAST)
        elif request is None:
            self.note(self.unasked, speedup=self.gate_speedup if self.unasked is Why.GATE else 0.0)
        elif request.tree is not None:
            self.note(Why.ROOM)
        elif request.max_nodes <= 0:
            self.note(Why.PLAN)
        else:
            price = row_price(cost, sequences=sequences, row_cost_factor=row_cost_factor)
            self.note(Why.PRICE, price=price, chance=request.best_chance)

    def reason(self, decode_steps: int) -> str | None:
        """The commonest reason with its averages; None where most of the steps did have candidates."""
        undrafted = self.steps.total()
        if not undrafted or 2 * undrafted < decode_steps:
            return None
        why, times = self.steps.most_common(1)[0]
        because = why.format(price=self.price / times, chance=self.chance / times, speedup=self.speedup / times)
        how_often = f"all {undrafted}" if undrafted >= decode_steps else f"{undrafted} of {decode_steps}"
        return f"no candidates in {how_often} steps, mostly because {because}"
