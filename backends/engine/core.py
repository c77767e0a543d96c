"""The continuously batched loop, one step at a time; single-threaded, driven by :mod:`backends.engine.thread`."""

from __future__ import annotations

import logging
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from backends.cost.calibration import Calibration
from backends.cost.step_cost import StepCost
from backends.engine.counters import CounterBook
from backends.engine.kv_cache import PagePool
from backends.engine.optional_parts import OptionalParts
from backends.engine.prefill_share import share_rows
from backends.engine.sequence import Sequence, SequenceStatus
from backends.models.tokenizer import HfTokenizer
from backends.runners.base import HeadsRunner, ModelRunner, Proposals
from backends.runners.batch import PAGE_SIZE, BatchBuilder
from backends.speculation.batch_gate import DraftGate
from backends.speculation.prompt_lookup import Continuation
from backends.speculation.tree_builder import Draft, DraftRequest, lookup_pays, min_survival, plan_drafts
from backends.speculation.undrafted import Why
from backends.speculation.verify import AcceptResult, Candidate, count_sound, verify
from backends.tree import MAX_DEPTH
from backends.types import (
    ENGINE_FAILED,
    NOT_FINITE,
    EngineLoad,
    FinishReason,
    GenerationRequest,
    RequestRefused,
    StepSample,
    TokenChunk,
)

log = logging.getLogger(__name__)

_MOST_SAMPLES = 4096
_NO_DRAFT = Draft()
Emission = tuple[str, TokenChunk]
# Called for every emitted token with request id, its absolute position, the token, and the logits [V] it came from.
Observer = Callable[[str, int, int, torch.Tensor], None]


@dataclass(frozen=True)
class EngineConfig:
    """``max_rows``: rows of one step. ``prefill_rows``: rows that waiting prompts get in any case.

    ``proposals``: guesses kept per head.
    """

    max_model_len: int
    max_running: int = 32
    max_rows: int = 256
    prefill_rows: int = 64
    proposals: int = 10
    eos_token_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if self.max_running + self.prefill_rows > self.max_rows:
            raise ValueError("max_rows must hold max_running and prefill_rows")


@dataclass(slots=True)
class _Scheduled:
    """A sequence in this step: ``first_row`` in the outputs; ``node_slots``: scratch slots of its candidates."""

    sequence: Sequence
    draft: Draft
    first_row: int
    node_slots: list[int]
    decoding: bool
    proposals: Proposals | None = None
    lookup: Continuation | None = None
    emitted: list[int] = field(default_factory=list)
    of_heads: int = 0  # accepted candidates that the heads had guessed


@dataclass(frozen=True, slots=True)
class _Step:
    """What is to be run, and what decoding costs in it by the table (:meth:`StepCost.decode_ms`): ``spent_ms`` as
    planned, ``vanilla_ms`` without candidates, ``heads_ms`` with the heads and their candidates only."""

    scheduled: list[_Scheduled]
    batch: BatchBuilder
    chunks: list[tuple[Sequence, int]]
    nodes: int = 0
    spent_ms: float = 0.0
    vanilla_ms: float = 0.0
    heads_ms: float = 0.0


def _is_typical(step: _Step) -> bool:
    """Whether the step says anything about planned drafts: beside prompts a node costs what it does in a larger batch,
    and what a shape that somebody asked for gains is no word on shapes that are chosen."""
    return not step.chunks and all(item.sequence.request.plan.tree is None for item in step.scheduled)


