"""One request from its typed body to its response: admission, tokens, plan, engine, answer. The endpoints share it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from litestar import Request
from litestar.response.base import ASGIResponse

from backends.types import DecodingPlan, GenerationRequest, SamplingParams, TokenChunk
from gateway.admission import Ticket
from gateway.errors import EngineFailure
from gateway.generation import Generation, unless_disconnected
from gateway.openai_types import GenerationFields
from gateway.planning import plan_for
from gateway.results import ChoiceResult, collect
from gateway.settings import GatewaySettings
from gateway.state import GatewayState, ServedModel
from gateway.streaming import ChoiceWriter, EventStream, StreamWriter, events
from gateway.validation import choice_seed, requested_max_tokens, sampling_params, token_budget


@dataclass(frozen=True, slots=True)
class Answer:
    """What identifies a response and goes into its every chunk."""

    id: str
    created: int
    model: str
    prompt_tokens: int
    plan: DecodingPlan


class Call(ABC):
    """What differs between the endpoints. Made from a validated body; ``prompts`` counts prompts, not choices."""

    id_prefix: ClassVar[str]
    chunk_object: ClassVar[str]
    prompt_field: ClassVar[str]
    body: GenerationFields
    served: ServedModel
    prompts: int
    logprobs: int | None

    @abstractmethod
    async def encode(self, inline_chars: int) -> Sequence[tuple[int, ...]]:
        """Token ids of each prompt."""

    @abstractmethod
    def choice_writer(self) -> ChoiceWriter:
        """The writer of one streamed choice."""

    @abstractmethod
    def response(self, answer: Answer, results: Sequence[ChoiceResult]) -> bytes:
        """The whole body of a response that is not streamed."""


async def answer_call(call: Call, request: Request[Any, Any, Any], gateway: GatewayState) -> ASGIResponse:
    """Run ``call`` and answer it, streamed or not.

    A stream's response starts only with its first chunk: until then a failure still gets its proper status, and a
    load balancer may still send the request elsewhere.
    """
    arrived = gateway.clock()
    body, info = call.body, call.served.decoder.info
    sampling = sampling_params(body, info, gateway.settings, call.logprobs)
    max_tokens = requested_max_tokens(body)
    plan = plan_for(body.decoding, info)
    ticket = gateway.admission.admit(call.prompts * (body.n or 1))
    try:
        prompts = await call.encode(gateway.settings.inline_tokenize_chars)
        budgets = [
            token_budget(max_tokens, sampling.min_tokens, len(ids), info, gateway.settings, call.prompt_field)
            for ids in prompts
        ]
        answer = Answer(
            id=call.id_prefix + gateway.new_id(),
            created=int(gateway.wall_clock()),
            model=info.name,
            prompt_tokens=sum(len(ids) for ids in prompts),
            plan=plan,
        )
        seed = gateway.new_seed() if body.seed is None else body.seed
        deadline_s = _deadline_s(body, gateway.settings)
        if deadline_s is not None:
            deadline_s = max(deadline_s - (gateway.clock() - arrived), 0.0)
        sequences = _sequences(answer.id, prompts, budgets, sampling, seed, body.n or 1, plan, deadline_s)
        return await _run(call, answer, sequences, ticket, request)
    except BaseException:
        ticket.close()
        raise


async def _run(
    call: Call,
    answer: Answer,
    sequences: list[GenerationRequest],
    ticket: Ticket,
    request: Request[Any, Any, Any],
) -> ASGIResponse:
    generation = Generation(call.served.decoder, sequences, ticket)
    try:
        if not call.body.stream:
            results = await unless_disconnected(request.receive, collect(generation, len(sequences)))
            generation.close()
            return ASGIResponse(body=call.response(answer, results), media_type="application/json", status_code=200)
        options = call.body.stream_options
        writer = StreamWriter(
            response_id=answer.id,
            object_name=call.chunk_object,
            created=answer.created,
            model=answer.model,
            include_usage=bool(options and options.include_usage),
            prompt_tokens=answer.prompt_tokens,
            plan=answer.plan,
            writers=[call.choice_writer() for _ in sequences],
        )
        chunks = generation.chunks()
        first = await unless_disconnected(request.receive, _first(chunks))
        return EventStream(events(first, chunks, writer, generation), close=generation.close)
    except BaseException:
        generation.close()
        raise


def _sequences(
    response_id: str,
    prompts: Sequence[tuple[int, ...]],
    budgets: Sequence[int],
    sampling: SamplingParams,
    seed: int,
    n: int,
    plan: DecodingPlan,
    deadline_s: float | None,
) -> list[GenerationRequest]:
    """One engine request per choice, prompt by prompt, as OpenAI numbers them."""
    single = len(prompts) * n == 1
    return [
        GenerationRequest(
            request_id=response_id if single else f"{response_id}-{prompt * n + choice}",
            prompt_token_ids=ids,
            sampling=replace(sampling, max_tokens=budget, seed=choice_seed(seed, choice)),
            plan=plan,
            deadline_s=deadline_s,
        )
        for prompt, (ids, budget) in enumerate(zip(prompts, budgets, strict=True))
        for choice in range(n)
    ]


def _deadline_s(body: GenerationFields, settings: GatewaySettings) -> float | None:
    """The client may shorten the operator's deadline, never lengthen it."""
    asked = body.decoding.deadline_ms if body.decoding else None
    limits = [limit for limit in (settings.deadline_s, asked / 1000 if asked else None) if limit is not None]
    return min(limits, default=None)


async def _first(chunks: AsyncIterator[tuple[int, TokenChunk]]) -> tuple[int, TokenChunk]:
    async for item in chunks:
        return item
    raise EngineFailure("The engine ended this request without an answer.")
