"""Who guesses: each kind of guesser is a :class:`Drafter`, and what they offer is joined in one tree.

Medusa heads and prompt lookup stand here. A draft model, a corpus of earlier answers, or tokens that a grammar forces
would be further ones (:class:`backends.engine.core.EngineCore` takes them as ``drafters``). Verification makes every
wrong guess harmless.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple, Protocol

import torch

from backends.cost.calibration import Calibration
from backends.cost.step_cost import StepCost
from backends.engine.config import EngineConfig
from backends.engine.sequence import Sequence, SequenceStatus
from backends.engine.step_plan import Outcome, StepPlan
from backends.runners.base import HeadsRunner, ProposalRequest, Proposals
from backends.speculation.batch_gate import DraftGate
from backends.speculation.prompt_lookup import Continuation
from backends.speculation.tree_builder import HEADS, LOOKUP, Offer, lookup_pays, min_survival
from backends.speculation.undrafted import Why

MOST_INDEXED = 1024
"""Tokens of prompts that lookup takes in before a step, of all sequences together."""


class DraftingCall(NamedTuple):
    """What drafters are asked at the end of a step, for the next one."""

    # The step that has ended, and its final-norm hidden states [outputs, H].
    plan: StepPlan
    hidden: torch.Tensor
    # The sequences that may draft in the next step, as this one has left them: their pending tokens are known.
    outcomes: list[Outcome]
    # Sequences that decode in the next step, whether they may draft or not.
    num_decoding: int


class Drafter(Protocol):
    """A source of candidates for all sequences. Called from the engine's thread only; what it raises costs its own
    guesses and nothing else."""

    name: str
    """By which its candidates are counted."""

    def propose(self, call: DraftingCall) -> SequenceOf[Offer | None]:
        """Guesses for each of ``call.outcomes``, in their order. None: nothing for this one.

        A chain of tokens; of the heads (:data:`HEADS`), and of no other, lists of siblings.
        """
        ...

    def observe(self, plan: StepPlan, outcomes: SequenceOf[Outcome]) -> None:
        """What a step has made of the candidates. ``outcomes``: of all its decoding sequences; ``scheduled.offers``
        holds what was offered, ``accepted_by`` how much was accepted, by name."""
        ...

    def cost_ms(self, offers: SequenceOf[Offer]) -> float:
        """What making these in one call took by the cost table, in milliseconds."""
        ...

    def use_cost(self, cost: StepCost) -> None:
        """Decide by a better table from now on."""
        ...

    def begin(self, sequence: Sequence) -> None:
        """It has been let in, the first time or again: its tokens are read in this step and those to come."""
        ...

    @property
    def is_behind(self) -> bool:
        """Whether :meth:`keep_up` has something to do."""
        ...

    def keep_up(self) -> None:
        """Called before a step: the place for work on what :meth:`begin` has brought, a bounded part at a time."""
        ...


class HeadsDrafter:
    """Medusa heads, asked where the next step may use them."""

    name = HEADS

    def __init__(
        self, heads: HeadsRunner, config: EngineConfig, cost: StepCost, gate: DraftGate, calibration: Calibration
    ) -> None:
        self._heads, self._config, self._cost = heads, config, cost
        self._gate, self._calibration = gate, calibration

    def use_cost(self, cost: StepCost) -> None:
        self._cost = cost
        self._gate.use_cost(cost)

    def propose(self, call: DraftingCall) -> list[Proposals | None]:
        asking = self._asking(call)
        found: list[Proposals | None] = [None] * len(call.outcomes)
        if not asking:
            return found
        outcomes = [call.outcomes[index] for index in asking]
        sequences = [outcome.scheduled.sequence for outcome in outcomes]
        trees = [sequence.request.plan.tree for sequence in sequences]
        ranks = max([max(tree.ranks_per_depth, default=0) if tree else 0 for tree in trees])
        scheduled = call.plan.scheduled
        proposals = self._heads.propose(
            ProposalRequest(
                hidden=call.hidden,
                contexts=[sequence.tokens for sequence in sequences],
                k=max(self._config.proposals, ranks),
                trees=trees,
                rows=[outcome.scheduled.first_row + outcome.result.rows[-1] for outcome in outcomes],
                min_survival=min_survival(
                    self._cost,
                    sequences=call.num_decoding,
                    rows=call.plan.num_rows,
                    tokens=len(scheduled) + sum([item.draft.expected for item in scheduled]),
                    row_cost_factor=self._calibration.row_cost_factor(call.num_decoding),
                    num_heads=self._heads.num_heads,
                ),
            )
        )
        for index, each in zip(asking, proposals, strict=True):
            found[index] = each
        return found

    def observe(self, plan: StepPlan, outcomes: SequenceOf[Outcome]) -> None:
        made = [found for outcome in outcomes if (found := outcome.scheduled.proposals) is not None]
        step_ms, vanilla_ms = 0.0, plan.price.vanilla_ms
        if made:
            # With the heads and their own candidates only.
            nodes = sum([item.draft.sources.count(HEADS) for item in plan.scheduled])
            step_ms = self._cost.decode_ms(plan.num_decoding, nodes, plan.num_prefill_rows) + self.cost_ms(made)
            step_ms *= self._calibration.factor(len(outcomes))
            if plan.is_typical:
                accepted = sum([outcome.accepted_by.get(HEADS, 0) for outcome in outcomes])
                self._gate.observe(len(outcomes), accepted=accepted, vanilla_ms=vanilla_ms, step_ms=step_ms)
        for outcome in outcomes:
            item, sequence = outcome.scheduled, outcome.scheduled.sequence
            if item.proposals is None:
                sequence.speculation.rest()
            elif sequence.request.plan.tree is None:
                sequence.speculation.observe(
                    expected=item.draft.expected_from(HEADS),
                    accepted=outcome.accepted_by.get(HEADS, 0),
                    vanilla_ms=vanilla_ms,
                    step_ms=step_ms,
                )

    def cost_ms(self, offers: SequenceOf[Offer]) -> float:
        lists, levels, num_heads = 0, 0, self._heads.num_heads
        for found in offers:
            if isinstance(found, Proposals):
                lists += found.lists
                levels = max(levels, num_heads if found.levels is None else found.levels)
        return self._cost.levels_ms(lists, levels, num_heads)

    def begin(self, sequence: Sequence) -> None:
        pass

    @property
    def is_behind(self) -> bool:
        return False

    def keep_up(self) -> None:
        pass

    def _asking(self, call: DraftingCall) -> list[int]:
        """For whom the heads are to guess, by index, and why not for the others.

        A tree that the plan itself asks for is always used, and a probe always asks.
        """
        say_unasked(call.outcomes, Why.PAUSED)
        asking = [
            index
            for index, outcome in enumerate(call.outcomes)
            if outcome.scheduled.sequence.speculation.wants_proposals
        ]
        # Prompts being read are sequences of the steps to come.
        batch = call.num_decoding + call.plan.num_prefilling
        if asking and not self._gate.allows(batch):
            why = Why.REFERENCE if self._gate.is_open(batch) else Why.GATE
            say_unasked([call.outcomes[index] for index in asking], why, self._gate.speedup(batch))
            asking = [index for index in asking if _asks_always(call.outcomes[index].scheduled.sequence)]
        return asking


class LookupDrafter:
    """What followed the same tokens in the text before, see :mod:`backends.speculation.prompt_lookup`."""

    name = LOOKUP

    def __init__(self, cost: StepCost, calibration: Calibration) -> None:
        self._cost, self._calibration = cost, calibration
        # Those let in whose tokens are not all indexed yet.
        self._behind: dict[str, Sequence] = {}

    def use_cost(self, cost: StepCost) -> None:
        self._cost = cost

    def propose(self, call: DraftingCall) -> list[Continuation | None]:
        row_cost_factor = self._calibration.row_cost_factor(call.num_decoding)
        if not lookup_pays(self._cost, sequences=call.num_decoding, row_cost_factor=row_cost_factor):
            return [None] * len(call.outcomes)
        found: list[Continuation | None] = []
        for outcome in call.outcomes:
            sequence = outcome.scheduled.sequence
            # An index that fails is given up.
            lookup, sequence.lookup = sequence.lookup, None
            found.append(None if lookup is None else lookup.find())
            sequence.lookup = lookup
        return found

    def observe(self, plan: StepPlan, outcomes: SequenceOf[Outcome]) -> None:
        for outcome in outcomes:
            offer, lookup = outcome.scheduled.offers.get(LOOKUP), outcome.scheduled.sequence.lookup
            if isinstance(offer, Continuation) and lookup is not None:
                lookup.observe(offer, outcome.emitted)

    def cost_ms(self, offers: SequenceOf[Offer]) -> float:
        return 0.0

    def begin(self, sequence: Sequence) -> None:
        if sequence.lookup is not None:
            self._behind[sequence.id] = sequence

    @property
    def is_behind(self) -> bool:
        return bool(self._behind)

    def keep_up(self) -> None:
        """Index long prompts, one after another, so many tokens a step: reading a long one can be short work, where
        it is read at once or found in the cache. What is not indexed yet costs guesses and nothing else."""
        left = MOST_INDEXED
        while left and self._behind:
            name = next(iter(self._behind))
            sequence = self._behind.pop(name)
            lookup, sequence.lookup = sequence.lookup, None
            if lookup is None or sequence.status is SequenceStatus.FINISHED:
                continue
            # An index that fails is given up.
            left -= lookup.index(left)
            sequence.lookup = lookup
            if not lookup.is_complete:
                self._behind[name] = sequence


def say_unasked(outcomes: Iterable[Outcome], why: str, gate_speedup: float = 0.0) -> None:
    """Why the heads have made no guesses for the next step, in the record of each sequence."""
    for outcome in outcomes:
        record = outcome.scheduled.sequence.undrafted
        record.unasked, record.gate_speedup = why, gate_speedup


def _asks_always(sequence: Sequence) -> bool:
    return sequence.request.plan.tree is not None or sequence.request.plan.probe
