"""What steps cost and gain: compared with the cost table, counted for reports and statistics."""

from __future__ import annotations

from collections import deque

from backends.cost.calibration import Calibration
from backends.cost.step_cost import StepCost
from backends.engine.counters import CounterBook, SequenceStep, StepTimes
from backends.engine.optional_parts import OptionalParts
from backends.engine.step_plan import Outcome, StepPlan, StepPrice, decoded
from backends.speculation.tree_builder import GRAMMAR
from backends.types import StepSample

_MOST_SAMPLES = 4096


class StepAccounting:
    """Owns what is learned from steps: :class:`Calibration` of the cost table, counters and samples; and keeps each
    sequence's counts. No answer hangs on it: each public method ends quietly when something in it fails
    (:class:`OptionalParts`).
    """

    def __init__(self, cost: StepCost, calibration: Calibration, optional: OptionalParts) -> None:
        self.calibration = calibration
        self.counters = CounterBook()
        self.samples: deque[StepSample] = deque(maxlen=_MOST_SAMPLES)
        self.cost, self._optional = cost, optional

    def use_cost(self, cost: StepCost) -> None:
        self.cost = cost

    def price(self, num_decoding: int, num_nodes: int, num_prefill_rows: int, offers_ms: float) -> StepPrice:
        """What a step costs by the table in which ``num_decoding`` sequences decode, with ``num_nodes`` candidates
        altogether, for which the drafters took ``offers_ms``."""
        with self._optional.counting:
            vanilla_ms = self.cost.decode_ms(num_decoding, 0, num_prefill_rows)
            if not num_nodes:
                return StepPrice(vanilla_ms + offers_ms, vanilla_ms)
            return StepPrice(self.cost.decode_ms(num_decoding, num_nodes, num_prefill_rows) + offers_ms, vanilla_ms)
        return StepPrice()

    def count(self, plan: StepPlan, outcomes: list[Outcome], offers_ms: float, began: float, ended: float) -> None:
        """Calibrate and count, after a step from ``began`` to ``ended`` (seconds) at whose end the drafters have
        guessed for the next one, which costs ``offers_ms`` by the table."""
        with self._optional.counting:
            _trace(plan, outcomes, (ended - began) * 1e3)
            self._count(plan, decoded(outcomes), offers_ms, began, ended)

    def _count(self, plan: StepPlan, outcomes: list[Outcome], offers_ms: float, began: float, ended: float) -> None:
        """A sequence bears its share of a vanilla step, and of the rest what its own drafts cost."""
        price, size = plan.price, len(outcomes)
        measured_ms = (ended - began) * 1e3
        with_drafts = price.planned_ms > price.vanilla_ms
        spent_ms = price.planned_ms * self.calibration.factor(size) if with_drafts else price.planned_ms
        forward_ms = self.cost.forward_ms(plan.num_rows)
        table_ms = forward_ms + offers_ms
        self._calibrate(plan, size, offers_ms, table_ms, measured_ms)
        # Beside prompts, the rest of the time went into them.
        decoding_ms = measured_ms
        if plan.prefill_chunks:
            decoding_ms *= min(price.planned_ms / table_ms, 1.0)
        drafting_ms = spent_ms - price.vanilla_ms
        total = sum([outcome.scheduled.drafting_weight for outcome in outcomes]) if drafting_ms else 0
        times = StepTimes(price.vanilla_ms, spent_ms, decoding_ms, size)
        for outcome in outcomes:
            item = outcome.scheduled
            request = item.sequence.request
            step = SequenceStep(
                outcome.emitted,
                num_drafted=len(item.draft.tokens),
                num_drafted_of_grammar=0 if request.grammar is None else item.draft.sources.count(GRAMMAR),
                accepted_by=outcome.accepted_by,
                proposals=item.proposals,
                drafting_ms=drafting_ms * item.drafting_weight / total if total else drafting_ms / size,
            )
            item.sequence.counts.add(step, times)
            self.counters.add_step(request.stats_key, step, times, control=request.plan.method == "vanilla")
        kind = "prefill" if plan.prefill_chunks else "verification" if plan.num_nodes else "vanilla"
        without_ms = self.cost.forward_ms(plan.num_rows - plan.num_nodes) if plan.num_nodes else forward_ms
        self.samples.append(StepSample(kind, plan.num_rows, ended - began, without_ms / 1e3))

    def _calibrate(self, plan: StepPlan, size: int, offers_ms: float, table_ms: float, measured_ms: float) -> None:
        """Compare table and clock where the step is of one kind: all decode, with candidates or without heads.

        The clock has seen the heads of this step, whose guesses are for the next.
        """
        if size and size == len(plan.scheduled) and (plan.num_nodes or not offers_ms) and plan.is_typical:
            self.calibration.observe(
                size,
                drafting=plan.num_nodes > 0,
                predicted_ms=table_ms,
                measured_ms=measured_ms,
                vanilla_ms=plan.price.vanilla_ms,
            )


def _trace(plan: StepPlan, outcomes: list[Outcome], ms: float) -> None:
    """Tell the sequences that are traced of the step."""
    for outcome in outcomes:
        item = outcome.scheduled
        if (tracer := item.sequence.tracer) is None or not outcome.emitted:
            continue
        prompt_rows = sum(chunk.num_tokens for chunk in plan.prefill_chunks if chunk.sequence is item.sequence)
        tracer.note_step(outcome.emitted, outcome.result.rows, item.draft, prompt_rows, ms)
