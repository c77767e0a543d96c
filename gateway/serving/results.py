"""What a request's sequences produced: gathered per choice, summed for usage and for the decoding report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from backends.types import DecodingPlan, GenerationStats, PositionLogprobs, PromptScore, TokenChunk
from gateway.serving.generation import Generation
from gateway.wire.responses import (
    CompletionTokensDetails,
    DecodingReport,
    FinishReasonOut,
    PromptTokensDetails,
    TracedStep,
    Usage,
)
from telemetry.request import RequestRecord


@dataclass(slots=True)
class ChoiceResult:
    """One sequence so far. ``chunks`` stays empty where the caller streams them on."""

    chunks: list[TokenChunk] = field(default_factory=list)
    num_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: FinishReasonOut = "stop"
    stop_reason: str | None = None
    reasoning_tokens: int | None = None
    deadline_hit: bool = False
    stats: GenerationStats | None = None

    def note(self, chunk: TokenChunk) -> None:
        """Take the counts of a chunk, but not its text."""
        self.num_tokens = chunk.num_tokens
        self.cached_tokens = chunk.cached_tokens
        if chunk.finish_reason is not None:
            # OpenAI has no word for a deadline. The text is cut as by a limit, and the decoding report says by which.
            self.deadline_hit = chunk.finish_reason == "deadline"
            self.finish_reason = "stop" if chunk.finish_reason == "stop" else "length"
            self.stop_reason = chunk.stop_match if isinstance(chunk.stop_match, str) else None
            self.stats = chunk.stats

    def keep(self, chunk: TokenChunk) -> None:
        self.chunks.append(chunk)
        self.note(chunk)

    def without_answer(self) -> ChoiceResult:
        """Of this result, what is about the prompt: for an echo alone, of which one token had to be generated."""
        first = TokenChunk(text="", prompt_scores=self.prompt_scores)
        return replace(self, chunks=[first], num_tokens=0, finish_reason="length", stop_reason=None)

    @property
    def text(self) -> str:
        return "".join([chunk.text for chunk in self.chunks])

    @property
    def prompt_scores(self) -> tuple[PromptScore, ...]:
        return self.chunks[0].prompt_scores if self.chunks else ()

    @property
    def logprobs(self) -> list[PositionLogprobs]:
        return [each for chunk in self.chunks for each in chunk.logprobs]


async def collect(generation: Generation, count: int) -> list[ChoiceResult]:
    """Wait for every sequence. Raises the :class:`APIError` of the first that fails."""
    results = [ChoiceResult() for _ in range(count)]
    async for index, chunk in generation.chunks():
        results[index].keep(chunk)
    return results


def cached_tokens(results: Sequence[ChoiceResult], prompts: int) -> int:
    """Prompt tokens that did not have to be read, over ``prompts`` with as many choices each: of each prompt what the
    choice has found that came first, since the others find more by its doing."""
    n = max(len(results) // prompts, 1)
    return sum(min(each.cached_tokens for each in results[at : at + n]) for at in range(0, len(results), n))


def usage(prompt_tokens: int, results: Sequence[ChoiceResult], prompts: int) -> Usage:
    completion_tokens = sum(result.num_tokens for result in results)
    thoughts = [result.reasoning_tokens for result in results if result.reasoning_tokens is not None]
    details = CompletionTokensDetails(sum(thoughts)) if thoughts else None
    cached = PromptTokensDetails(cached_tokens(results, prompts))
    return Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, details, cached)


def decoding_report(plan: DecodingPlan, results: Sequence[ChoiceResult]) -> DecodingReport:
    """What was done, from the plan and the engine's counts summed over all sequences."""
    stats = [result.stats for result in results if result.stats is not None]
    steps = sum(each.steps for each in stats)
    emitted = sum(each.emitted_tokens for each in stats)
    # A sequence's speedup counts by its steps, as steps are what time is spent on.
    weighted = sum(each.speedup_estimate * each.steps for each in stats)
    method: Literal["medusa", "vanilla"] = "medusa" if any(each.method == "medusa" for each in stats) else "vanilla"
    # An engine goes on from the plan's reason.
    reasons = [plan.reason, *(each.reason.removeprefix(plan.reason).removeprefix("; ") for each in stats)]
    if any(result.deadline_hit for result in results):
        reasons.append(f"cut at its deadline{plan.deadline}")
    if plan.adapted_from:
        reasons.append(f"this model was adapted from {plan.adapted_from}: its answers are its own")
    return DecodingReport(
        method=method if stats else plan.method,
        heads=max((each.num_heads for each in stats), default=plan.num_heads),
        nodes=max((each.max_nodes for each in stats), default=0),
        steps=steps,
        accepted_tokens_per_step=round(emitted / steps, 4) if steps else 0.0,
        drafted_tokens=sum(each.drafted_tokens for each in stats),
        accepted_draft_tokens=sum(each.accepted_draft_tokens for each in stats),
        accepted_lookup_tokens=sum(each.accepted_lookup_tokens for each in stats),
        drafted_grammar_tokens=sum(each.drafted_grammar_tokens for each in stats),
        accepted_grammar_tokens=sum(each.accepted_grammar_tokens for each in stats),
        speedup_estimate=round(weighted / steps, 4) if steps else 1.0,
        lossless=plan.acceptance == "exact" and all(each.lossless for each in stats),
        reason="; ".join(dict.fromkeys(reason for reason in reasons if reason)),
        rule=plan.rule,
        policy_version=plan.policy_version,
        adapted_from=plan.adapted_from or None,
    )


def trace_of(choice: int, chunk: TokenChunk) -> list[TracedStep]:
    """The steps behind a chunk; none where the request did not ask for them."""
    return [TracedStep(choice, each.step, each.rows, each.nodes, each.ms, list(each.tokens)) for each in chunk.trace]


def whole_report(plan: DecodingPlan, results: Sequence[ChoiceResult], *, trace: bool) -> DecodingReport:
    """The report of an answer that is not streamed, for its client alone: no record keeps the trace."""
    report = decoding_report(plan, results)
    if trace:
        report.trace = [
            step for choice, each in enumerate(results) for chunk in each.chunks for step in trace_of(choice, chunk)
        ]
    return report


def note_results(record: RequestRecord, results: Sequence[ChoiceResult], prompts: int) -> None:
    """The answer to ``prompts`` is complete."""
    record.cached_tokens = cached_tokens(results, prompts)
    record.sequences = tuple(result.stats for result in results if result.stats is not None)
    record.output_tokens = sum(result.num_tokens for result in results)
    record.deadline_cut = any(result.deadline_hit for result in results)
    record.finish_reasons = tuple(result.finish_reason for result in results)
    record.completed = True
    if record.content is not None:
        record.content["gen_ai.output.messages"] = [result.text for result in results]
