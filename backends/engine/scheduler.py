"""Who runs in a step, and with which rows: the queue, admission, prompts read in chunks, candidates."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as SequenceOf

from backends.engine.accounting import StepAccounting
from backends.engine.config import EngineConfig
from backends.engine.drafting import NO_DRAFT, DraftPlan, DraftPlanner
from backends.engine.kv_cache import PageManager
from backends.engine.optional_parts import OptionalParts
from backends.engine.prefill_share import share_rows
from backends.engine.sequence import Sequence, SequenceStatus
from backends.engine.step_plan import PrefillChunk, ScheduledSequence, StepPlan, StepPrice
from backends.runners.batch import PAGE_SIZE, BatchBuilder
from backends.runners.native.rows import NativeRows, batches_here
from backends.speculation.tree_builder import Draft
from backends.types import EngineLoad


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
        self._pages = PageManager(num_pages)
        self._scratch_base = num_pages * PAGE_SIZE
        self._new_batch = batches_here()
        self._waiting: deque[Sequence] = deque()
        self._running: dict[str, Sequence] = {}
        self._with_deadline: dict[str, Sequence] = {}

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
            oldest_wait_s=now - self._waiting[0].arrived if self._waiting else 0.0,
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

    def remove(self, request_id: str) -> None:
        """Forget a sequence and free its pages at once; unknown ids are no error."""
        self._with_deadline.pop(request_id, None)
        sequence = self._running.get(request_id)
        if sequence is not None:
            self._pages.free(request_id)
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
        """First come, first served: a long request is not overtaken for ever by short ones."""
        while self._waiting and len(self._running) < self._config.max_running:
            sequence = self._waiting[0]
            request_id = sequence.id
            if not self._pages.allocate(request_id, sequence.longest):
                return
            # From here on nothing is called that could fail: the pages have an owner that is not in the books yet.
            self._waiting.popleft()
            sequence.status = SequenceStatus.PREFILL
            sequence.admitted_at = now
            self._running[request_id] = sequence

    def schedule(self) -> StepPlan:
        """Rows of the next step: one for each decoding sequence and its candidates, the others for prompts."""
        decoding: list[Sequence] = []
        prefilling: list[Sequence] = []
        for sequence in self._running.values():
            (decoding if sequence.status is SequenceStatus.DECODE else prefilling).append(sequence)
        chunks = self._prefill_chunks(prefilling, beside_decoding=bool(decoding)) if prefilling else []
        num_prefill_rows = sum([chunk.num_tokens for chunk in chunks]) if chunks else 0
        drafts = self._drafting.plan(decoding, num_prefill_rows=num_prefill_rows, num_prefilling=len(prefilling))
        batch = self._new_batch(self._scratch_base)
        scheduled = self._add_decoding(batch, decoding, drafts)
        if chunks:
            scheduled += self._add_chunks(batch, chunks)
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
            price=price,
        )

    def slots(self, sequence: Sequence, first: int, count: int) -> list[int]:
        """Where the keys and values of ``count`` of its positions from ``first`` on lie."""
        return self._pages.slots(sequence.id, first, count)

    def check_integrity(self) -> None:
        """Raises :class:`backends.engine.kv_cache.IntegrityError` unless pages and sequences add up."""
        self._pages.check_integrity(self._running)

    def _prefill_chunks(self, prefilling: list[Sequence], *, beside_decoding: bool) -> list[PrefillChunk]:
        """Which prompts go on, by how many tokens. Beside decoding sequences they get ``prefill_rows`` at most."""
        left = [sequence.prompt_length - sequence.num_computed_tokens for sequence in prefilling]
        shares = share_rows(left, self._config.prefill_rows if beside_decoding else self._config.max_rows)
        return [PrefillChunk(sequence, share) for sequence, share in zip(prefilling, shares, strict=True) if share]

    def _add_decoding(
        self, batch: BatchBuilder | NativeRows, decoding: list[Sequence], drafts: DraftPlan
    ) -> list[ScheduledSequence]:
        scheduled = []
        for index, sequence in enumerate(decoding):
            draft, tokens, first_row = drafts.drafts.get(index, NO_DRAFT), sequence.tokens, batch.outputs
            # Those that the step reads; a sequence owns all that it will ever need.
            pages = self._pages.pages_of(sequence.id)[: len(tokens) // PAGE_SIZE + 1]
            node_slots = batch.add_tree(pages, tokens[-1], len(tokens) - 1, draft.tokens, draft.parents)
            scheduled.append(_scheduled(sequence, draft, first_row, node_slots, is_decoding=True))
        return scheduled

    def _add_chunks(self, batch: BatchBuilder | NativeRows, chunks: list[PrefillChunk]) -> list[ScheduledSequence]:
        """Returns the sequences whose prompt ends with their chunk."""
        scheduled = []
        for sequence, num_tokens in chunks:
            start = sequence.num_computed_tokens
            end = start + num_tokens
            is_last = end == sequence.prompt_length
            if is_last:
                scheduled.append(_scheduled(sequence, NO_DRAFT, batch.outputs, [], is_decoding=False))
            batch.add_chunk(self._pages.pages_of(sequence.id), sequence.tokens[start:end], start, last_output=is_last)
        return scheduled


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
