"""The continuously batched loop, one step at a time; single-threaded, driven by :mod:`backends.engine.thread`."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable

import torch

from backends.cost.calibration import Calibration
from backends.cost.step_cost import StepCost
from backends.engine.accounting import StepAccounting
from backends.engine.config import EngineConfig
from backends.engine.drafting import DraftPlanner
from backends.engine.optional_parts import OptionalParts
from backends.engine.scheduler import Scheduler
from backends.engine.sequence import Sequence, SequenceStatus
from backends.engine.step_plan import Outcome, ScheduledSequence, StepPlan
from backends.models.tokenizer import HfTokenizer
from backends.runners.base import HeadsRunner, ModelRunner
from backends.runners.batch import PAGE_SIZE
from backends.speculation.batch_gate import DraftGate
from backends.speculation.verify import Candidate, count_sound, verify
from backends.types import (
    ENGINE_FAILED,
    NOT_FINITE,
    EngineLoad,
    FinishReason,
    GenerationRequest,
    RequestRefused,
    TokenChunk,
)

log = logging.getLogger(__name__)

Emission = tuple[str, TokenChunk]
# Called for every emitted token with request id, its absolute position, the token, and the logits [V] it came from.
Observer = Callable[[str, int, int, torch.Tensor], None]


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
    ) -> None:
        self.runner, self.heads, self.tokenizer = runner, heads, tokenizer
        self.config, self.cost = config, cost
        self._clock, self._observer = clock, observer
        self.optional = OptionalParts(clock)
        self.accounting = StepAccounting(
            cost, heads, gate or DraftGate(cost), calibration or Calibration(), self.optional
        )
        self.drafting = DraftPlanner(heads, runner.vocab_size, config, cost, self.accounting, self.optional)
        self.scheduler = Scheduler(config, runner.num_pages, self.drafting, self.accounting, self.optional)
        self._in_step: list[Sequence] = []
        # What is to be told outlives a step that breaks: it is kept here until it is taken.
        self._outbox: list[Emission] = []

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def in_step(self) -> list[str]:
        """Whose rows are in the present or last step."""
        return list(dict.fromkeys(sequence.id for sequence in self._in_step))

    def load(self) -> EngineLoad:
        return self.scheduler.load(self._clock())

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
        self.scheduler.add(Sequence(request, self.tokenizer, self.config.eos_token_ids, self._clock()))

    def abort(self, request_id: str) -> None:
        """Forget a request and free its pages at once; unknown ids are no error."""
        self.scheduler.remove(request_id)

    def step(self) -> list[Emission]:
        """Schedule, run one packed forward, verify, commit, account, and propose drafts for the next step.

        Raises what broke the step as a whole; :meth:`fail_step` then says what is to be told all the same.
        """
        plan = self._schedule()
        if plan.batch.rows:
            began = self._clock()
            hidden = self._run(plan)
            if plan.scheduled:
                outcomes = self._verify(plan, hidden)
                self._commit(outcomes)
                self.accounting.judge(plan, outcomes)
                proposals = self.drafting.propose(plan, outcomes, hidden, num_prefilling=self.scheduler.num_prefilling)
                ended = self._mark_time(outcomes)
                self.accounting.count(plan, outcomes, proposals, began, ended)
                self._emit_all(outcomes)
        return self._take_outbox()

    def fail_step(self, message: str) -> list[Emission]:
        """What is to be told after a step that broke as a whole. What had rows in it ends with ``message``, which the
        client reads; everything, if it broke before rows were dealt. An answer that was complete by then stays one.
        """
        ended = {request_id for request_id, chunk in self._outbox if chunk.finish_reason is not None}
        for sequence in self._in_step:
            if not self.scheduler.is_running(sequence):
                continue
            if sequence.id in ended:
                self.scheduler.remove(sequence.id)
            else:
                self._end(sequence, "error", message)
        return self._take_outbox()

    def check_integrity(self) -> None:
        """Raises :class:`backends.engine.kv_cache.IntegrityError` unless pages and sequences add up."""
        self.scheduler.check_integrity()

    def _schedule(self) -> StepPlan:
        """End what is late, admit what is waiting, plan the rows. ``_in_step`` is kept up: :meth:`fail_step` reads it,
        wherever the step breaks."""
        self._in_step = self.scheduler.running
        now = self._clock()
        for sequence in self.scheduler.late(now):
            self._end(sequence, "deadline", None)
        self.scheduler.update_deadlines(now)
        self.scheduler.admit(now)
        self._in_step = self.scheduler.running
        plan = self.scheduler.schedule()
        if plan.batch.rows:
            self._in_step = plan.sequences
        return plan

    def _run(self, plan: StepPlan) -> torch.Tensor:
        """One forward of all rows; returns hidden states [outputs, H]. From here on the chunks' tokens are cached."""
        hidden = self.runner.forward(plan.batch.build())
        for sequence, num_tokens in plan.prefill_chunks:
            sequence.num_computed_tokens += num_tokens
            self.drafting.note_prefilled(sequence, num_tokens)
        return hidden

    def _verify(self, plan: StepPlan, hidden: torch.Tensor) -> list[Outcome]:
        """Draw tokens, follow the candidates that they match, and add them to the answers."""
        logits = self.runner.logits(hidden)
        results = verify(self.runner, logits, [_candidate(item) for item in plan.scheduled])
        sound = count_sound(results, self.runner.vocab_size)
        outcomes = [Outcome(item, result) for item, result in zip(plan.scheduled, results, strict=True)]
        for outcome, num_sound in zip(outcomes, sound, strict=True):
            try:
                self._accept(outcome, num_sound, logits)
            except Exception as error:  # one request's text must not take the others down
                self._give_up(outcome.scheduled.sequence, error)
        return outcomes

    def _accept(self, outcome: Outcome, num_sound: int, logits: torch.Tensor) -> None:
        """Append the verified tokens up to the first that ends the answer; the ``num_sound`` first ones."""
        item, result = outcome.scheduled, outcome.result
        sequence = item.sequence
        for token, row in zip(result.tokens[:num_sound], result.rows[:num_sound], strict=True):
            if self._observer is not None:
                self._observer(sequence.id, len(sequence.tokens), token, logits[item.first_row + row])
            outcome.emitted.append(token)
            outcome.accepted_of_heads += row > 0 and row not in item.draft.from_lookup
            if sequence.accept(token, logits, item.first_row + row):
                return
        if num_sound < len(result.tokens):
            grammar = sequence.request.grammar
            sequence.finish_reason, sequence.error = "error", NOT_FINITE
            if grammar is not None and grammar.error is not None:
                sequence.error = grammar.error
            log.error("request %s ends: %s", sequence.id, sequence.error)

    def _commit(self, outcomes: list[Outcome]) -> None:
        """Move the accepted candidates' keys and values from scratch into their sequences' pages."""
        source, target = [], []
        for outcome in outcomes:
            item = outcome.scheduled
            sequence = item.sequence
            sequence.status = SequenceStatus.DECODE
            first = sequence.num_computed_tokens + item.is_decoding
            sequence.num_computed_tokens = len(sequence.tokens) - 1
            for offset, row in enumerate(outcome.result.rows[1 : sequence.num_computed_tokens - first + 1]):
                page, place = divmod(first + offset, PAGE_SIZE)
                source.append(item.node_slots[row - 1])
                target.append(sequence.pages[page] * PAGE_SIZE + place)
        self.runner.copy_slots(source, target)

    def _mark_time(self, outcomes: list[Outcome]) -> float:
        """The end of the step in all its sequences; returns it."""
        ended = self._clock()
        for outcome in outcomes:
            outcome.scheduled.sequence.mark_time(ended)
        return ended

    def _emit_all(self, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            self._emit(outcome.scheduled.sequence)

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


def _candidate(item: ScheduledSequence) -> Candidate:
    """What :func:`backends.speculation.verify.verify` needs to know of it."""
    sequence = item.sequence
    return Candidate(
        first_row=item.first_row,
        position=len(sequence.tokens),
        params=sequence.request.sampling,
        processor=sequence.processor,
        draft=item.draft,
        acceptance=sequence.request.plan.acceptance,
    )
