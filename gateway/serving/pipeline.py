"""One request from its typed body to its response: admission, tokens, plan, engine, answer. The endpoints share it."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from litestar import Request
from litestar.response.base import ASGIResponse

from backends.types import DecodingPlan, GenerationRequest, ModelInfo, SamplingParams, TokenChunk
from gateway.admission import Ticket
from gateway.auth.charging import charge, refuse_early
from gateway.request_record import note_asked, record_of
from gateway.serving.controller import Controller
from gateway.serving.generation import Generation, unless_disconnected
from gateway.serving.planning import arm_of, plan_for, prompt_to_classify, turn_of
from gateway.serving.results import ChoiceResult, collect, decoding_report, note_results
from gateway.serving.state import GatewayState
from gateway.serving.streaming import ChoiceWriter, StreamWriter, events, noting_failure
from gateway.serving.targets import EngineBackend, ServedModel
from gateway.settings import GatewaySettings
from gateway.wire.errors import EngineFailure, InvalidRequest
from gateway.wire.event_stream import EventStream
from gateway.wire.request_id import request_id_of
from gateway.wire.requests import GenerationFields
from gateway.wire.validation import choice_seed, requested_max_tokens, sampling_params, token_budget
from policy.decision import Decision
from policy.records import DecisionRecord
from policy.spec import RequestFacts
from policy.statistics.snapshot import KeyStats
from telemetry.request import RequestRecord

INLINE_LOGPROBS = 1000
"""Up to so many in an answer, alternatives included, are written on the event loop."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What identifies a response and goes into its every chunk."""

    id: str
    created: int
    model: str
    prompt_tokens: int
    plan: DecodingPlan


@dataclass(frozen=True, slots=True)
class Routed:
    """Where a request of ``class_name`` goes, and why; ``why`` None: the model has one backend, so there is no why."""

    class_name: str
    why: str | None = None


@dataclass(frozen=True, slots=True)
class Planned:
    """A request's facts, the policy's decision on them, and the plan that came of it and of the client's wishes."""

    facts: RequestFacts
    decision: Decision
    plan: DecodingPlan
    stats_key: str
    stats: KeyStats | None = None
    """What the decision looked at, as it was then."""

    def as_dict(self) -> dict[str, Any]:
        plan = self.plan
        return {
            "method": plan.method,
            "heads": plan.num_heads,
            "max_nodes": plan.max_nodes,
            "tree": None if plan.tree is None else [list(path) for path in plan.tree.nodes],
            "acceptance": plan.acceptance,
            "temperature": self.decision.temperature,
            "rule": plan.rule,
            "reason": plan.reason,
            "policy_version": plan.policy_version,
            "stats_key": self.stats_key,
        }


class Call(ABC):
    """What differs between the endpoints. Made from a validated body; ``prompts`` counts prompts, not choices.

    Knows no backend: the same call may be tried on several.
    """

    id_prefix: ClassVar[str]
    chunk_object: ClassVar[str]
    prompt_field: ClassVar[str]
    continues: ClassVar[bool] = False
    """Whether an answer goes on from its prompt's text."""
    body: GenerationFields
    prompts: int
    logprobs: int | None
    prompt: Any
    """What is to be answered, as an upstream is sent it: plain messages, or ``prompt`` as it came."""
    estimated_tokens: list[int]
    """Of each prompt: exact for token ids, a guess by length for text."""

    @property
    def sequences(self) -> int:
        """How many places the request needs."""
        return self.prompts * (self.body.n or 1)

    @abstractmethod
    async def encode(self, served: ServedModel, inline_chars: int) -> Sequence[tuple[int, ...]]:
        """Token ids of each prompt."""

    @abstractmethod
    def choice_writer(self) -> ChoiceWriter:
        """The writer of one streamed choice."""

    @abstractmethod
    def response(self, answer: Answer, results: Sequence[ChoiceResult]) -> bytes:
        """The whole body of a response that is not streamed."""


