"""What one step is to run, and what came of it: the words in which the engine's parts talk about a step."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import NamedTuple

from backends.engine.sequence import Sequence
from backends.runners.base import Proposals
from backends.runners.batch import BatchBuilder
from backends.runners.native.rows import NativeRows
from backends.speculation.tree_builder import HEADS, Offer
from backends.speculation.verify import AcceptResult, VerifyRequest


@dataclass(slots=True, kw_only=True)
class ScheduledSequence(VerifyRequest):
    """A sequence from which this step draws tokens: it decodes, or its prompt ends in this step.

    ``first_row``: of the step's outputs [O], the root's; node i of ``draft`` is i + 1 rows behind it. An empty draft: a
    vanilla step for this sequence.
    """

    sequence: Sequence
    # Slots of the KV pool where the nodes' keys and values are put until they are accepted, one for each node.
    node_slots: SequenceOf[int]
    # False: the last chunk of its prompt, whose last row gives the first token of the answer.
    is_decoding: bool
    # The guesses at hand when the draft was planned, by drafter; without an entry: it had none, or was not asked.
    offers: Mapping[str, Offer]

    @property
    def proposals(self) -> Proposals | None:
        """The heads' guesses."""
        found = self.offers.get(HEADS)
        return found if isinstance(found, Proposals) else None

    @property
    def drafting_weight(self) -> int:
        """How much of a step's drafting it has caused: its candidates; 1 where the heads ran for none."""
        return len(self.draft.tokens) or int(HEADS in self.offers)


class PrefillChunk(NamedTuple):
    """The next piece of a prompt."""

    sequence: Sequence
    # Prompt tokens in it, one row each; they follow the sequence's ``num_computed_tokens``.
    num_tokens: int

    @property
    def num_scored(self) -> int:
        """How many of its rows tell how likely the next token of the prompt is, where that is wanted."""
        sequence = self.sequence
        # One that has generated and reads its prompt again after a preemption was scored before.
        if not sequence.request.sampling.prompt_logprobs or sequence.num_generated:
            return 0
        return min(self.num_tokens, sequence.prompt_length - 1 - sequence.num_computed_tokens)


class StepPrice(NamedTuple):
    """What decoding costs in a step by the cost table (:meth:`backends.cost.step_cost.StepCost.decode_ms`), in
    milliseconds; rows of prompts bear their own share. All 0 where counting has failed."""

    # As planned: the candidates, and the drafters that guessed them.
    planned_ms: float = 0.0
    # The same sequences without candidates and drafters.
    vanilla_ms: float = 0.0


class StepPlan(NamedTuple):
    """One step, as :class:`backends.engine.scheduler.Scheduler` has planned it; not changed from then on."""

    # Sequences that get tokens: first the decoding ones, then those whose prompt ends, in the order of their outputs.
    scheduled: list[ScheduledSequence]
    # Prompts that are read on, whether they end in this step or not.
    prefill_chunks: list[PrefillChunk]
    # All rows of the step, ready to be packed for the runner.
    batch: BatchBuilder | NativeRows
    # Rows of the batch altogether; of decoding sequences, one each; and of candidate nodes. The others are prompts'.
    num_rows: int
    num_decoding: int
    num_nodes: int
    # Prompts that are not read to their end by this step: their sequences decode in steps to come.
    num_prefilling: int
    # Whose prompts are scored, by how many rows: the outputs behind those of ``scheduled``.
    scored: list[tuple[Sequence, int]]
    price: StepPrice

    @property
    def sequences(self) -> list[Sequence]:
        """Whose rows are in the step; one whose prompt ends stands in it twice."""
        return [*(item.sequence for item in self.scheduled), *(chunk.sequence for chunk in self.prefill_chunks)]

    @property
    def is_typical(self) -> bool:
        """Whether the step says anything about planned drafts. Beside prompts a node costs what it costs in a larger
        batch; and a tree that somebody asked for says nothing about trees that the planner chooses."""
        if self.prefill_chunks:
            return False
        return all(item.sequence.request.plan.tree is None for item in self.scheduled)

    @property
    def num_prefill_rows(self) -> int:
        return self.num_rows - self.num_decoding - self.num_nodes


@dataclass(slots=True)
class Outcome:
    """What a step has brought to one scheduled sequence."""

    scheduled: ScheduledSequence
    result: AcceptResult
    # Tokens added to the answer: those of ``result`` up to the first that ended it.
    emitted: list[int] = field(default_factory=list)
    # How many of them are candidates, by who guessed them.
    accepted_by: dict[str, int] = field(default_factory=dict)


def decoded(outcomes: list[Outcome]) -> list[Outcome]:
    """Those of decoding sequences; a first token, which comes out of the prompt, is no word on drafts."""
    return [outcome for outcome in outcomes if outcome.scheduled.is_decoding and outcome.emitted]
