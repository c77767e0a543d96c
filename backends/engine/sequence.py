"""One request inside the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field
from enum import Enum, auto

import numpy as np
import torch

from backends.engine.counters import RequestCounts
from backends.engine.deadline import Behind, Pace, behind
from backends.engine.prefix_chain import PrefixChain
from backends.engine.step_trace import StepTracer
from backends.engine.text_stream import TextStream
from backends.models.detokenizer import Detokenizer
from backends.models.tokenizer import HfTokenizer
from backends.sampling.sampler import LogitProcessor
from backends.speculation.backoff import Speculation
from backends.speculation.prompt_lookup import Lookup
from backends.speculation.tree_builder import NO_OFFERS, Offer
from backends.speculation.undrafted import Undrafted, Why
from backends.types import (
    FinishReason,
    GenerationRequest,
    GenerationStats,
    PositionLogprobs,
    PromptScore,
    TokenChunk,
    TokenLogprob,
)


class SequenceStatus(Enum):
    WAITING = auto()
    PREFILL = auto()
    DECODE = auto()
    FINISHED = auto()


@dataclass(slots=True)
class Sequence:
    """``tokens``: prompt and answer. Keys and values are in the cache for the first ``num_computed_tokens`` of them.

    While decoding that is all but the last, the *pending* token. ``offers``: guesses for the next step, by drafter.
    ``chain``: by what its pages are found, None where they are not shared; the first ``published`` are.
    ``queued_at``: since when it waits, where it does; ``preemptions``: how often it has lost its pages and begun again.
    ``cached_tokens``: of the prompt, those that it has not had to read.
    """

    request: GenerationRequest
    tokenizer: HfTokenizer
    eos_token_ids: frozenset[int]
    arrived: float
    chain_root: InitVar[bytes | None] = None
    status: SequenceStatus = SequenceStatus.WAITING
    tokens: list[int] = field(init=False)
    prompt_length: int = field(init=False)
    num_computed_tokens: int = 0
    chain: PrefixChain | None = field(init=False)
    published: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    queued_at: float = field(init=False)
    offers: Mapping[str, Offer] = field(default_factory=lambda: NO_OFFERS)
    processor: LogitProcessor | None = None
    speculation: Speculation = field(init=False)
    lookup: Lookup | None = None
    undrafted: Undrafted = field(default_factory=Undrafted)
    detokenizer: Detokenizer = field(init=False)
    text: TextStream = field(init=False)
    counts: RequestCounts = field(default_factory=RequestCounts)
    finish_reason: FinishReason | None = None
    stop_match: str | int | None = None
    error: str | None = None
    admitted_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None
    paused_at: list[float] = field(default_factory=list)
    behind: Behind | None = None
    behind_at: float | None = None
    tracer: StepTracer | None = None
    _unsent: list[int] = field(default_factory=list)
    _prompt_scores: list[PromptScore] = field(default_factory=list)
    # Those of the unsent that are not text yet.
    _unread: list[int] = field(default_factory=list)
    # Its last chunk has been taken.
    told: bool = False
    # Whether an answer's text can end it, or must be known as its tokens are: by log-probabilities, or a trace.
    _reads_at_once: bool = field(init=False)
    _ending_ids: frozenset[int] = field(init=False)

    def __post_init__(self, chain_root: bytes | None) -> None:
        sampling = self.request.sampling
        self.tokens = list(self.request.prompt_token_ids)
        self.prompt_length = len(self.tokens)
        self.chain = None if chain_root is None else PrefixChain(chain_root, self.tokens)
        self.queued_at = self.arrived
        self._ending_ids = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            self._ending_ids |= self.eos_token_ids
        self.detokenizer = (
            self.tokenizer.detokenizer_after(self.tokens) if self.request.continues else self.tokenizer.detokenizer()
        )
        in_document = self.request.grammar is not None and self.request.grammar.is_document
        stops = () if in_document else sampling.stop
        self.text = TextStream(stops, self.detokenizer.push, self.detokenizer.flush)
        self.speculation = Speculation(enabled=self.request.plan.method == "medusa")
        if self.request.trace:
            self.tracer = StepTracer()
        plan = self.request.plan
        if plan.method == "medusa" and plan.lookup and plan.tree is None:
            self.lookup = Lookup(self.tokens)
        self._reads_at_once = bool(stops) or sampling.logprobs is not None or self.request.trace
        if LogitProcessor.wanted(sampling) or self.request.grammar is not None:
            self.processor = LogitProcessor(
                sampling,
                prompt_ids=np.unique(np.array(self.request.prompt_token_ids, np.int64)),
                ending_ids=np.array(sorted(self._ending_ids), np.int64),
                grammar=self.request.grammar,
            )

    @property
    def id(self) -> str:
        return self.request.request_id

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def remaining(self) -> int:
        return self.request.sampling.max_tokens - self.num_generated

    @property
    def num_to_read(self) -> int:
        """Tokens that are read before it decodes: its prompt, whose last row gives the first token; of one that has
        begun its answer and lost its pages, all but the pending one."""
        return len(self.tokens) - (len(self.tokens) > self.prompt_length)

    def preempt(self, now: float) -> None:
        """It has lost its pages: it waits, and begins again with all that it has. Nothing of that can be seen from
        outside; guesses are made anew."""
        self.status, self.queued_at = SequenceStatus.WAITING, now
        self.num_computed_tokens = self.published = 0
        self.preemptions += 1
        self.offers = NO_OFFERS
        self.undrafted.unasked = Why.RESUMED
        if not self.num_generated:
            self._prompt_scores.clear()  # made again as the prompt is read again

    def accept(self, token: int, logits: torch.Tensor, row: int) -> bool:
        """Append one verified token, drawn from ``row`` of ``logits`` [R, V]; True when it ends the answer (nothing
        after it may be appended)."""
        sampling = self.request.sampling
        self.tokens.append(token)
        self._unsent.append(token)
        if self.processor is not None:
            self.processor.accept(token)
        num_generated = len(self.tokens) - self.prompt_length
        may_stop = num_generated > sampling.min_tokens
        if may_stop and token in self._ending_ids:
            self.finish_reason, self.stop_match = "stop", token
            return True
        match = None
        if self._reads_at_once:
            match = self._read(token, logits, row, watch=may_stop)
        else:
            self._unread.append(token)
        if match is not None:
            self.finish_reason, self.stop_match = "stop", match
        elif self.processor is not None and self.processor.complete:
            # What would follow is the token that ends an answer, which is no part of it.
            self.finish_reason = "stop"
        elif num_generated >= sampling.max_tokens:
            self.finish_reason = "length"
        return self.finish_reason is not None

    def score_prompt(self, logits: torch.Tensor) -> None:
        """``logits`` [n, V] of the next n rows of the prompt: each says how likely the token behind it was."""
        first = len(self._prompt_scores) + 1
        chosen = self.tokens[first : first + len(logits)]
        log_p = torch.log_softmax(logits.float(), dim=-1)
        values = log_p[torch.arange(len(chosen)), chosen].tolist()
        best = log_p.topk(self.request.sampling.logprobs or 0, dim=-1)
        ranked = zip(values, best.indices.tolist(), best.values.tolist(), strict=True)
        self._prompt_scores += [
            PromptScore(value, tuple(zip(ids, scores, strict=True))) for value, ids, scores in ranked
        ]

    def _read(self, token: int, logits: torch.Tensor, row: int, *, watch: bool) -> str | None:
        """A token's text and log-probabilities; returns the stop string that it completes, if ``watch``."""
        top, start = self.request.sampling.logprobs, self.text.length
        # Before the token is pushed: what its and the others' texts are depends on what stands there.
        entry = None if top is None else self._logprobs(token, logits[row], top)
        match = self.text.push(token, watch=watch)
        if entry is not None and (match is None or start < self.text.length):
            self.text.add_logprobs(start, entry)
        return match

    @property
    def speedup(self) -> float:
        """What drafting has measured in this request, by the cost table; 1 without any."""
        return self.counts.vanilla_ms / self.counts.spent_ms if self.counts.spent_ms else 1.0

    def update_deadline(self, now: float) -> None:
        """Draft no more from this step on if the deadline asks for it, see :func:`backends.engine.deadline.behind`."""
        deadline_s = self.request.deadline_s
        if deadline_s is None or self.first_token_at is None or self.behind_at is not None:
            return
        if self.request.plan.method == "vanilla":
            return
        found = behind(
            Pace(
                elapsed_s=now - self.first_token_at,
                tokens=self.num_generated - 1,
                to_come=self.remaining,
                left_s=self.arrived + deadline_s - now,
                speedup=self.speedup,
            )
        )
        self.behind = found or self.behind
        if found is not None and found.vanilla:
            self.behind_at = now
            self.speculation.enabled, self.offers, self.lookup = False, NO_OFFERS, None

    def mark_time(self, now: float) -> None:
        """Count a step that this sequence got tokens from, and remember when things happened; called at its end."""
        self.counts.steps += 1
        if self.first_token_at is None:
            self.first_token_at = now
        if self.finish_reason is not None:
            self.finished_at = now
        if len(self.paused_at) < self.speculation.pauses:
            self.paused_at.append(now)

    def take_chunk(self) -> TokenChunk:
        """Everything that may be sent now; the last chunk carries reason and statistics."""
        final = self.finish_reason is not None
        # Text that decides nothing is made here, where a device already works on the next step.
        unread, self._unread, self.told = self._unread, [], final
        for token in unread:
            self.text.push(token, watch=False)
        text, logprobs = self.text.take(final=final)
        token_ids, self._unsent = tuple(self._unsent), []
        prompt_scores, self._prompt_scores = tuple(self._prompt_scores), []
        return TokenChunk(
            text=text,
            token_ids=token_ids,
            logprobs=logprobs,
            num_tokens=self.num_generated,
            cached_tokens=self.cached_tokens,
            finish_reason=self.finish_reason,
            stop_match=self.stop_match,
            stats=self.stats() if final else None,
            error=self.error,
            trace=() if self.tracer is None else self.tracer.take(),
            prompt_scores=prompt_scores,
        )

    def stats(self) -> GenerationStats:
        plan, counts = self.request.plan, self.counts
        reason = plan.reason
        if self.speculation.pauses:
            reason += f"; went vanilla {self.speculation.pauses} time(s) when drafts did not pay"
        # The first token comes out of the prompt, which nothing can be drafted for.
        if unused := self.undrafted.reason(counts.steps - 1):
            reason += f"; {unused}"
        if self.behind is not None:
            reason += f"; {self.behind.reason}"
        return GenerationStats(
            method=plan.method,
            num_heads=plan.num_heads if plan.method == "medusa" else 0,
            max_nodes=counts.most_nodes,
            steps=counts.steps,
            medusa_steps=counts.medusa_steps,
            drafted_tokens=counts.drafted,
            accepted_draft_tokens=counts.accepted,
            accepted_by=dict(counts.accepted_by),
            drafted_grammar_tokens=counts.drafted_of_grammar,
            emitted_tokens=self.num_generated,
            cached_tokens=self.cached_tokens,
            preemptions=self.preemptions,
            speedup_estimate=self.speedup,
            saved_s=counts.saved_ms / 1e3,
            reason=reason,
            acceptance=plan.acceptance,
            admitted_at=self.admitted_at,
            first_token_at=self.first_token_at,
            finished_at=self.finished_at,
            paused_at=tuple(self.paused_at),
            behind_at=self.behind_at,
        )

    def _logprobs(self, token: int, logits_row: torch.Tensor, top: int) -> PositionLogprobs:
        log_p = torch.log_softmax(logits_row.float(), dim=-1)
        best = torch.topk(log_p, top) if top else None
        ranked = zip(best.indices.tolist(), best.values.tolist(), strict=True) if best is not None else ()
        return PositionLogprobs(
            self._token_logprob(token, float(log_p[token])), tuple(self._token_logprob(i, value) for i, value in ranked)
        )

    def _token_logprob(self, token: int, logprob: float) -> TokenLogprob:
        text, raw = self.tokenizer.token_text(self.detokenizer, token)
        return TokenLogprob(token, text, logprob, raw)
