"""Who runs in a step, and with which rows: the queue, admission, prompts read in chunks, candidates."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as SequenceOf

from backends.engine.accounting import StepAccounting
from backends.engine.config import EngineConfig
from backends.engine.drafting import NO_DRAFT, DraftPlan, DraftPlanner
from backends.engine.kv_cache import PageManager
from backends.engine.optional_parts import OptionalParts
from backends.engine.prefill_share import budget_rows, share_rows
from backends.engine.sequence import Sequence, SequenceStatus
from backends.engine.sequence_memory import SequenceMemory
from backends.engine.step_plan import PrefillChunk, ScheduledSequence, StepPlan, StepPrice
from backends.runners.batch import PAGE_SIZE, BatchBuilder
from backends.runners.native.rows import NativeRows, batches_here
from backends.speculation.tree_builder import Draft
from backends.types import EngineLoad, PrefillBudget


class Scheduler:
    """Owns the sequences, waiting or running, and the pages of those that run."""

    def __init__(
        self,
        config: EngineConfig,
        num_pages: int,
        drafting: DraftPlanner,
        accounting: StepAccounting,
        optional: OptionalParts,
    ) -> None:
        self._config, self._drafting = config, drafting
        self._accounting, self._optional = accounting, optional
        self.memory = SequenceMemory(num_pages, config.spare_pages)
        self._pages = self.memory.pages
        self._scratch_base = num_pages * PAGE_SIZE
        self._new_batch = batches_here()
        self._waiting: deque[Sequence] = deque()
        self._running: dict[str, Sequence] = {}
        self._with_deadline: dict[str, Sequence] = {}
        self._preemptions = 0
        self.prefill = PrefillBudget(rows=config.prefill_rows)
        # The oldest of the prompts that are read, and in how many steps others were read before it.
        self._oldest, self._passed_over = "", 0

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def running(self) -> list[Sequence]:
        """Sequences that have their pages, in order of admission."""
        return list(self._running.values())

    @property
    def mean_context(self) -> float:
        """Tokens of a running sequence on average; 0 when none runs."""
        running = self._running.values()
        return sum([len(sequence.tokens) for sequence in running]) / len(running) if running else 0.0

    def load(self, now: float) -> EngineLoad:
        return EngineLoad(
            running=len(self._running),
            waiting=len(self._waiting),
            kv_pages_used=self._pages.used_pages,
            kv_pages_total=self._pages.num_pages,
            max_running=self._config.max_running,
            oldest_wait_s=now - self._waiting[0].queued_at if self._waiting else 0.0,
            kv_pages_cached=self._pages.cached_pages,
            cache_evictions=self._pages.evictions,
            cache_prompt_tokens=self.memory.prompt_tokens,
            cache_hit_tokens=self.memory.cached_tokens,
            preemptions=self._preemptions,
        )

    def fits(self, num_tokens: int) -> bool:
        """Whether a sequence of this many positions can ever run."""
        return num_tokens <= self._config.max_model_len and PageManager.pages_for(num_tokens) <= self._pages.num_pages

    def holds(self, request_id: str) -> bool:
        return request_id in self._running or any(request_id == sequence.id for sequence in self._waiting)

    def is_running(self, sequence: Sequence) -> bool:
        return self._running.get(sequence.id) is sequence

    def add(self, sequence: Sequence) -> None:
        """Put it at the end of the queue."""
        self._waiting.append(sequence)
        if sequence.request.deadline_s is not None:
            self._with_deadline[sequence.id] = sequence

    def remove(self, request_id: str, *, keep: bool = True) -> None:
        """Forget a sequence and free its pages at once; unknown ids are no error. ``keep`` False: what it has computed
        is not to be trusted, so nobody shall find it in the cache."""
        self._with_deadline.pop(request_id, None)
        sequence = self._running.get(request_id)
        if sequence is not None:
            self.memory.release(sequence, keep=keep and sequence.finish_reason != "error")
            del self._running[request_id]
            sequence.status = SequenceStatus.FINISHED
            return
        for waiting in self._waiting:
            if waiting.id == request_id:
                self._waiting.remove(waiting)
                return

    def late(self, now: float) -> list[Sequence]:
        """Whose deadline has passed."""
        found = []
        for sequence in self._with_deadline.values():
            deadline_s = sequence.request.deadline_s
            if deadline_s is not None and now - sequence.arrived >= deadline_s:
                found.append(sequence)
        return found

    def update_deadlines(self, now: float) -> None:
        """Whoever is behind its deadline drafts no more, see :meth:`Sequence.update_deadline`."""
        if self._with_deadline:
            with self._optional.pace:
                for sequence in self._with_deadline.values():
                    sequence.update_deadline(now)

    def admit(self, now: float) -> None:
        """See that all that run have pages for a step, then let others in that have room beside them.

        First come, first served: a long request is not overtaken for ever by short ones. The oldest is never put out,
        and has room for its longest life once it is alone: so all come to their end.
        """
        for sequence in self.running:
            while self.is_running(sequence) and not self.memory.grow(sequence):
                self.preempt_youngest(now)
        while self._waiting and len(self._running) < self._config.max_running:
            sequence = self._waiting[0]
            request_id = sequence.id
            if not self.memory.begin(sequence, len(self._running)):
                return
            # From here on nothing is called that could fail: the pages have an owner that is not in the books yet.
            self._waiting.popleft()
            self._running[request_id] = sequence
            sequence.status = SequenceStatus.PREFILL
            if sequence.admitted_at is None:
                sequence.admitted_at = now
            self._drafting.begin(sequence)
            _update_status(sequence)

    def schedule(self) -> StepPlan:
        """Rows of the next step: one for each decoding sequence and its candidates, the others for prompts."""
        self._drafting.keep_up()
        decoding: list[Sequence] = []
        prefilling: list[Sequence] = []
        for sequence in self._running.values():
            (decoding if sequence.status is SequenceStatus.DECODE else prefilling).append(sequence)
        chunks = self._prefill_chunks(prefilling, num_decoding=len(decoding)) if prefilling else []
        num_prefill_rows = sum([chunk.num_tokens for chunk in chunks]) if chunks else 0
        drafts = self._drafting.plan(decoding, num_prefill_rows=num_prefill_rows, num_prefilling=len(prefilling))
        # Prompts that are scored want outputs that only the reference knows; they are rare.
        scoring = any(chunk.num_scored for chunk in chunks)
        batch = BatchBuilder(self._scratch_base) if scoring else self._new_batch(self._scratch_base)
        scheduled = self._add_decoding(batch, decoding, drafts)
        scored: list[tuple[Sequence, int]] = []
        if chunks:
            scheduled += self._add_chunks(batch, chunks)
            if isinstance(batch, BatchBuilder):
                scored = self._add_scored(batch, chunks)
        num_rows, num_decoding = batch.rows, len(decoding)
        num_nodes = num_rows - num_decoding - num_prefill_rows
        price = StepPrice()
        if num_rows:
            price = self._accounting.price(num_decoding, num_nodes, num_prefill_rows, drafts.offers_ms)
        return StepPlan(
            scheduled=scheduled,
            prefill_chunks=chunks,
            batch=batch,
            num_rows=num_rows,
            num_decoding=num_decoding,
            num_nodes=num_nodes,
            num_prefilling=len(prefilling) - (len(scheduled) - num_decoding),
            scored=scored,
            price=price,
        )

    def preempt_youngest(self, now: float) -> None:
        """Take the pages of who came in last, of at least one that runs. It goes on when there is room, before all
        others that wait; what it has published stays while it can."""
        _, sequence = self._running.popitem()
        self.memory.release(sequence, keep=True)
        sequence.preempt(now)
        self._waiting.appendleft(sequence)
        self._preemptions += 1

    def note_read(self, chunk: PrefillChunk) -> None:
        """A step has computed the chunk's keys and values."""
        sequence, num_tokens = chunk
        sequence.num_computed_tokens += num_tokens
        self.memory.publish(sequence)
        _update_status(sequence)

    def check_integrity(self) -> None:
        """Raises :class:`backends.engine.kv_cache.IntegrityError` unless pages and sequences add up."""
        self._pages.check_integrity(self._running)

    def _prefill_chunks(self, prefilling: list[Sequence], *, num_decoding: int) -> list[PrefillChunk]:
        """Which prompts go on, by how many tokens. Beside decoding sequences they get what the budget allows."""
        left = []
        for sequence in prefilling:
            self.memory.catch_up(sequence)
            _update_status(sequence)
            left.append(sequence.num_to_read - sequence.num_computed_tokens)
        # Of those that would read the same page, the one that has least to read does, and the others find it then.
        reading = set()
        for index in sorted(range(len(left)), key=left.__getitem__):
            page = self.memory.next_page(prefilling[index])
            if page is not None and page in reading:
                left[index] = 0
            reading.add(page)
        rows = self._config.max_rows
        if num_decoding:
            rows = budget_rows(self.prefill, self._accounting.cost, num_decoding, rows - self._config.max_running)
        if prefilling[0].id != self._oldest:
            self._oldest, self._passed_over = prefilling[0].id, 0
        shares = share_rows(left, rows, self._passed_over)
        if shares[0] < left[0] and sum(shares) > shares[0]:
            self._passed_over += 1
        return [PrefillChunk(sequence, share) for sequence, share in zip(prefilling, shares, strict=True) if share]

    def _add_decoding(
        self, batch: BatchBuilder | NativeRows, decoding: list[Sequence], drafts: DraftPlan
    ) -> list[ScheduledSequence]:
        scheduled = []
        for index, sequence in enumerate(decoding):
            draft, tokens, first_row = drafts.drafts.get(index, NO_DRAFT), sequence.tokens, batch.outputs
            # Those that the step reads; a sequence may own more.
            pages = self.memory.pages_of(sequence)[: len(tokens) // PAGE_SIZE + 1]
            node_slots = batch.add_tree(pages, tokens[-1], len(tokens) - 1, draft.tokens, draft.parents)
            scheduled.append(_scheduled(sequence, draft, first_row, node_slots, is_decoding=True))
        return scheduled

    def _add_chunks(self, batch: BatchBuilder | NativeRows, chunks: list[PrefillChunk]) -> list[ScheduledSequence]:
        """Returns the sequences whose prompt ends with their chunk."""
        scheduled = []
        for sequence, num_tokens in chunks:
            start = sequence.num_computed_tokens
            end = start + num_tokens
            # One that goes on after a preemption has its pending token already.
            is_last = end == sequence.prompt_length == len(sequence.tokens)
            if is_last:
                scheduled.append(_scheduled(sequence, NO_DRAFT, batch.outputs, [], is_decoding=False))
            batch.add_chunk(self.memory.pages_of(sequence), sequence.tokens[start:end], start, last_output=is_last)
        return scheduled

    @staticmethod
    def _add_scored(batch: BatchBuilder, chunks: list[PrefillChunk]) -> list[tuple[Sequence, int]]:
        """More outputs of the chunks, which are the batch's last rows, where a prompt's log-probabilities are wanted.
        Returns whose, and how many."""
        scored = []
        row = batch.rows - sum([chunk.num_tokens for chunk in chunks])
        for chunk in chunks:
            if chunk.num_scored:
                batch.add_outputs(row, chunk.num_scored)
                scored.append((chunk.sequence, chunk.num_scored))
            row += chunk.num_tokens
        return scored


def _update_status(sequence: Sequence) -> None:
    """One that had begun its answer decodes when all before its pending token is read."""
    if sequence.num_computed_tokens == sequence.num_to_read:
        sequence.status = SequenceStatus.DECODE


def _scheduled(
    sequence: Sequence, draft: Draft, first_row: int, node_slots: SequenceOf[int], *, is_decoding: bool
) -> ScheduledSequence:
    request = sequence.request
    return ScheduledSequence(
        first_row,
        len(sequence.tokens),
        request.sampling,
        sequence.processor,
        draft,
        request.plan.acceptance,
        sequence=sequence,
        node_slots=node_slots,
        is_decoding=is_decoding,
        offers=sequence.offers,
    )
