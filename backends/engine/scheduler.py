"""Who runs in a step, and with which rows: the queue, admission, prompts read in chunks, candidates."""

from __future__ import annotations

from collections import deque

from backends.engine.accounting import StepAccounting
from backends.engine.config import EngineConfig
from backends.engine.drafting import NO_DRAFT, DraftPlanner
from backends.engine.kv_cache import PagePool
from backends.engine.optional_parts import OptionalParts
from backends.engine.prefill_share import share_rows
from backends.engine.sequence import Sequence, SequenceStatus
from backends.engine.step_plan import PrefillChunk, ScheduledSequence, StepPlan, StepPrice
from backends.runners.batch import PAGE_SIZE, BatchBuilder
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
        self._pool = PagePool(num_pages)
        self._scratch_base = num_pages * PAGE_SIZE
        self._waiting: deque[Sequence] = deque()
        self._running: dict[str, Sequence] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def running(self) -> list[Sequence]:
        """Sequences that have their pages, in order of admission."""
        return list(self._running.values())

    @property
    def num_prefilling(self) -> int:
        """Running sequences whose prompt is not read to its end."""
        return sum(sequence.status is SequenceStatus.PREFILL for sequence in self._running.values())

    def load(self, now: float) -> EngineLoad:
        return EngineLoad(
            running=len(self._running),
            waiting=len(self._waiting),
            kv_pages_used=self._pool.used_pages,
            kv_pages_total=self._pool.num_pages,
            max_running=self._config.max_running,
            oldest_wait_s=now - self._waiting[0].arrived if self._waiting else 0.0,
        )

    def fits(self, num_tokens: int) -> bool:
        """Whether a sequence of this many positions can ever run."""
        return num_tokens <= self._config.max_model_len and PagePool.pages_for(num_tokens) <= self._pool.num_pages

    def holds(self, request_id: str) -> bool:
        return request_id in self._running or any(request_id == sequence.id for sequence in self._waiting)

    def is_running(self, sequence: Sequence) -> bool:
        return self._running.get(sequence.id) is sequence

    def add(self, sequence: Sequence) -> None:
        """Put it at the end of the queue."""
        self._waiting.append(sequence)

    def remove(self, request_id: str) -> None:
        """Forget a sequence and free its pages at once; unknown ids are no error."""
        sequence = self._running.get(request_id)
        if sequence is not None:
            self._pool.release(request_id)
            del self._running[request_id]
            sequence.status = SequenceStatus.FINISHED
            return
        for waiting in self._waiting:
            if waiting.id == request_id:
                self._waiting.remove(waiting)
                return

    def late(self, now: float) -> list[Sequence]:
        """Whose deadline has passed."""
        return [
            sequence
            for sequence in (*self._waiting, *self._running.values())
            if sequence.request.deadline_s is not None and now - sequence.arrived >= sequence.request.deadline_s
        ]

    def update_deadlines(self, now: float) -> None:
        """Whoever is behind its deadline drafts no more, see :meth:`Sequence.update_deadline`."""
        with self._optional.pace:
            for sequence in self._running.values():
                sequence.update_deadline(now)

    def admit(self, now: float) -> None:
        """First come, first served: a long request is not overtaken for ever by short ones."""
        while self._waiting and len(self._running) < self._config.max_running:
            sequence = self._waiting[0]
            request_id = sequence.id
            pages = self._pool.reserve(request_id, sequence.longest)
            if pages is None:
                return
            # From here on nothing is called that could fail: the pages have an owner that is not in the books yet.
            self._waiting.popleft()
            sequence.pages, sequence.status = pages, SequenceStatus.PREFILL
            sequence.admitted_at = now
            self._running[request_id] = sequence

    def schedule(self) -> StepPlan:
        """Rows of the next step: one for each decoding sequence and its candidates, the others for prompts."""
        decoding = [sequence for sequence in self._running.values() if sequence.status is SequenceStatus.DECODE]
        chunks = self._prefill_chunks(beside_decoding=bool(decoding))
        num_prefill_rows = sum(chunk.num_tokens for chunk in chunks)
        batch = BatchBuilder(self._scratch_base)
        scheduled = self._add_decoding(batch, decoding, num_prefill_rows)
        scheduled += self._add_chunks(batch, chunks)
        num_nodes = batch.rows - len(decoding) - num_prefill_rows
        price = StepPrice()
        if batch.rows:
            price = self._accounting.price(scheduled, len(decoding), num_nodes, num_prefill_rows)
        return StepPlan(scheduled=scheduled, prefill_chunks=chunks, batch=batch, num_nodes=num_nodes, price=price)

    def check_integrity(self) -> None:
        """Raises :class:`backends.engine.kv_cache.IntegrityError` unless pages and sequences add up."""
        self._pool.check_integrity(self._running)

    def _prefill_chunks(self, *, beside_decoding: bool) -> list[PrefillChunk]:
        """Which prompts go on, by how many tokens. Beside decoding sequences they get ``prefill_rows`` at most."""
        prefilling = [sequence for sequence in self._running.values() if sequence.status is SequenceStatus.PREFILL]
        if not prefilling:
            return []
        left = [sequence.prompt_length - sequence.num_computed_tokens for sequence in prefilling]
        shares = share_rows(left, self._config.prefill_rows if beside_decoding else self._config.max_rows)
        return [PrefillChunk(sequence, share) for sequence, share in zip(prefilling, shares, strict=True) if share]

    def _add_decoding(
        self, batch: BatchBuilder, decoding: list[Sequence], num_prefill_rows: int
    ) -> list[ScheduledSequence]:
        plan = self._drafting.plan(
            decoding,
            num_prefill_rows=num_prefill_rows,
            num_prefilling=len(self._running) - len(decoding),
        )
        scheduled = []
        for index, sequence in enumerate(decoding):
            request, draft = plan.requests.get(index), plan.drafts.get(index, NO_DRAFT)
            first_row, position = batch.outputs, len(sequence.tokens) - 1
            node_slots = batch.add_tree(sequence.pages, sequence.tokens[-1], position, draft.tokens, draft.parents)
            scheduled.append(
                ScheduledSequence(
                    sequence,
                    draft,
                    first_row,
                    node_slots,
                    is_decoding=True,
                    proposals=sequence.proposals,
                    lookup=None if request is None else request.lookup,
                )
            )
        return scheduled

    def _add_chunks(self, batch: BatchBuilder, chunks: list[PrefillChunk]) -> list[ScheduledSequence]:
        """Returns the sequences whose prompt ends with their chunk."""
        scheduled = []
        for sequence, num_tokens in chunks:
            start = sequence.num_computed_tokens
            end = start + num_tokens
            is_last = end == sequence.prompt_length
            if is_last:
                scheduled.append(ScheduledSequence(sequence, NO_DRAFT, batch.outputs, [], is_decoding=False))
            batch.add_chunk(sequence.pages, sequence.tokens[start:end], start, last_output=is_last)
        return scheduled
