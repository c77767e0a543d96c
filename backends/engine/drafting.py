"""Where the candidates of a step come from: the text itself, looked up before the step, and the heads, asked at the end
of the step before. Verified tokens don't hang on them: what fails here leaves a step without candidates."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import torch

from backends.cost.step_cost import StepCost
from backends.engine.accounting import StepAccounting
from backends.engine.config import EngineConfig
from backends.engine.optional_parts import OptionalParts
from backends.engine.sequence import Sequence
from backends.engine.step_plan import Outcome, StepPlan
from backends.runners.base import HeadsRunner, ProposalRequest, Proposals
from backends.speculation.guided import guided
from backends.speculation.prompt_lookup import Continuation
from backends.speculation.tree_builder import Draft, DraftRequest, lookup_pays, min_survival, plan_drafts
from backends.speculation.undrafted import Why
from backends.tree import MAX_DEPTH
from backends.types import TokenGrammar

# Shared by all that draft nothing: a draft is not changed once it is planned.
NO_DRAFT = Draft()


class DraftPlan(NamedTuple):
    """The candidates of a step, by index of the decoding sequence."""

    # What each sequence might have drafted; without an entry: nothing to draft from, or no use for it.
    requests: dict[int, DraftRequest]
    # What it does draft; without an entry: nothing.
    drafts: dict[int, Draft]
    # Measured time of one more row / what the cost table says of it.
    row_cost_factor: float


class DraftPlanner:
    """Plans the candidates of all decoding sequences of a step, and asks the heads for the next step's guesses."""

    def __init__(
        self,
        heads: HeadsRunner | None,
        vocab_size: int,
        config: EngineConfig,
        cost: StepCost,
        accounting: StepAccounting,
        optional: OptionalParts,
    ) -> None:
        self._heads, self._vocab_size = heads, vocab_size
        self._config, self._cost = config, cost
        self._accounting, self._optional = accounting, optional

    def plan(self, decoding: SequenceOf[Sequence], *, num_prefill_rows: int, num_prefilling: int) -> DraftPlan:
        """Candidates for a step in which ``decoding`` get a row each, and prompts ``num_prefill_rows``.

        ``num_prefilling``: prompts being read, which will decode later.
        """
        plan = self._plan_if_possible(decoding, num_prefill_rows, num_prefilling)
        with self._optional.judging:
            for index, sequence in enumerate(decoding):
                if not plan.drafts.get(index, NO_DRAFT).tokens and sequence.speculation.enabled:
                    sequence.undrafted.note_step(
                        plan.requests.get(index),
                        remaining=sequence.remaining,
                        cost=self._cost,
                        sequences=len(decoding),
                        row_cost_factor=plan.row_cost_factor,
                    )
        return plan

    def note_prefilled(self, sequence: Sequence, num_tokens: int) -> None:
        """Keep the index of a long prompt up with its reading, so that no single step has all of it to do."""
        if sequence.lookup is None:
            return
        with self._optional.lookup:
            sequence.lookup.index(num_tokens)
            return
        sequence.lookup = None

    def propose(
        self, plan: StepPlan, outcomes: SequenceOf[Outcome], hidden: torch.Tensor, *, num_prefilling: int
    ) -> list[Proposals]:
        """The heads' guesses for the next step, put into the sequences; none when they fail or failed lately.

        ``hidden`` [outputs, H]: of this step.
        """
        sequences = [outcome.scheduled.sequence for outcome in outcomes]
        _forget_proposals(sequences)
        if self._optional.planning.rests or not self._optional.heads.ready():
            return []
        with self._optional.heads:
            return self._propose(plan, outcomes, hidden, num_prefilling)
        _forget_proposals(sequences)
        return []

    def _plan_if_possible(
        self, decoding: SequenceOf[Sequence], num_prefill_rows: int, num_prefilling: int
    ) -> DraftPlan:
        """No candidates when planning fails or failed lately."""
        if self._optional.planning.ready():
            with self._optional.planning:
                return self._plan(decoding, num_prefill_rows, num_prefilling)
        _forget_proposals(decoding)
        return DraftPlan({}, {}, 1.0)

    def _plan(self, decoding: SequenceOf[Sequence], num_prefill_rows: int, num_prefilling: int) -> DraftPlan:
        size, requests = len(decoding), {}
        row_cost_factor = self._accounting.calibration.row_cost_factor(size)
        look_up = bool(decoding) and lookup_pays(self._cost, sequences=size, row_cost_factor=row_cost_factor)
        for index, sequence in enumerate(decoding):
            request = self._draft_request(sequence, look_up)
            if request is not None:
                requests[index] = request
        drafts = plan_drafts(
            requests,
            sequences=size,
            num_prefill_rows=num_prefill_rows,
            node_budget=self._config.max_rows - size - num_prefill_rows,
            cost=self._cost,
            num_prefilling=num_prefilling,
            row_cost_factor=row_cost_factor,
        )
        if any(not 0 <= token < self._vocab_size for draft in drafts.values() for token in draft.tokens):
            raise ValueError("a draft holds a token outside the vocabulary")
        return DraftPlan(requests, drafts, row_cost_factor)

    def _draft_request(self, sequence: Sequence, look_up: bool) -> DraftRequest | None:
        """None when there is nothing to draft from or no use for it."""
        grammar = sequence.request.grammar
        if grammar is not None and sequence.request.plan.tree is None and sequence.speculation.enabled:
            return self._guided_request(sequence, grammar, look_up)
        if sequence.proposals is None and (sequence.lookup is None or not look_up):
            return None
        # A runner has room for paths of MAX_DEPTH candidates, whatever drafts them.
        plan, longest = sequence.request.plan, min(sequence.remaining - 1, MAX_DEPTH)
        lookup = self._look_up(sequence) if look_up and longest > 0 else None
        if longest <= 0 or (sequence.proposals is None and lookup is None):
            return None
        return DraftRequest(
            proposals=sequence.proposals,
            max_nodes=len(plan.tree) if plan.tree is not None else plan.max_nodes,
            max_depth=min(plan.num_heads, longest),
            trust=sequence.speculation.trust,
            tree=plan.tree,
            lookup=lookup,
            longest=longest,
        )

    def _guided_request(self, sequence: Sequence, grammar: TokenGrammar, look_up: bool) -> DraftRequest | None:
        """What is guessed and looked up, as the sequence's grammar allows it, and what that forces."""
        plan, longest = sequence.request.plan, min(sequence.remaining - 1, MAX_DEPTH)
        outlook = grammar.outlook()
        if outlook is None or longest <= 0:
            return None
        proposals = guided(sequence.proposals, outlook, trust=sequence.speculation.trust, longest=longest)
        lookup = self._look_up(sequence) if look_up else None
        if lookup is not None and not outlook.allows(lookup.tokens[0]):
            lookup = None
        if proposals is None and lookup is None:
            return None
        return DraftRequest(
            proposals=proposals,
            max_nodes=plan.max_nodes,
            max_depth=longest if proposals is not None else min(plan.num_heads, longest),
            lookup=lookup,
            longest=longest,
        )

    def _look_up(self, sequence: Sequence) -> Continuation | None:
        """What followed the same tokens before. An index that fails is given up."""
        if sequence.lookup is None:
            return None
        with self._optional.lookup:
            return sequence.lookup.find()
        sequence.lookup = None
        return None

    def _propose(
        self, plan: StepPlan, outcomes: SequenceOf[Outcome], hidden: torch.Tensor, num_prefilling: int
    ) -> list[Proposals]:
        """Run the heads where the next step may use them."""
        going_on = [outcome for outcome in outcomes if outcome.scheduled.sequence.finish_reason is None]
        # Prompts being read are sequences of the steps to come.
        asking = self._asking(going_on, len(going_on) + num_prefilling)
        if not asking or self._heads is None:
            return []
        sequences = [outcome.scheduled.sequence for outcome in asking]
        trees = [sequence.request.plan.tree for sequence in sequences]
        ranks = max(max(tree.ranks_per_depth, default=0) if tree else 0 for tree in trees)
        needed = min_survival(
            self._cost,
            sequences=len(going_on),
            rows=plan.batch.rows,
            tokens=len(plan.scheduled) + sum(item.draft.expected for item in plan.scheduled),
            row_cost_factor=self._accounting.calibration.row_cost_factor(len(going_on)),
            num_heads=self._heads.num_heads,
        )
        proposals = self._heads.propose(
            ProposalRequest(
                hidden=hidden,
                contexts=[sequence.tokens for sequence in sequences],
                k=max(self._config.proposals, ranks),
                trees=trees,
                rows=[outcome.scheduled.first_row + outcome.result.rows[-1] for outcome in asking],
                least=needed,
            )
        )
        for sequence, found in zip(sequences, proposals, strict=True):
            sequence.proposals = found
        return proposals

    def _asking(self, going_on: list[Outcome], batch: int) -> list[Outcome]:
        """For whom the heads are to guess in a batch of this many sequences, and why not for the others.

        A tree that the plan itself asks for is always used, and a probe always asks.
        """
        _say_unasked(going_on, Why.NOTHING if self._heads is None else Why.PAUSED)
        asking = []
        for outcome in going_on:
            sequence = outcome.scheduled.sequence
            if sequence.speculation.wants_proposals and sequence.remaining > 1:
                asking.append(outcome)
        gate = self._accounting.gate
        if self._heads is not None and asking and not gate.allows(batch):
            _say_unasked(asking, Why.REFERENCE if gate.is_open(batch) else Why.GATE, gate.speedup(batch))
            asking = [outcome for outcome in asking if _asks_always(outcome.scheduled.sequence)]
        return asking


def _asks_always(sequence: Sequence) -> bool:
    return sequence.request.plan.tree is not None or sequence.request.plan.probe


def _forget_proposals(sequences: Iterable[Sequence]) -> None:
    for sequence in sequences:
        sequence.proposals, sequence.undrafted.unasked = None, Why.FAILED


def _say_unasked(outcomes: Iterable[Outcome], why: str, gate_speedup: float = 0.0) -> None:
    for outcome in outcomes:
        record = outcome.scheduled.sequence.undrafted
        record.unasked, record.gate_speedup = why, gate_speedup
