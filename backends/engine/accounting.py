"""What steps cost and gain: judged for the drafts of the next steps, counted for reports and statistics."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as SequenceOf

from backends.cost.calibration import Calibration
from backends.cost.step_cost import StepCost
from backends.engine.counters import CounterBook, SequenceStep, StepTimes
from backends.engine.optional_parts import OptionalParts
from backends.engine.step_plan import Outcome, ScheduledSequence, StepPlan, StepPrice
from backends.runners.base import HeadsRunner, Proposals
from backends.speculation.batch_gate import DraftGate
from backends.types import StepSample

_MOST_SAMPLES = 4096


class StepAccounting:
    """Owns what is learned from steps: :class:`Calibration` of the cost table, the :class:`DraftGate` of batch sizes,
    counters and samples; and keeps each sequence's record of its drafts. No answer hangs on it: each public method ends
    quietly when something in it fails (:class:`OptionalParts`).
    """

    def __init__(
        self,
        cost: StepCost,
        heads: HeadsRunner | None,
        gate: DraftGate,
        calibration: Calibration,
        optional: OptionalParts,
    ) -> None:
        self.gate, self.calibration = gate, calibration
        self.counters = CounterBook()
        self.samples: deque[StepSample] = deque(maxlen=_MOST_SAMPLES)
        self._cost, self._optional = cost, optional
        self._num_heads = 0 if heads is None else heads.num_heads

    def price(
        self, scheduled: SequenceOf[ScheduledSequence], num_decoding: int, num_nodes: int, num_prefill_rows: int
    ) -> StepPrice:
        """What a step of these sequences costs by the table. ``num_decoding`` of them decode, with ``num_nodes``
        candidates altogether."""
        with self._optional.counting:
            return self._price(scheduled, num_decoding, num_nodes, num_prefill_rows)
        return StepPrice()

    def judge(self, plan: StepPlan, outcomes: SequenceOf[Outcome]) -> None:
        """What this step says about drafting in the next: for each sequence, and for batches of this size."""
        with self._optional.judging:
            self._judge(plan, _decoded(outcomes))

    def count(
        self, plan: StepPlan, outcomes: SequenceOf[Outcome], proposals: list[Proposals], began: float, ended: float
    ) -> None:
        """Calibrate and count, after a step from ``began`` to ``ended`` (seconds) at whose end the heads have made
        ``proposals`` for the next one."""
        with self._optional.counting:
            self._count(plan, _decoded(outcomes), self._heads_ms(proposals), began, ended)

    def _price(
        self, scheduled: SequenceOf[ScheduledSequence], num_decoding: int, num_nodes: int, num_prefill_rows: int
    ) -> StepPrice:
        heads_ms = self._heads_ms([item.proposals for item in scheduled if item.proposals is not None])
        vanilla_ms = self._cost.decode_ms(num_decoding, 0, num_prefill_rows)
        if not num_nodes:
            return StepPrice(vanilla_ms + heads_ms, vanilla_ms, vanilla_ms + heads_ms)
        planned_ms = self._cost.decode_ms(num_decoding, num_nodes, num_prefill_rows) + heads_ms
        looked_up = sum([len(item.draft.from_lookup) + len(item.draft.from_grammar) for item in scheduled])
        if not looked_up:
            return StepPrice(planned_ms, vanilla_ms, heads_only_ms=planned_ms)
        heads_only_ms = self._cost.decode_ms(num_decoding, num_nodes - looked_up, num_prefill_rows) + heads_ms
        return StepPrice(planned_ms, vanilla_ms, heads_only_ms)

    def _heads_ms(self, proposals: list[Proposals]) -> float:
        """What the heads that made these cost by the table."""
        if not proposals or not self._num_heads:
            return 0.0
        levels = max(self._num_heads if found.levels is None else found.levels for found in proposals)
        return self._cost.levels_ms(sum(found.lists for found in proposals), levels, self._num_heads)

    def _judge(self, plan: StepPlan, decoded: list[Outcome]) -> None:
        step_ms = plan.price.heads_only_ms * self.calibration.factor(len(decoded))
        vanilla_ms = plan.price.vanilla_ms
        if any(outcome.scheduled.proposals is not None for outcome in decoded) and plan.is_typical:
            accepted = sum(outcome.accepted_of_heads for outcome in decoded)
            self.gate.observe(len(decoded), accepted=accepted, vanilla_ms=vanilla_ms, step_ms=step_ms)
        for outcome in decoded:
            item, sequence = outcome.scheduled, outcome.scheduled.sequence
            if item.lookup is not None and sequence.lookup is not None:
                sequence.lookup.observe(item.lookup, outcome.emitted)
            if item.proposals is None:
                sequence.speculation.rest()
            elif sequence.request.plan.tree is None:
                sequence.speculation.observe(
                    expected=item.draft.expected_of_heads,
                    accepted=outcome.accepted_of_heads,
                    vanilla_ms=vanilla_ms,
                    step_ms=step_ms,
                )

    def _count(self, plan: StepPlan, decoded: list[Outcome], heads_ms: float, began: float, ended: float) -> None:
        """A sequence bears its share of a vanilla step, and of the rest what its own drafts cost.

        ``heads_ms``: what the heads that have run in this step cost by the table.
        """
        price, size = plan.price, len(decoded)
        measured_ms = (ended - began) * 1e3
        with_drafts = price.planned_ms > price.vanilla_ms
        spent_ms = price.planned_ms * self.calibration.factor(size) if with_drafts else price.planned_ms
        forward_ms = self._cost.forward_ms(plan.batch.rows)
        table_ms = forward_ms + heads_ms
        self._calibrate(plan, size, heads_ms, table_ms, measured_ms)
        # Beside prompts, the rest of the time went into them.
        decoding_ms = measured_ms
        if plan.prefill_chunks:
            decoding_ms *= min(price.planned_ms / table_ms, 1.0)
        drafting_ms = spent_ms - price.vanilla_ms
        # How much of the drafting a sequence has caused: its candidates; 1 where the heads ran for none.
        scheduled = [outcome.scheduled for outcome in decoded]
        weights = [len(item.draft.tokens) or int(item.proposals is not None) for item in scheduled]
        total = sum(weights)
        times = StepTimes(price.vanilla_ms, spent_ms, decoding_ms, size)
        for outcome, item, weight in zip(decoded, scheduled, weights, strict=True):
            request, emitted = item.sequence.request, outcome.emitted
            step = SequenceStep(
                emitted,
                num_drafted=len(item.draft.tokens),
                num_accepted_of_lookup=len(emitted) - 1 - outcome.accepted_of_heads - outcome.accepted_of_grammar,
                num_drafted_of_grammar=len(item.draft.from_grammar),
                num_accepted_of_grammar=outcome.accepted_of_grammar,
                proposals=item.proposals,
                drafting_ms=drafting_ms * weight / total if total else drafting_ms / size,
            )
            item.sequence.counts.add(step, times)
            self.counters.add_step(request.stats_key, step, times, control=request.plan.method == "vanilla")
        kind = "prefill" if plan.prefill_chunks else "verification" if plan.num_nodes else "vanilla"
        without_ms = self._cost.forward_ms(plan.batch.rows - plan.num_nodes) if plan.num_nodes else forward_ms
        self.samples.append(StepSample(kind, plan.batch.rows, ended - began, without_ms / 1e3))

    def _calibrate(self, plan: StepPlan, size: int, heads_ms: float, table_ms: float, measured_ms: float) -> None:
        """Compare table and clock where the step is of one kind: all decode, with candidates or without heads.

        The clock has seen the heads of this step, whose guesses are for the next.
        """
        if size and size == len(plan.scheduled) and (plan.num_nodes or not heads_ms) and plan.is_typical:
            self.calibration.observe(
                size,
                drafting=plan.num_nodes > 0,
                predicted_ms=table_ms,
                measured_ms=measured_ms,
                vanilla_ms=plan.price.vanilla_ms,
            )


def _decoded(outcomes: SequenceOf[Outcome]) -> list[Outcome]:
    """Those of decoding sequences; a first token, which comes out of the prompt, is no word on drafts."""
    return [outcome for outcome in outcomes if outcome.scheduled.is_decoding and outcome.emitted]