class EngineCore:
    """Owns sequences and pages. Every method is called from one thread."""

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
    ) -> None:
        self.runner, self.heads, self.tokenizer = runner, heads, tokenizer
        self.config, self.cost = config, cost
        self._clock, self._observer = clock, observer
        self.counters = CounterBook()
        self.samples: deque[StepSample] = deque(maxlen=_MOST_SAMPLES)
        self.gate = gate or DraftGate(cost)
        self.calibration = Calibration()
        self._pool = PagePool(runner.num_pages)
        self._scratch_base = runner.num_pages * PAGE_SIZE
        self._waiting: deque[Sequence] = deque()
        self._running: dict[str, Sequence] = {}
        self._in_step: list[Sequence] = []
        # What is to be told outlives a step that breaks: it is kept here until it is taken.
        self._outbox: list[Emission] = []
        self.optional = OptionalParts(clock)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def in_step(self) -> list[str]:
        """Whose rows are in the present or last step."""
        return list(dict.fromkeys(sequence.id for sequence in self._in_step))

    def load(self) -> EngineLoad:
        return EngineLoad(
            running=len(self._running),
            waiting=len(self._waiting),
            kv_pages_used=self._pool.used_pages,
            kv_pages_total=self._pool.num_pages,
            max_running=self.config.max_running,
            oldest_wait_s=self._clock() - self._waiting[0].arrived if self._waiting else 0.0,
        )

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
        if longest > self.config.max_model_len or PagePool.pages_for(longest) > self._pool.num_pages:
            raise RequestRefused(
                f"{longest} tokens of prompt and answer don't fit the context of {self.config.max_model_len}"
            )
        if request.request_id in self._running or any(request.request_id == s.id for s in self._waiting):
            raise RequestRefused(f"request id {request.request_id!r} is already in use")
        self._waiting.append(Sequence(request, self.tokenizer, self.config.eos_token_ids, self._clock()))

    def abort(self, request_id: str) -> None:
        """Forget a request and free its pages at once; unknown ids are no error."""
        sequence = self._running.get(request_id)
        if sequence is not None:
            self._retire(sequence)
            return
        for waiting in self._waiting:
            if waiting.id == request_id:
                self._waiting.remove(waiting)
                return

    def step(self) -> list[Emission]:
        """Schedule, one packed forward, verify, commit, draft for the next step, emit.

        Raises what broke the step as a whole; :meth:`fail_step` then says what is to be told all the same.
        """
        self._in_step = list(self._running.values())
        now = self._clock()
        self._expire(now)
        with self.optional.pace:
            for sequence in self._running.values():
                sequence.hurry(now)
        self._admit(now)
        self._in_step = list(self._running.values())
        step = self._schedule()
        if step.batch.rows:
            self._in_step = [*(item.sequence for item in step.scheduled), *(sequence for sequence, _ in step.chunks)]
            self._run(step)
        return self._take_outbox()

    def _run(self, step: _Step) -> None:
        began = self._clock()
        hidden = self.runner.forward(step.batch.build())
        for sequence, count in step.chunks:
            sequence.computed += count
            self._index(sequence, count)
        if not step.scheduled:
            return
        logits = self.runner.logits(hidden)
        results = verify(self.runner, logits, [self._candidate(item) for item in step.scheduled])
        sound = count_sound(results, self.runner.vocab_size)
        for item, result, count in zip(step.scheduled, results, sound, strict=True):
            try:
                self._accept(item, result, count, logits)
            except Exception as error:  # one request's text must not take the others down
                self._give_up(item.sequence, error)
        self._commit(step.scheduled, results)
        decoded = [item for item in step.scheduled if item.decoding and item.emitted]
        # What drafting costs over the table's word, in all books of this step.
        factor = 1.0
        with self.optional.judging:
            factor = self.calibration.factor(len(decoded))
            self._judge(step, decoded, factor)
        proposals = self._propose_if_possible(step, results, hidden)
        ended = self._clock()
        for item in step.scheduled:
            item.sequence.counts.steps += 1
            item.sequence.stamp(ended)
        with self.optional.counting:
            self._count(step, decoded, factor, began, ended, self._proposing_ms(proposals))
        for item in step.scheduled:
            self._emit(item.sequence)

    def fail_step(self, message: str) -> list[Emission]:
        """What is to be told after a step that broke as a whole. What had rows in it ends with ``message``, which the
        client reads; everything, if it broke before rows were dealt. An answer that was complete by then stays one.
        """
        ended = {request_id for request_id, chunk in self._outbox if chunk.finish_reason is not None}
        for sequence in self._in_step:
            if self._running.get(sequence.id) is not sequence:
                continue
            if sequence.id in ended:
                self._retire(sequence)
            else:
                self._end(sequence, "error", message)
        return self._take_outbox()

    def check_integrity(self) -> None:
        """Raises :class:`backends.engine.kv_cache.IntegrityError` unless pages and sequences add up."""
        self._pool.check_integrity(self._running)

    def _take_outbox(self) -> list[Emission]:
        emissions, self._outbox = self._outbox, []
        return emissions

    def _expire(self, now: float) -> None:
        late = [
            s
            for s in (*self._waiting, *self._running.values())
            if s.request.deadline_s is not None and now - s.arrived >= s.request.deadline_s
        ]
        for sequence in late:
            self._end(sequence, "deadline", None)

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

    def _emit(self, sequence: Sequence) -> None:
        """What the sequence has to tell; the last chunk takes it out of the books."""
        try:
            chunk = sequence.take_chunk()
        except Exception as error:
            self._give_up(sequence, error)
            chunk = TokenChunk(text="", finish_reason="error", error=ENGINE_FAILED)
        self._outbox.append((sequence.id, chunk))
        if chunk.finish_reason is not None:
            self.abort(sequence.id)

    def _retire(self, sequence: Sequence) -> None:
        self._pool.release(sequence.id)
        del self._running[sequence.id]
        sequence.status = SequenceStatus.FINISHED

    def _admit(self, now: float) -> None:
        """First come, first served: a long request is not overtaken for ever by short ones."""
        while self._waiting and len(self._running) < self.config.max_running:
            pages = self._pool.reserve(self._waiting[0].id, self._waiting[0].longest)
            if pages is None:
                return
            sequence = self._waiting.popleft()
            sequence.pages, sequence.status = pages, SequenceStatus.PREFILL
            sequence.admitted_at = now
            self._running[sequence.id] = sequence

    def _schedule(self) -> _Step:
        decoding = [s for s in self._running.values() if s.status is SequenceStatus.DECODE]
        chunks = self._prompt_chunks(len(decoding))
        prompt_rows = sum(count for _, count in chunks)
        extra, requests, drafts = self._plan(decoding, prompt_rows)
        with self.optional.judging:
            for index, sequence in enumerate(decoding):
                if not drafts.get(index, _NO_DRAFT).tokens and sequence.speculation.enabled:
                    sequence.undrafted.note_step(
                        requests.get(index),
                        remaining=sequence.remaining,
                        cost=self.cost,
                        sequences=len(decoding),
                        row_cost_factor=extra,
                    )
        batch = BatchBuilder(self._scratch_base)
        scheduled = []
        for index, sequence in enumerate(decoding):
            draft = drafts.get(index) or Draft()
            first_row = batch.outputs
            slots = batch.add_tree(
                sequence.pages, sequence.tokens[-1], len(sequence.tokens) - 1, draft.tokens, draft.parents
            )
            lookup = requests[index].lookup if index in requests else None
            scheduled.append(_Scheduled(sequence, draft, first_row, slots, True, sequence.proposals, lookup))
        for sequence, count in chunks:
            start = sequence.computed
            last = start + count == sequence.prompt_length
            if last:
                scheduled.append(_Scheduled(sequence, Draft(), batch.outputs, [], decoding=False))
            batch.add_chunk(sequence.pages, sequence.tokens[start : start + count], start, last_output=last)
        if not batch.rows:
            return _Step(scheduled, batch, chunks)
        nodes = batch.rows - len(decoding) - prompt_rows

        def decode_ms(nodes: int) -> float:
            return self.cost.decode_ms(len(decoding), nodes, prompt_rows)

        with self.optional.counting:
            proposing_ms = self._proposing_ms([s.proposals for s in decoding if s.proposals is not None])
            looked_up = sum(len(item.draft.from_lookup) for item in scheduled)
            return _Step(
                scheduled,
                batch,
                chunks,
                nodes,
                spent_ms=decode_ms(nodes) + proposing_ms,
                vanilla_ms=decode_ms(0),
                heads_ms=decode_ms(nodes - looked_up) + proposing_ms,
            )
        return _Step(scheduled, batch, chunks, nodes)

    def _plan(
        self, decoding: list[Sequence], prompt_rows: int
    ) -> tuple[float, dict[int, DraftRequest], dict[int, Draft]]:
        """What one more row takes over the table's word; what each sequence may draft, and what it does, by index.

        Nothing when planning fails.
        """
        requests: dict[int, DraftRequest] = {}
        if self.optional.planning.ready():
            with self.optional.planning:
                extra = self.calibration.row_cost_factor(len(decoding))
                look_up = bool(decoding) and lookup_pays(self.cost, sequences=len(decoding), row_cost_factor=extra)
                for index, sequence in enumerate(decoding):
                    request = self._draft_request(sequence, look_up)
                    if request is not None:
                        requests[index] = request
                drafts = plan_drafts(
                    requests,
                    sequences=len(decoding),
                    num_prefill_rows=prompt_rows,
                    node_budget=self.config.max_rows - len(decoding) - prompt_rows,
                    cost=self.cost,
                    num_prefilling=len(self._running) - len(decoding),
                    row_cost_factor=extra,
                )
                if any(not 0 <= token < self.runner.vocab_size for each in drafts.values() for token in each.tokens):
                    raise ValueError("a draft holds a token outside the vocabulary")
                return extra, requests, drafts
        for sequence in decoding:
            sequence.proposals, sequence.undrafted.unasked = None, Why.FAILED
        return 1.0, {}, {}

    def _prompt_chunks(self, decoding: int) -> list[tuple[Sequence, int]]:
        """Which prompts go on, by how many tokens. Beside decoding sequences they get ``prefill_rows`` at most."""
        rows = self.config.prefill_rows if decoding else self.config.max_rows
        reading = [s for s in self._running.values() if s.status is SequenceStatus.PREFILL]
        if not reading:
            return []
        shares = share_rows([sequence.prompt_length - sequence.computed for sequence in reading], rows)
        return [(sequence, share) for sequence, share in zip(reading, shares, strict=True) if share]

    def _draft_request(self, sequence: Sequence, look_up: bool) -> DraftRequest | None:
        """None when there is nothing to draft from or no use for it."""
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

    def _look_up(self, sequence: Sequence) -> Continuation | None:
        """What followed the same tokens before. An index that fails is given up."""
        if sequence.lookup is None:
            return None
        with self.optional.lookup:
            return sequence.lookup.find()
        sequence.lookup = None
        return None

    def _index(self, sequence: Sequence, count: int) -> None:
        """Keep the index of a long prompt up with its reading, so that no single step has all of it to do."""
        if sequence.lookup is None:
            return
        with self.optional.lookup:
            sequence.lookup.index(count)
            return
        sequence.lookup = None

    def _candidate(self, item: _Scheduled) -> Candidate:
        sequence = item.sequence
        return Candidate(
            first_row=item.first_row,
            position=len(sequence.tokens),
            params=sequence.request.sampling,
            processor=sequence.processor,
            draft=item.draft,
            acceptance=sequence.request.plan.acceptance,
        )

    def _accept(self, item: _Scheduled, result: AcceptResult, sound: int, logits: torch.Tensor) -> None:
        """Append the verified tokens up to the first that ends the answer; the ``sound`` first ones."""
        sequence = item.sequence
        for token, row in zip(result.tokens[:sound], result.rows[:sound], strict=True):
            if self._observer is not None:
                self._observer(sequence.id, len(sequence.tokens), token, logits[item.first_row + row])
            item.emitted.append(token)
            item.of_heads += row > 0 and row not in item.draft.from_lookup
            if sequence.accept(token, logits, item.first_row + row):
                return
        if sound < len(result.tokens):
            log.error("request %s ends: the model's logits are not finite", sequence.id)
            sequence.finish_reason, sequence.error = "error", NOT_FINITE

    def _judge(self, step: _Step, decoded: list[_Scheduled], factor: float) -> None:
        """What this step says about drafting in the next: for each sequence, and for batches of this size."""
        heads_ms = step.heads_ms * factor
        if any(item.proposals is not None for item in decoded) and _is_typical(step):
            accepted = sum(item.of_heads for item in decoded)
            self.gate.observe(len(decoded), accepted=accepted, vanilla_ms=step.vanilla_ms, step_ms=heads_ms)
        for item in decoded:
            if item.lookup is not None and item.sequence.lookup is not None:
                item.sequence.lookup.observe(item.lookup, item.emitted)
            if item.proposals is None:
                item.sequence.speculation.rest()
            elif item.sequence.request.plan.tree is None:
                item.sequence.speculation.observe(
                    expected=item.draft.expected_of_heads,
                    accepted=item.of_heads,
                    vanilla_ms=step.vanilla_ms,
                    step_ms=heads_ms,
                )

    def _count(
        self,
        step: _Step,
        decoded: list[_Scheduled],
        factor: float,
        began: float,
        ended: float,
        proposing_ms: float,
    ) -> None:
        """Books of the step. A sequence bears its share of a vanilla step, and of the rest what its own drafts cost.

        ``proposing_ms``: what the heads that have run in it cost by the table.
        """
        measured_ms = (ended - began) * 1e3
        with_drafts = step.spent_ms > step.vanilla_ms
        spent_ms = step.spent_ms * factor if with_drafts else step.spent_ms
        table_ms = self.cost.forward_ms(step.batch.rows) + proposing_ms
        # The clock has seen the heads of this step, whose guesses are for the next.
        if decoded and len(decoded) == len(step.scheduled) and (step.nodes or not proposing_ms) and _is_typical(step):
            self.calibration.observe(
                len(decoded),
                drafting=step.nodes > 0,
                predicted_ms=table_ms,
                measured_ms=measured_ms,
                vanilla_ms=step.vanilla_ms,
            )
        # Beside prompts, the rest of the time went into them.
        decoding_ms = measured_ms * min(step.spent_ms / table_ms, 1.0) if step.chunks else measured_ms
        extra_ms = spent_ms - step.vanilla_ms
        weights = [len(item.draft.tokens) or (item.proposals is not None) for item in decoded]
        drafting = sum(weights)
        for item, weight in zip(decoded, weights, strict=True):
            own_ms = extra_ms * weight / drafting if drafting else extra_ms / len(decoded)
            sequence, counts, drafted = item.sequence, item.sequence.counts, len(item.draft.tokens)
            counts.drafted += drafted
            counts.accepted += len(item.emitted) - 1
            counts.lookup_accepted += len(item.emitted) - 1 - item.of_heads
            counts.most_nodes = max(counts.most_nodes, drafted)
            counts.medusa_steps += drafted > 0
            counts.vanilla_ms += len(item.emitted) * step.vanilla_ms
            counts.spent_ms += spent_ms
            self.counters.add_step(
                sequence.request.stats_key,
                rows=1 + drafted,
                emitted=item.emitted,
                drafted=drafted,
                proposals=item.proposals,
                control=sequence.request.plan.method == "vanilla",
                vanilla_ms=step.vanilla_ms / len(decoded),
                spent_ms=step.vanilla_ms / len(decoded) + own_ms,
                measured_ms=decoding_ms / len(decoded),
            )
        kind = "prefill" if step.chunks else "verification" if step.nodes else "vanilla"
        without_ms = self.cost.forward_ms(step.batch.rows - step.nodes)
        self.samples.append(StepSample(kind, step.batch.rows, ended - began, without_ms / 1e3))

    def _commit(self, scheduled: list[_Scheduled], results: list[AcceptResult]) -> None:
        """Move the accepted candidates' keys and values from scratch into their sequences' pages."""
        source, target = [], []
        for item, result in zip(scheduled, results, strict=True):
            sequence = item.sequence
            sequence.status = SequenceStatus.DECODE
            first = sequence.computed + item.decoding
            sequence.computed = len(sequence.tokens) - 1
            for offset, row in enumerate(result.rows[1 : sequence.computed - first + 1]):
                page, place = divmod(first + offset, PAGE_SIZE)
                source.append(item.node_slots[row - 1])
                target.append(sequence.pages[page] * PAGE_SIZE + place)
        self.runner.copy_slots(source, target)

    def _proposing_ms(self, proposals: list[Proposals]) -> float:
        """What the heads that made these cost by the table."""
        if not proposals or self.heads is None:
            return 0.0
        levels = max(self.heads.num_heads if found.levels is None else found.levels for found in proposals)
        return self.cost.levels_ms(sum(found.lists for found in proposals), levels, self.heads.num_heads)

    def _propose_if_possible(self, step: _Step, results: list[AcceptResult], hidden: torch.Tensor) -> list[Proposals]:
        """The heads' guesses for the next step, put into the sequences; none when they fail or failed lately."""
        for item in step.scheduled:
            item.sequence.proposals, item.sequence.undrafted.unasked = None, Why.FAILED
        if self.optional.planning.rests or not self.optional.heads.ready():
            return []
        with self.optional.heads:
            return self._propose(step, results, hidden)
        for item in step.scheduled:
            item.sequence.proposals, item.sequence.undrafted.unasked = None, Why.FAILED
        return []

    def _propose(self, step: _Step, results: list[AcceptResult], hidden: torch.Tensor) -> list[Proposals]:
        """Run the heads where the next step may use them.

        A tree that the plan itself asks for is always used, and a probe always asks.
        """
        going_on = [
            (item.sequence, item.first_row + result.rows[-1])
            for item, result in zip(step.scheduled, results, strict=True)
            if item.sequence.finish_reason is None
        ]
        wanting = [
            (sequence, row)
            for sequence, row in going_on
            if sequence.speculation.wants_proposals and sequence.remaining > 1
        ]
        _say_unasked(going_on, Why.NOTHING if self.heads is None else Why.PAUSED)
        # Prompts being read are sequences of the steps to come.
        reading = sum(sequence.status is SequenceStatus.PREFILL for sequence in self._running.values())
        batch = len(going_on) + reading
        if self.heads is not None and wanting and not self.gate.allows(batch):
            why = Why.REFERENCE if self.gate.is_open(batch) else Why.GATE
            _say_unasked(wanting, why, self.gate.speedup(batch))
            wanting = [
                (sequence, row)
                for sequence, row in wanting
                if sequence.request.plan.tree is not None or sequence.request.plan.probe
            ]
        if not wanting or self.heads is None:
            return []
        sequences, rows = [sequence for sequence, _ in wanting], [row for _, row in wanting]
        contexts = [sequence.tokens for sequence in sequences]
        ranks = max(
            max(sequence.request.plan.tree.ranks_per_depth, default=0) if sequence.request.plan.tree else 0
            for sequence in sequences
        )
        trees = [sequence.request.plan.tree for sequence in sequences]
        least = min_survival(
            self.cost,
            sequences=len(going_on),
            rows=step.batch.rows,
            tokens=len(step.scheduled) + sum(item.draft.expected for item in step.scheduled),
            row_cost_factor=self.calibration.row_cost_factor(len(going_on)),
            num_heads=self.heads.num_heads,
        )
        proposals = self.heads.propose(
            hidden, contexts, max(self.config.proposals, ranks), trees, rows=rows, least=least
        )
        for sequence, found in zip(sequences, proposals, strict=True):
            sequence.proposals = found
        return proposals


def _say_unasked(sequences: Iterable[tuple[Sequence, int]], why: str, gate_speedup: float = 0.0) -> None:
    for sequence, _ in sequences:
        sequence.undrafted.unasked, sequence.undrafted.gate_speedup = why, gate_speedup
