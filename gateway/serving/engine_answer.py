"""A call that an engine of this process answers: its plan, its sequences, and the response."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

from backends.types import DecodingPlan, GenerationRequest, TokenChunk
from gateway.request_record import noting_failure
from gateway.serving.backend import Parameters, Prepared, Prompts
from gateway.serving.call import Answer, Call, ServedModel
from gateway.serving.generation import Generation
from gateway.serving.grammars import open_grammars
from gateway.serving.planning import arm_of, plan_for
from gateway.serving.results import ChoiceResult, collect, decoding_report, note_results
from gateway.serving.streaming import StreamWriter, events
from gateway.settings import GatewaySettings
from gateway.wire.errors import EngineFailure
from gateway.wire.validation import choice_seed, token_budget
from policy.decision import Decision
from policy.spec import RequestFacts
from policy.statistics.counters import StatsKey

INLINE_LOGPROBS = 1000
"""Up to so many in an answer, alternatives included, are written on the event loop."""

_Chunks = AsyncGenerator[tuple[int, TokenChunk], None]


async def measure(call: Call, served: ServedModel, parameters: Parameters, settings: GatewaySettings) -> Prompts:
    """Tokenise, see that every prompt leaves room for its answer, and open what the answers must look like."""
    token_ids = await call.encode(served, settings.inline_tokenize_chars)
    lengths = [len(ids) for ids in token_ids]
    budgets = [
        token_budget(
            parameters.max_tokens,
            parameters.sampling.min_tokens,
            length,
            served.decoder.info,
            settings,
            call.prompt_field,
        )
        for length in lengths
    ]
    grammars = await open_grammars(served, parameters.format, call.sequences)
    return Prompts(sum(lengths), max(lengths), sum(budgets) * (call.body.n or 1), token_ids, budgets, grammars)


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """``stats_key``: whose books the request's counters go to."""

    served: ServedModel
    decoding: DecodingPlan
    temperature: float
    stats_key: str
    tenant: str = ""

    @classmethod
    def of(
        cls, call: Call, served: ServedModel, facts: RequestFacts, decision: Decision, why: str | None
    ) -> EnginePlan:
        """Several prompts of one call are decoded by one plan. Raises :class:`InvalidRequest`."""
        info = served.decoder.info
        plan = plan_for(call.body.decoding, info, decision)
        reason = plan.reason if why is None else f"{plan.reason}; {why}"
        plan = replace(plan, adapted_from=info.adapted_from, reason=reason)
        key = StatsKey(facts.model, facts.class_name, decision.bucket, arm_of(plan, decision))
        return cls(served, plan, decision.temperature, key.encode(), facts.tenant)

    def as_dict(self) -> dict[str, Any]:
        plan = self.decoding
        return {
            "method": plan.method,
            "heads": plan.num_heads,
            "max_nodes": plan.max_nodes,
            "tree": None if plan.tree is None else [list(path) for path in plan.tree.nodes],
            "acceptance": plan.acceptance,
            "temperature": self.temperature,
            "rule": plan.rule,
            "reason": plan.reason,
            "policy_version": plan.policy_version,
            "stats_key": self.stats_key,
        }

    def start(self, prepared: Prepared) -> EngineAnswer:
        """Raises :class:`Unavailable` if the engine is gone."""
        prepared.record.prompt_tokens = prepared.prompts.total
        generation = Generation(self.served.decoder, self._sequences(prepared), prepared.ticket, prepared.request_id)
        # From here on the request has begun, so its prompt is paid for.
        prepared.ticket.used_tokens = prepared.prompts.total
        answer = Answer(
            id=prepared.answer_id,
            created=prepared.created,
            model=self.served.decoder.info.name,
            prompt_tokens=prepared.prompts.total,
            plan=self.decoding
            if prepared.deadline is None
            else replace(self.decoding, deadline=prepared.deadline.words),
        )
        return EngineAnswer(answer, generation, prepared)

    def _sequences(self, prepared: Prepared) -> list[GenerationRequest]:
        """One engine request per choice, prompt by prompt, as OpenAI numbers them."""
        call, prompts = prepared.call, prepared.prompts
        n = call.body.n or 1
        seeds = seeds_of(prepared.seed, len(prompts.token_ids), n, given=call.body.seed is not None)
        sampling = replace(prepared.parameters.sampling, temperature=self.temperature)
        return [
            GenerationRequest(
                request_id=prepared.answer_id if len(seeds) == 1 else f"{prepared.answer_id}-{index}",
                prompt_token_ids=prompts.token_ids[index // n],
                sampling=replace(sampling, max_tokens=prompts.budgets[index // n], seed=seed),
                plan=self.decoding,
                deadline_s=prepared.deadline_s,
                stats_key=self.stats_key,
                continues=call.continues,
                tenant=self.tenant,
                cache_salt=call.body.cache_salt or "",
                grammar=prompts.grammars[index] if prompts.grammars else None,
                trace=call.traced,
            )
            for index, seed in enumerate(seeds)
        ]


class EngineAnswer:
    """The generation of a call on its way to the client; see :class:`gateway.serving.backend.Running`."""

    def __init__(self, answer: Answer, generation: Generation, prepared: Prepared) -> None:
        self._answer = answer
        self._generation = generation
        self._prepared = prepared
        self._results: list[ChoiceResult] = []

    def close(self) -> None:
        record, ticket = self._prepared.record, self._prepared.ticket
        if not record.completed and ticket.used_tokens is not None:
            # It was cut: what it had come to was generated all the same.
            record.output_tokens = ticket.used_tokens - self._prepared.prompts.total
        self._generation.close()

    async def gather(self) -> None:
        self._results = await collect(self._generation, self._prepared.call.sequences)

    async def body(self) -> bytes:
        call = self._prepared.call
        written = sum(len(each.logprobs) + len(each.prompt_scores) for each in self._results) * (
            1 + (call.logprobs or 0)
        )
        if written <= INLINE_LOGPROBS:
            body = call.response(self._answer, self._results)
        else:
            # In a thread: writing many log probabilities takes a time that streams would notice.
            body = await asyncio.to_thread(call.response, self._answer, self._results)
        self._settle()
        return body

    async def begin(self) -> None:
        self._results = [ChoiceResult() for _ in range(self._prepared.call.sequences)]
        self._chunks = self._noted(noting_failure(self._generation.chunks(), self._prepared.record))
        self._first = await _first(self._chunks)
        self._prepared.record.first_token_at = self._prepared.telemetry.clock()

    def events(self) -> AsyncGenerator[bytes, None]:
        call, answer = self._prepared.call, self._answer
        options = call.body.stream_options
        writer = StreamWriter(
            response_id=answer.id,
            object_name=call.chunk_object,
            created=answer.created,
            model=answer.model,
            include_usage=bool(options and options.include_usage),
            continuous_usage=bool(options and options.continuous_usage_stats),
            prompt_tokens=answer.prompt_tokens,
            prompts=call.prompts,
            plan=answer.plan,
            writers=[call.choice_writer() for _ in range(call.sequences)],
            results=self._results,
        )
        return events(self._first, self._chunks, writer, self._generation, self._settle)

    async def _noted(self, chunks: _Chunks) -> _Chunks:
        """The same chunks of a stream."""
        record, clock = self._prepared.record, self._prepared.telemetry.clock
        async for index, chunk in chunks:
            record.said(clock())
            if record.content is not None:
                self._results[index].chunks.append(chunk)
            yield index, chunk

    def _settle(self) -> None:
        """Close the books. Only when the answer was read: whether it ends with calls of tools is in its text."""
        saved_s = sum(each.stats.saved_s for each in self._results if each.stats is not None)
        self._prepared.settle(decoding_report(self._answer.plan, self._results), saved_s)
        note_results(self._prepared.record, self._results, self._prepared.call.prompts)


def seeds_of(seed: int, prompts: int, n: int, *, given: bool) -> list[int]:
    """The seed of each choice of each prompt.

    Where the client gave the seed, a prompt's answer doesn't depend on its neighbours in the list. Else all are
    independent samples, also those to the same prompt.
    """
    return [
        choice_seed(seed, choice if given else prompt * n + choice) for prompt in range(prompts) for choice in range(n)
    ]


async def _first(chunks: AsyncIterator[tuple[int, TokenChunk]]) -> tuple[int, TokenChunk]:
    async for item in chunks:
        return item
    raise EngineFailure("The engine ended this request without an answer.")
