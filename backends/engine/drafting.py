"""Candidates of a step: what the drafters have offered at the end of the step before, joined in trees. Verified tokens
don't hang on them: what fails here leaves a step without candidates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import torch

from backends.cost.calibration import Calibration
from backends.cost.step_cost import StepCost
from backends.engine.config import EngineConfig
from backends.engine.drafters import Drafter, DraftingCall, say_unasked
from backends.engine.optional_parts import OptionalPart, OptionalParts
from backends.engine.sequence import Sequence
from backends.engine.step_plan import Outcome, StepPlan, decoded
from backends.speculation.guided import guided
from backends.speculation.native_planner import planner_here
from backends.speculation.tree_builder import NO_OFFERS, Chain, Draft, DraftRequest, Offer, plan_drafts
from backends.speculation.undrafted import Why
from backends.tree import MAX_DEPTH

# Shared by all that draft nothing: a draft is not changed once it is planned.
NO_DRAFT = Draft()


class DraftPlan(NamedTuple):
    """The candidates of a step, by index of the decoding sequence."""

    # What each sequence might have drafted; without an entry: nothing to draft from, or no use for it.
    requests: Mapping[int, DraftRequest]
    # What it does draft; without an entry: nothing.
    drafts: Mapping[int, Draft]
    # Measured time of one more row / what the cost table says of it.
    row_cost_factor: float
    # What the drafters took for the guesses by the cost table.
    offers_ms: float


_NOTHING = DraftPlan({}, {}, row_cost_factor=1.0, offers_ms=0.0)


class DraftPlanner:
    """Asks the drafters at the end of a step, and plans the candidates of all decoding sequences of the next."""

    def __init__(
        self,
        drafters: SequenceOf[tuple[Drafter, OptionalPart]],
        vocab_size: int,
        config: EngineConfig,
        cost: StepCost,
        calibration: Calibration,
        optional: OptionalParts,
    ) -> None:
        self._drafters, self._vocab_size = drafters, vocab_size
        self._config, self._cost = config, cost
        self._calibration, self._optional = calibration, optional
        self._best_first = planner_here()

    def use_cost(self, cost: StepCost) -> None:
        self._cost = cost
        for drafter, _ in self._drafters:
            drafter.use_cost(cost)

    def plan(self, decoding: SequenceOf[Sequence], *, num_prefill_rows: int, num_prefilling: int) -> DraftPlan:
        """Candidates for a step in which ``decoding`` get a row each, and prompts ``num_prefill_rows``.

        ``num_prefilling``: prompts being read, which will decode later.
        """
        drafting = {index: sequence for index, sequence in enumerate(decoding) if sequence.speculation.enabled}
        if not drafting:
            return _NOTHING
        plan = self._plan_if_possible(drafting, len(decoding), num_prefill_rows, num_prefilling)
        with self._optional.judging:
            for index, sequence in drafting.items():
                if not plan.drafts.get(index, NO_DRAFT).tokens:
                    sequence.undrafted.note_step(
                        plan.requests.get(index),
                        remaining=sequence.remaining,
                        cost=self._cost,
                        sequences=len(decoding),
                        row_cost_factor=plan.row_cost_factor,
                    )
        return plan

    def begin(self, sequence: Sequence) -> None:
        """It has been let in."""
        if sequence.speculation.enabled:
            for drafter, part in self._drafters:
                with part:
                    drafter.begin(sequence)

    def keep_up(self) -> None:
        """Once a step: what the drafters do about prompts."""
        for drafter, part in self._drafters:
            # A part that is entered and does well is forgiven its failures: so only where there is something to do.
            if drafter.is_behind:
                with part:
                    drafter.keep_up()

    def observe(self, plan: StepPlan, outcomes: list[Outcome]) -> None:
        """What this step says about drafting in the next."""
        for outcome in outcomes:
            if outcome.scheduled.sequence.speculation.enabled:
                break
        else:
            return
        of_decoding = decoded(outcomes)
        for drafter, _ in self._drafters:
            with self._optional.judging:
                drafter.observe(plan, of_decoding)

    def propose(self, plan: StepPlan, outcomes: list[Outcome], hidden: torch.Tensor) -> float:
        """Have the drafters guess for the next step, and put what they offer into the sequences; returns what that
        took by the cost table, in milliseconds.

        ``hidden`` [outputs, H]: of this step.
        """
        num_decoding, drafting = 0, []
        for outcome in outcomes:
            sequence = outcome.scheduled.sequence
            sequence.offers = NO_OFFERS
            if sequence.finish_reason is None:
                num_decoding += 1
                if sequence.speculation.enabled:
                    drafting.append(outcome)
        if not drafting:
            return 0.0
        if self._optional.planning.rests:
            say_unasked(drafting, Why.FAILED)
            return 0.0
        say_unasked(drafting, Why.NOTHING)
        call = DraftingCall(plan, hidden, [each for each in drafting if _may_draft(each)], num_decoding)
        return sum([self._ask(drafter, part, call) for drafter, part in self._drafters]) if call.outcomes else 0.0

    def _ask(self, drafter: Drafter, part: OptionalPart, call: DraftingCall) -> float:
        """Returns what it took. No offers of a drafter that fails, or failed lately."""
        if part.ready():
            with part:
                offers = drafter.propose(call)
                made = [offer for offer in offers if offer is not None]
                cost_ms = drafter.cost_ms(made) if made else 0.0
                for outcome, offer in zip(call.outcomes, offers, strict=True):
                    if offer is not None:
                        sequence = outcome.scheduled.sequence
                        sequence.offers = {**sequence.offers, drafter.name: offer}
                return cost_ms
        say_unasked(call.outcomes, Why.FAILED)
        return 0.0

    def _plan_if_possible(
        self, drafting: dict[int, Sequence], num_decoding: int, num_prefill_rows: int, num_prefilling: int
    ) -> DraftPlan:
        """No candidates when planning fails or failed lately."""
        if self._optional.planning.ready():
            with self._optional.planning:
                return self._plan(drafting, num_decoding, num_prefill_rows, num_prefilling)
        for sequence in drafting.values():
            sequence.offers, sequence.undrafted.unasked = NO_OFFERS, Why.FAILED
        return _NOTHING

    def _plan(
        self, drafting: dict[int, Sequence], num_decoding: int, num_prefill_rows: int, num_prefilling: int
    ) -> DraftPlan:
        requests = {}
        for index, sequence in drafting.items():
            request = _draft_request(sequence)
            if request is not None:
                requests[index] = request
        row_cost_factor = self._calibration.row_cost_factor(num_decoding)
        drafts = plan_drafts(
            requests,
            sequences=num_decoding,
            num_prefill_rows=num_prefill_rows,
            node_budget=self._config.max_rows - num_decoding - num_prefill_rows,
            cost=self._cost,
            num_prefilling=num_prefilling,
            row_cost_factor=row_cost_factor,
            best_first=self._best_first,
        )
        for draft in drafts.values():
            if draft.tokens and not 0 <= min(draft.tokens) <= max(draft.tokens) < self._vocab_size:
                raise ValueError("a draft holds a token outside the vocabulary")
        return DraftPlan(requests, drafts, row_cost_factor, self._offers_ms(drafting.values()))

    def _offers_ms(self, sequences: Iterable[Sequence]) -> float:
        made: dict[str, list[Offer]] = {}
        for sequence in sequences:
            for name, offer in sequence.offers.items():
                made.setdefault(name, []).append(offer)
        return sum([drafter.cost_ms(made[drafter.name]) for drafter, _ in self._drafters if drafter.name in made])


def _may_draft(outcome: Outcome) -> bool:
    """The last token of an answer needs no candidate."""
    return outcome.scheduled.sequence.remaining > 1


def _draft_request(sequence: Sequence) -> DraftRequest | None:
    """None when there is nothing to draft from or no use for it."""
    # A runner has room for paths of MAX_DEPTH candidates, whoever guesses them.
    plan, longest = sequence.request.plan, min(sequence.remaining - 1, MAX_DEPTH)
    proposals, chains = None, {}
    for name, offer in sequence.offers.items():
        if isinstance(offer, Chain):
            chains[name] = offer
        else:
            proposals = offer
    trust, max_depth = sequence.speculation.trust, min(plan.num_heads, longest)
    grammar = sequence.request.grammar
    if grammar is not None and plan.tree is None and longest > 0 and (outlook := grammar.outlook()) is not None:
        proposals = guided(proposals, outlook, trust=trust, heads_depth=max_depth, longest=longest)
        chains = {name: chain for name, chain in chains.items() if outlook.allows(chain.tokens[0])}
        # Its lists are as long as they may be, and trusted as far as they are.
        trust, max_depth = 1.0, longest
    if longest <= 0 or (proposals is None and (not chains or plan.tree is not None)):
        return None
    return DraftRequest(
        proposals=proposals,
        max_nodes=len(plan.tree) if plan.tree is not None else plan.max_nodes,
        max_depth=max_depth,
        trust=trust,
        tree=plan.tree,
        chains=chains,
        longest=longest,
    )
