"""What one step is to run, and what came of it: the words in which the engine's parts talk about a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from backends.engine.sequence import Sequence
from backends.runners.base import Proposals
from backends.runners.batch import BatchBuilder
from backends.speculation.prompt_lookup import Continuation
from backends.speculation.tree_builder import Draft
from backends.speculation.verify import AcceptResult


@dataclass(slots=True)
class ScheduledSequence:
    """A sequence from which this step draws tokens: it decodes, or its prompt ends in this step."""

    sequence: Sequence
    # Candidate nodes that are verified; empty: a vanilla step for this sequence.
    draft: Draft
    # Row of the step's outputs [O] that is the root's; node i of the draft is i + 1 rows behind it.
    first_row: int
    # Slots of the KV pool where the nodes' keys and values are put until they are accepted, one for each node.
    node_slots: list[int]
    # False: the last chunk of its prompt, whose last row gives the first token of the answer.
    is_decoding: bool
    # The heads' guesses at hand when the draft was planned; None: the heads were not asked.
    proposals: Proposals | None = None
    # What the text's own repetition offered to the draft; None: nothing, or it was not looked up.
    lookup: Continuation | None = None


class PrefillChunk(NamedTuple):
    """The next piece of a prompt."""

    sequence: Sequence
    # Prompt tokens in it, one row each; they follow the sequence's ``num_computed_tokens``.
    num_tokens: int


class StepPrice(NamedTuple):
    """What decoding costs in a step by the cost table (:meth:`backends.cost.step_cost.StepCost.decode_ms`), in
    milliseconds; rows of prompts bear their own share. All 0 where counting has failed."""

    # As planned: the candidates, and the heads that guessed them.
    planned_ms: float = 0.0
    # The same sequences without candidates and heads.
    vanilla_ms: float = 0.0
    # With the heads and their candidates, without the looked-up ones.
    heads_only_ms: float = 0.0


class StepPlan(NamedTuple):
    """One step, as :class:`backends.engine.scheduler.Scheduler` has planned it; not changed from then on."""

    # Sequences that get tokens: first the decoding ones, then those whose prompt ends, in the order of their outputs.
    scheduled: list[ScheduledSequence]
    # Prompts that are read on, whether they end in this step or not.
    prefill_chunks: list[PrefillChunk]
    # All rows of the step, ready to be packed for the runner.
    batch: BatchBuilder
    # Rows of the batch that are candidate nodes.
    num_nodes: int
    price: StepPrice

    @property
    def sequences(self) -> list[Sequence]:
        """Whose rows are in the step; one whose prompt ends stands in it twice."""
        return [*(item.sequence for item in self.scheduled), *(chunk.sequence for chunk in self.prefill_chunks)]

    @property
    def is_typical(self) -> bool:
        """Whether the step says anything about planned drafts. Beside prompts a node costs what it costs in a larger
        batch; and a tree that somebody asked for says nothing about trees that the planner chooses."""
        return not self.prefill_chunks and all(item.sequence.request.plan.tree is None for item in self.scheduled)


@dataclass(slots=True)
class Outcome:
    """What a step has brought to one scheduled sequence."""

    scheduled: ScheduledSequence
    result: AcceptResult
    # Tokens added to the answer: those of ``result`` up to the first that ended it.
    emitted: list[int] = field(default_factory=list)
    # How many of them are candidates that the heads had guessed.
    accepted_of_heads: int = 0
    # How many of them are candidates that the grammar had forced.
    accepted_of_grammar: int = 0