async def answer_call(
    call: Call,
    backend: EngineBackend,
    routed: Routed,
    request: Request[Any, Any, Any],
    gateway: GatewayState,
) -> ASGIResponse:
    """Run ``call`` on an engine of this process and answer it, streamed or not.

    A stream's response starts only with its first chunk: until then a failure still gets its proper status, and a
    load balancer may still send the request elsewhere.
    """
    arrived = gateway.clock()
    body, served = call.body, backend.served
    info = served.decoder.info
    sampling = sampling_params(body, info, gateway.settings, call.logprobs)
    max_tokens = requested_max_tokens(body)
    record = record_of(request.scope)
    note_asked(record, body, None if max_tokens is None else max_tokens[1])
    # Before a place is taken: what can't be planned at all is refused first, then whom the limits keep out anyway.
    plan_for(body.decoding, info)
    refuse_early(request.scope, gateway.access)
    ticket = gateway.admission.admit(call.sequences, backend.places)
    try:
        prompts = await call.encode(served, gateway.settings.inline_tokenize_chars)
        budgets = [
            token_budget(max_tokens, sampling.min_tokens, len(ids), info, gateway.settings, call.prompt_field)
            for ids in prompts
        ]
        prompt_tokens = sum(len(ids) for ids in prompts)
        await charge(
            request.scope,
            gateway.access,
            ticket,
            prompt_tokens=prompt_tokens,
            answer_tokens=sum(budgets) * (body.n or 1),
            named=max_tokens is not None,
        )
        answer_id = call.id_prefix + gateway.new_id()
        deciding = gateway.telemetry.clock()
        planned = plan_call(call, served, routed.class_name, prompts, answer_id, request, gateway)
        if routed.why is not None:
            planned = replace(planned, plan=replace(planned.plan, reason=f"{planned.plan.reason}; {routed.why}"))
        answer = Answer(
            id=answer_id,
            created=int(gateway.wall_clock()),
            model=info.name,
            prompt_tokens=prompt_tokens,
            plan=planned.plan,
        )
        record.decided = deciding, gateway.telemetry.clock()
        record.decision, record.plan, record.stats = planned.decision, planned.plan, planned.stats
        record.answer_id, record.prompt_tokens = answer_id, answer.prompt_tokens
        seed = gateway.new_seed() if body.seed is None else body.seed
        deadline_s = deadline_of(body, gateway.settings, planned.decision)
        if deadline_s is not None:
            deadline_s = max(deadline_s - (gateway.clock() - arrived), 0.0)
        sampling = replace(sampling, temperature=planned.decision.temperature)
        seeds = seeds_of(seed, len(prompts), body.n or 1, given=body.seed is not None)
        sequences = _sequences(
            answer_id, prompts, budgets, sampling, seeds, planned, deadline_s, continues=call.continues
        )
        gateway.controller.record(
            DecisionRecord(answer_id, planned.facts, planned.decision, gateway.wall_clock(), planned.as_dict()),
            request_id_of(request.scope, gateway.new_id),
        )
        record.submitted_at = gateway.telemetry.clock()
        return await _run(call, served, answer, sequences, ticket, request, gateway)
    except BaseException:
        ticket.close()
        raise


def class_of(body: GenerationFields, controller: Controller) -> str:
    """The class that the client names, or the classifier. Raises :class:`InvalidRequest` for one that is none."""
    hint = body.decoding.class_ if body.decoding else None
    if hint is not None and hint not in controller.known_classes:
        raise InvalidRequest(
            f"'decoding.class' is '{hint}', which is no class of the policy; use one of: "
            f"{', '.join(controller.known_classes)}.",
            param="decoding.class",
        )
    return hint or controller.class_of(prompt_to_classify(body))


def facts_of(
    body: GenerationFields,
    class_name: str,
    answer_id: str,
    request: Request[Any, Any, Any],
    info: ModelInfo,
    *,
    prompt_tokens: int,
    load: float,
) -> RequestFacts:
    """What a policy may ask of a request."""
    return RequestFacts(
        request_id=answer_id,
        model=info.name,
        class_name=class_name,
        # Set by whatever authenticates requests; without it there is one tenant, without a name.
        tenant=request.scope.get("state", {}).get("tenant", ""),
        turn=turn_of(body),
        prompt_tokens=prompt_tokens,
        temperature=body.temperature,
        load=load,
        model_heads=info.num_heads,
    )


def plan_call(
    call: Call,
    served: ServedModel,
    class_name: str,
    prompts: Sequence[tuple[int, ...]],
    answer_id: str,
    request: Request[Any, Any, Any],
    gateway: GatewayState,
    *,
    dry: bool = False,
) -> Planned:
    """Decide, and put the client's own wishes in. ``dry``: only asked; nothing is remembered of it.

    Several prompts of one request are decoded by one plan, that of the first; the longest counts as their length.
    """
    body, decoder, controller = call.body, served.decoder, gateway.controller
    load = decoder.load()
    facts = facts_of(
        body,
        class_name,
        answer_id,
        request,
        decoder.info,
        prompt_tokens=max(len(ids) for ids in prompts),
        load=(load.running + load.waiting) / max(load.max_running, 1),
    )
    decision = controller.decide(facts, dry=dry)
    plan = replace(plan_for(body.decoding, decoder.info, decision), adapted_from=decoder.info.adapted_from)
    arm = arm_of(plan, decision)
    stats = controller.statistics.live.find(facts.model, facts.class_name, decision.bucket)
    return Planned(facts, decision, plan, controller.stats_key(facts, decision.bucket, arm), stats)


