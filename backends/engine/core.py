"""The continuously batched loop, one step at a time; single-threaded, driven by :mod:`backends.engine.thread`."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import torch

from backends.cost.calibration import Calibration
from backends.cost.device_cost import StepTable
from backends.cost.step_cost import StepCost
from backends.engine.accounting import StepAccounting
from backends.engine.config import EngineConfig
from backends.engine.drafters import Drafter, HeadsDrafter, LookupDrafter
from backends.engine.drafting import DraftPlanner
from backends.engine.masks_ahead import MasksAhead
from backends.engine.optional_parts import OptionalParts
from backends.engine.prefix_chain import chain_root
from backends.engine.scheduler import Scheduler
from backends.engine.sequence import Sequence, SequenceStatus
from backends.engine.step_plan import Outcome, StepPlan
from backends.models.tokenizer import HfTokenizer
from backends.runners.base import HeadsRunner, ModelRunner
from backends.speculation.batch_gate import DraftGate
from backends.speculation.verify import verify
from backends.types import (
    ENGINE_FAILED,
    GRAMMAR_STUCK,
    NOT_FINITE,
    EngineLoad,
    FinishReason,
    GenerationRequest,
    RequestRefused,
    TokenChunk,
)

log = logging.getLogger(__name__)

# Rows of prompts whose logits are there at a time.
_SCORED_AT_ONCE = 32

Emission = tuple[str, TokenChunk]
# Called for every emitted token with request id, its absolute position, the token, and the logits [V] it came from.
Observer = Callable[[str, int, int, torch.Tensor], None]


class _Running(NamedTuple):
    """A launched step: its hidden states [outputs, H], and when it began (seconds)."""

    plan: StepPlan
    hidden: torch.Tensor
    began: float


class _Untold(NamedTuple):
    """What :meth:`StepAccounting.count` is told of a collected step."""

    plan: StepPlan
    outcomes: list[Outcome]
    offers_ms: float
    began: float
    ended: float


class EngineCore:
    """Runs what the :class:`Scheduler` plans and turns it into answers. Every method is called from one thread."""

    def __init__(
        self,
        runner: ModelRunner,
        heads: HeadsRunner | None,
        tokenizer: HfTokenizer,
        config: EngineConfig,
        cost: StepCost,
        clock: Callable[[], float],
        observer: Observer | None = None,
        gate: DraftGate | None = None,
        calibration: Calibration | None = None,
        drafters: SequenceOf[Drafter] = (),
        steps: StepTable | None = None,
    ) -> None:
        """``drafters``: who guesses beside heads and prompt lookup. ``steps``: what steps cost by context too; then
        ``cost`` is that of the first one only."""
        self.runner, self.heads, self.tokenizer = runner, heads, tokenizer
        self.config, self.cost = config, cost
        self._clock, self._observer, self._steps = clock, observer, steps
        self.optional = OptionalParts(clock)
        self.gate, calibration = gate or DraftGate(cost), calibration or Calibration()
        self.accounting = StepAccounting(cost, calibration, self.optional)
        all_drafters: list[Drafter] = [LookupDrafter(cost, calibration), *drafters]
        if heads is not None:
            all_drafters.insert(0, HeadsDrafter(heads, config, cost, self.gate, calibration))
        self.drafting = DraftPlanner(
            [(drafter, self.optional.of_drafter(drafter.name)) for drafter in all_drafters],
            runner.vocab_size,
            config,
            cost,
            calibration,
            self.optional,
        )
        self.scheduler = Scheduler(config, runner.num_pages, self.drafting, self.accounting, self.optional)
        self._masks = MasksAhead()
        # The present or last step; None while it is not planned.
        self._plan: StepPlan | None = None
        # The step whose rows a device works on, and the one whose outcomes are in the sequences but not told.
        self._running: _Running | None = None
        self._untold: _Untold | None = None
        # What is to be told outlives a step that breaks: it is kept here until it is taken.
        self._outbox: list[Emission] = []

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def in_step(self) -> list[str]:
        """Whose rows are in the present or last step."""
        return list(dict.fromkeys(sequence.id for sequence in self._sequences_in_step()))

    def load(self) -> EngineLoad:
        return self.scheduler.load(self._clock())

    def use_cost(self, cost: StepCost) -> None:
        """Decide by a better table from now on."""
        self.cost = cost
        self.accounting.use_cost(cost)
        self.drafting.use_cost(cost)

    def add(self, request: GenerationRequest) -> None:
        """Queue a request. Raises :class:`RequestRefused` for one that can never run; the gateway does so before."""
        longest = len(request.prompt_token_ids) + request.sampling.max_tokens
        if not request.prompt_token_ids:
            raise RequestRefused("the prompt has no tokens")
        if request.sampling.max_tokens < 1:
            raise RequestRefused("max_tokens must be at least 1")
        vocabulary = self.runner.vocab_size
        for name, ids in (
            ("prompt_token_ids", request.prompt_token_ids),
            ("stop_token_ids", request.sampling.stop_token_ids),
            ("logit_bias", request.sampling.logit_bias),
        ):
            if any(not 0 <= token_id < vocabulary for token_id in ids):
                raise RequestRefused(f"{name} holds a token id outside the vocabulary of {vocabulary}")
        if not self.scheduler.fits(longest):
            raise RequestRefused(
                f"{longest} tokens of prompt and answer don't fit the context of {self.config.max_model_len}"
            )
        if self.scheduler.holds(request.request_id):
            raise RequestRefused(f"request id {request.request_id!r} is already in use")
        eos = self.config.eos_token_ids
        self.scheduler.add(Sequence(request, self.tokenizer, eos, self._clock(), self._chain_root(request)))

    def abort(self, request_id: str) -> None:
        """Forget a request and free its pages at once; unknown ids are no error."""
        self.scheduler.remove(request_id)

    def step(self) -> list[Emission]:
        """Run the rows of one step, take in what they brought, and tell it.

        A device that runs ahead gets the rows of the next step before texts are made of this one's, so that it does not
        wait for them. Raises what broke the step as a whole; :meth:`fail_step` then says what is to be told all the
        same.
        """
        if self._running is None:
            self._launch()
        self._collect()
        if self.runner.runs_ahead:
            self._launch()
        self._tell()
        return self._take_outbox()

    def _launch(self) -> None:
        """Schedule, and run one packed forward."""
        if self._steps is not None and (cost := self._steps.at(self.scheduler.mean_context)) is not self.cost:
            self.use_cost(cost)
        plan = self._schedule()
        if plan.num_rows:
            began = self._clock()
            self._running = _Running(plan, self._run(plan), began)

    def _collect(self) -> None:
        """Of the step that runs: verify, commit, and propose drafts for the next."""
        running, self._running = self._running, None
        if running is None or not running.plan.scheduled:
            return
        plan, hidden, began = running
        outcomes = self._verify(plan, hidden)
        self._commit(outcomes)
        if not self.runner.runs_ahead:
            self.drafting.observe(plan, outcomes)
        offers_ms = self.drafting.propose(plan, outcomes, hidden)
        self._untold = _Untold(plan, outcomes, offers_ms, began, self._mark_time(outcomes))
        for outcome in outcomes:
            if outcome.scheduled.sequence.finish_reason is not None:
                self.scheduler.remove(outcome.scheduled.sequence.id)

    def _tell(self) -> None:
        """Account for the step that was collected, and emit its texts.

        Behind a launch drafters learn of it here too: what they offer may be a step behind what they know.
        """
        if self._untold is not None:
            if self.runner.runs_ahead:
                self.drafting.observe(self._untold.plan, self._untold.outcomes)
            self.accounting.count(*self._untold)
            self._emit_untold()

    def _emit_untold(self) -> None:
        for outcome in self._untold.outcomes if self._untold is not None else ():
            if not outcome.scheduled.sequence.told:
                self._emit(outcome.scheduled.sequence)
        self._untold = None

    def fail_step(self, message: str) -> list[Emission]:
        """What is to be told after a step that broke as a whole. What had rows in it ends with ``message``, which the
        client reads; everything, if it broke before rows were dealt. An answer that was complete by then stays one.
        """
        # What the step before has brought holds, whatever broke.
        self._running = None
        self._emit_untold()
        ended = {request_id for request_id, chunk in self._outbox if chunk.finish_reason is not None}
        for sequence in self._sequences_in_step():
            if not self.scheduler.is_running(sequence):
                continue
            if sequence.id in ended:
                self.scheduler.remove(sequence.id, keep=False)
            else:
                self._end(sequence, "error", message)
        return self._take_outbox()

    def check_integrity(self) -> None:
        """Raises :class:`backends.engine.kv_cache.IntegrityError` unless pages and sequences add up."""
        self.scheduler.check_integrity()

    def _chain_root(self, request: GenerationRequest) -> bytes | None:
        """Who finds what the request computes. The pages are one model's, so it needs no name in it."""
        if self.config.prefix_cache == "none" or request.sampling.prompt_logprobs:
            # Whose prompt is scored reads it: what is cached has no logits.
            return None
        tenant = request.tenant if self.config.prefix_cache == "tenant" else ""
        return chain_root(tenant, request.cache_salt)

    def _schedule(self) -> StepPlan:
        """End what is late, admit what is waiting, plan the rows."""
        self._plan = None
        now = self._clock()
        for sequence in self.scheduler.late(now):
            self._end(sequence, "deadline", None)
        self.scheduler.update_deadlines(now)
        self.scheduler.admit(now)
        self._plan = self.scheduler.schedule()
        return self._plan

    def _sequences_in_step(self) -> list[Sequence]:
        """Whose rows are in the step; all that run, while it is not planned or has no rows."""
        if self._plan is not None and self._plan.num_rows:
            return self._plan.sequences
        return self.scheduler.running

    def _score_prompts(self, plan: StepPlan, hidden: torch.Tensor) -> torch.Tensor:
        """Keep the log-probabilities of prompts for which they are wanted; returns the other rows' hidden states."""
        at = first_scored = hidden.shape[0] - sum([count for _, count in plan.scored])
        for sequence, count in plan.scored:
            # In pieces: the logits of a whole prompt would be many megabytes.
            for start in range(at, at + count, _SCORED_AT_ONCE):
                rows = hidden[start : min(start + _SCORED_AT_ONCE, at + count)]
                sequence.score_prompt(self.runner.logits(rows))
            at += count
        return hidden[:first_scored]

    def _run(self, plan: StepPlan) -> torch.Tensor:
        """One forward of all rows; returns hidden states [outputs, H]. From here on the chunks' tokens are cached."""
        with self._masks.during(plan.scheduled):
            hidden = self.runner.forward(plan.batch.build())
        for chunk in plan.prefill_chunks:
            self.scheduler.note_read(chunk)
        return self._score_prompts(plan, hidden) if plan.scored else hidden

    def _verify(self, plan: StepPlan, hidden: torch.Tensor) -> list[Outcome]:
        """Draw tokens, follow the candidates that they match, and add them to the answers."""
        logits = self.runner.logits(hidden)
        outcomes, scheduled = [], plan.scheduled
        if self.runner.runs_ahead:
            # Who was aborted meanwhile has no pages any more; what the device wrote into them is overwritten behind it.
            scheduled = [item for item in scheduled if self.scheduler.is_running(item.sequence)]
        for item, result in zip(scheduled, verify(self.runner, logits, scheduled), strict=True):
            outcome = Outcome(item, result)
            outcomes.append(outcome)
            try:
                self._accept(outcome, logits)
            except Exception as error:  # one request's text must not take the others down
                self._give_up(item.sequence, error)
        return outcomes

    def _accept(self, outcome: Outcome, logits: torch.Tensor) -> None:
        """Append the verified tokens up to the first that ends the answer, or that is none."""
        item, sequence, result = outcome.scheduled, outcome.scheduled.sequence, outcome.result
        for token, row in zip(result.tokens, result.rows, strict=True):
            if not 0 <= token < self.runner.vocab_size:
                reason = self._stuck_by_grammar(sequence, logits[item.first_row + row])
                sequence.finish_reason, sequence.error = "error", reason or NOT_FINITE
                level = logging.ERROR if reason is None else logging.INFO
                log.log(level, "request %s ends: %s", sequence.id, sequence.error)
                return
            if self._observer is not None:
                self._observer(sequence.id, len(sequence.tokens), token, logits[item.first_row + row])
            outcome.emitted.append(token)
            if row > 0:
                source = item.draft.sources[row - 1]
                outcome.accepted_by[source] = outcome.accepted_by.get(source, 0) + 1
            is_last = sequence.accept(token, logits, item.first_row + row)
            if sequence.tracer is not None:
                sequence.tracer.note_token(sequence.text.length)
            if is_last:
                return

    @staticmethod
    def _stuck_by_grammar(sequence: Sequence, logits_row: torch.Tensor) -> str | None:
        """Why the grammar lets no token through for ``logits_row`` [V]; None: it is not the grammar's doing. One that
        has failed forbids all there is; another may want the end where ``min_tokens`` forbids it."""
        grammar = sequence.request.grammar
        if grammar is None:
            return None
        return grammar.error or (GRAMMAR_STUCK if bool(logits_row.amax().isfinite()) else None)

    def _commit(self, outcomes: list[Outcome]) -> None:
        """Move the accepted candidates' keys and values from scratch into their sequences' pages, and let others find
        what is final."""
        source: list[int] = []
        target: list[int] = []
        for outcome in outcomes:
            item = outcome.scheduled
            sequence = item.sequence
            sequence.status = SequenceStatus.DECODE
            first = sequence.num_computed_tokens + item.is_decoding
            sequence.num_computed_tokens = len(sequence.tokens) - 1
            rows = outcome.result.rows[1 : sequence.num_computed_tokens - first + 1]
            if rows:
                source += [item.node_slots[row - 1] for row in rows]
                target += self.scheduler.memory.slots(sequence, first, len(rows))
        if source:
            self.runner.copy_slots(source, target)
        for outcome in outcomes:
            if outcome.scheduled.sequence.finish_reason != "error":
                self.scheduler.memory.publish(outcome.scheduled.sequence)

    def _mark_time(self, outcomes: list[Outcome]) -> float:
        """The end of the step in all its sequences; returns it."""
        ended = self._clock()
        for outcome in outcomes:
            outcome.scheduled.sequence.mark_time(ended)
        return ended

    def _emit(self, sequence: Sequence) -> None:
        """What the sequence has to tell; the last chunk takes it out of the books."""
        try:
            chunk = sequence.take_chunk()
        except Exception as error:
            self._give_up(sequence, error)
            chunk = TokenChunk(text="", finish_reason="error", error=ENGINE_FAILED)
        self._outbox.append((sequence.id, chunk))
        if chunk.finish_reason is not None:
            self.scheduler.remove(sequence.id)

    def _take_outbox(self) -> list[Emission]:
        emissions, self._outbox = self._outbox, []
        return emissions

    def _end(self, sequence: Sequence, reason: FinishReason, error: str | None) -> None:
        """End a sequence before its answer is over, unless it is."""
        if sequence.finish_reason is None:
            sequence.finish_reason, sequence.error = reason, error
        if sequence.finished_at is None:
            sequence.finished_at = self._clock()
        self._emit(sequence)

    def _give_up(self, sequence: Sequence, error: Exception) -> None:
        """End one sequence for what its own text raised. Kind and place are logged; the words may quote that text."""
        frames = "".join(traceback.format_tb(error.__traceback__))
        log.error("request %s failed: %s at\n%s", sequence.id, type(error).__qualname__, frames.rstrip())
        sequence.finish_reason, sequence.error = "error", ENGINE_FAILED