async def _run(
    call: Call,
    served: ServedModel,
    answer: Answer,
    sequences: list[GenerationRequest],
    ticket: Ticket,
    request: Request[Any, Any, Any],
    gateway: GatewayState,
) -> ASGIResponse:
    controller = gateway.controller
    client_id, record = request_id_of(request.scope, gateway.new_id), record_of(request.scope)
    generation = Generation(served.decoder, sequences, ticket, client_id)
    ticket.used_tokens = answer.prompt_tokens
    try:
        if not call.body.stream:
            results = await unless_disconnected(request.receive, collect(generation, len(sequences)))
            generation.close()
            controller.decisions.finish(answer.id, decoding_report(answer.plan, results))
            note_results(record, results)
            body = await _whole_body(call, answer, results)
            return ASGIResponse(body=body, media_type="application/json", status_code=200)
        options = call.body.stream_options
        writer = StreamWriter(
            response_id=answer.id,
            object_name=call.chunk_object,
            created=answer.created,
            model=answer.model,
            include_usage=bool(options and options.include_usage),
            continuous_usage=bool(options and options.continuous_usage_stats),
            prompt_tokens=answer.prompt_tokens,
            plan=answer.plan,
            writers=[call.choice_writer() for _ in sequences],
        )
        chunks = noting_failure(generation.chunks(), record)
        chunks = _with_outcome(chunks, answer, len(sequences), controller, record)
        first = await unless_disconnected(request.receive, _first(chunks))
        record.first_token_at = gateway.telemetry.clock()
        return EventStream(events(first, chunks, writer, generation), close=generation.close)
    except BaseException:
        generation.close()
        raise


def seeds_of(seed: int, prompts: int, n: int, *, given: bool) -> list[int]:
    """The seed of each choice of each prompt.

    Where the client gave the seed, a prompt's answer doesn't depend on its neighbours in the list. Else all are
    independent samples, also those to the same prompt.
    """
    return [
        choice_seed(seed, choice if given else prompt * n + choice) for prompt in range(prompts) for choice in range(n)
    ]


async def _whole_body(call: Call, answer: Answer, results: list[ChoiceResult]) -> bytes:
    """In a thread where there are many log probabilities to write: they take a time that streams would notice."""
    written = sum(len(result.logprobs) for result in results) * (1 + (call.logprobs or 0))
    if written <= INLINE_LOGPROBS:
        return call.response(answer, results)
    return await asyncio.to_thread(call.response, answer, results)


def _sequences(
    response_id: str,
    prompts: Sequence[tuple[int, ...]],
    budgets: Sequence[int],
    sampling: SamplingParams,
    seeds: Sequence[int],
    planned: Planned,
    deadline_s: float | None,
    *,
    continues: bool,
) -> list[GenerationRequest]:
    """One engine request per choice, prompt by prompt, as OpenAI numbers them."""
    n = len(seeds) // len(prompts)
    return [
        GenerationRequest(
            request_id=response_id if len(seeds) == 1 else f"{response_id}-{index}",
            prompt_token_ids=prompts[index // n],
            sampling=replace(sampling, max_tokens=budgets[index // n], seed=seed),
            plan=planned.plan,
            deadline_s=deadline_s,
            stats_key=planned.stats_key,
            continues=continues,
        )
        for index, seed in enumerate(seeds)
    ]


def deadline_of(body: GenerationFields, settings: GatewaySettings, decision: Decision) -> float | None:
    """The client may shorten the operator's deadline, never lengthen it; nor may a policy lengthen the flag's."""
    asked = body.decoding.deadline_ms if body.decoding else None
    limits = (settings.deadline_s, decision.deadline_s, asked / 1000 if asked else None)
    return min((limit for limit in limits if limit is not None), default=None)


async def _with_outcome(
    chunks: AsyncGenerator[tuple[int, TokenChunk], None],
    answer: Answer,
    count: int,
    controller: Controller,
    record: RequestRecord,
) -> AsyncGenerator[tuple[int, TokenChunk], None]:
    """The same chunks; the books of a stream are closed with its last one."""
    results = [ChoiceResult() for _ in range(count)]
    left = count
    async for index, chunk in chunks:
        if record.content is not None:
            results[index].keep(chunk)
        if chunk.finish_reason is not None:
            results[index].note(chunk)
            left -= 1
            if left == 0:
                controller.decisions.finish(answer.id, decoding_report(answer.plan, results))
                note_results(record, results)
        yield index, chunk


async def _first(chunks: AsyncIterator[tuple[int, TokenChunk]]) -> tuple[int, TokenChunk]:
    async for item in chunks:
        return item
    raise EngineFailure("The engine ended this request without an answer.")
