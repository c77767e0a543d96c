"""A request that an upstream answers: the policy's part of it, the wire, and the response."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec
from litestar import Request
from litestar.response.base import ASGIResponse

from gateway.admission import Ticket
from gateway.auth.charging import charge
from gateway.request_record import note_asked, record_of
from gateway.serving.generation import unless_disconnected
from gateway.serving.pipeline import Call, Routed, deadline_of, facts_of
from gateway.serving.planning import refuse_what_policy_forbids
from gateway.serving.state import GatewayState
from gateway.serving.streaming import noting_failure
from gateway.upstream.backend import UpstreamBackend
from gateway.upstream.chunk import Chunk
from gateway.upstream.errors import UpstreamFailure
from gateway.upstream.payload import decoding_wishes, payload
from gateway.upstream.relay import CutAtDeadline, Gathered, GatheredChoice, Identity, RelayWriter, relayed_events
from gateway.upstream.stream import UpstreamAnswer
from gateway.upstream.tally import Tally
from gateway.wire.errors import APIError, ClientDisconnected, shutting_down
from gateway.wire.event_stream import EventStream
from gateway.wire.request_id import request_id_of
from gateway.wire.responses import RemoteReport
from gateway.wire.validation import requested_max_tokens, sampling_params
from policy.decision import Decision
from policy.records import DecisionRecord
from policy.spec import RequestFacts
from telemetry.request import RequestRecord

HOPS_HEADER = "x-medusa-hops"
MAX_HOPS = 4
"""Gateways that a request may pass: two that name each other as upstreams would otherwise never let go of it."""


def hops_of(request: Request[Any, Any, Any]) -> int:
    """How many gateways the request has come through."""
    given = request.headers.get(HOPS_HEADER, "0")
    return int(given) if given.isascii() and given.isdecimal() and len(given) < 4 else 0


async def answer_remotely(
    call: Call, backend: UpstreamBackend, routed: Routed, request: Request[Any, Any, Any], gateway: GatewayState
) -> ASGIResponse:
    """Have ``backend`` answer, and pass its answer on under our model name.

    As with engines, a stream's response starts with the first chunk that says something. Raises
    :class:`UpstreamFailure` for what another backend may do better.
    """
    body = call.body
    arrived = gateway.clock()
    # What contradicts itself is refused here, in our words, whichever backend would see it.
    sampling_params(body, backend.info, gateway.settings, call.logprobs)
    max_tokens = requested_max_tokens(body)
    record = record_of(request.scope)
    note_asked(record, body, None if max_tokens is None else max_tokens[1])
    answer_id = record.answer_id = call.id_prefix + gateway.new_id()
    deciding = gateway.telemetry.clock()
    facts, decision = decide_remotely(call, backend, routed.class_name, answer_id, request, gateway)
    record.decision, record.decided = decision, (deciding, gateway.telemetry.clock())
    report = report_of(backend, decision, routed.why)
    temperature = decision.temperature if body.temperature is not None or _set_by_policy(decision) else None
    path, sent = payload(body, call.prompt, backend.spec.dialect, backend.spec.upstream_model, temperature)
    hops = {HOPS_HEADER: str(hops_of(request) + 1), "x-request-id": request_id_of(request.scope, gateway.new_id)}
    # The upstream's spans become children of ours, or of the client's where we have none.
    gateway.telemetry.pass_on(hops)
    ticket = gateway.admission.admit(call.sequences, backend.places)
    tally = Tally(sum(call.estimated_tokens))
    most = max_tokens[1] if max_tokens else gateway.settings.default_max_tokens
    try:
        await charge(
            request.scope,
            gateway.access,
            ticket,
            prompt_tokens=tally.estimated_prompt,
            answer_tokens=most * call.sequences,
            named=max_tokens is not None,
        )
        if ticket.aborted:
            # The drain ran out of patience while the key's limits were asked.
            raise shutting_down()
        answer = UpstreamAnswer(backend, path, sent, hops, call.sequences)
    except BaseException:
        ticket.close()
        raise

    def close() -> None:
        answer.close()
        ticket.close()

    try:
        ticket.on_abort = answer.abort_for_shutdown
        gateway.controller.record(
            DecisionRecord(answer_id, facts, decision, gateway.wall_clock(), msgspec.to_builtins(report)),
            request_id_of(request.scope, gateway.new_id),
        )
        deadline_s = deadline_of(body, gateway.settings, decision)
        cut = CutAtDeadline()
        chunks = _counted(noting_failure(answer.chunks(), record), tally, ticket, record, gateway.telemetry.clock)
        record.submitted_at = gateway.telemetry.clock()
        if deadline_s is not None:
            chunks = _until(chunks, max(deadline_s - (gateway.clock() - arrived), 0.0), cut)
        created = int(gateway.wall_clock())
        if not body.stream:
            identity = Identity(answer_id, call.chunk_object.removesuffix(".chunk"), created, backend.model)
            try:
                gathered = await unless_disconnected(request.receive, _gather(chunks, call.sequences, tally))
            except ClientDisconnected:
                raise
            except APIError:
                # Nobody is given half an answer, so nobody pays for one.
                ticket.used_tokens = None
                raise
            report = cut.shown_in(gathered.report(report))
            gateway.controller.decisions.finish(answer_id, report)
            record.completed = True
            _pay_for_the_prompt(ticket, tally)
            close()
            return ASGIResponse(body=gathered.body(identity, report), media_type="application/json", status_code=200)

        def ended(report: RemoteReport) -> None:
            gateway.controller.decisions.finish(answer_id, report)
            record.completed = True

        options = body.stream_options
        writer = RelayWriter(
            Identity(answer_id, call.chunk_object, created, backend.model),
            report,
            call.sequences,
            tally,
            include_usage=bool(options and options.include_usage),
            continuous_usage=bool(options and options.continuous_usage_stats),
            on_end=ended,
        )
        first = await unless_disconnected(request.receive, _first(chunks))
        _pay_for_the_prompt(ticket, tally)
        return EventStream(relayed_events(first, chunks, writer, close, cut), close=close)
    except BaseException:
        close()
        raise


def explain_remotely(
    call: Call, backend: UpstreamBackend, routed: Routed, request: Request[Any, Any, Any], gateway: GatewayState
) -> dict[str, Any]:
    """What would be done with the request if ``backend`` answered it; see ``POST /v1/decoding/explain``."""
    sampling_params(call.body, backend.info, gateway.settings, call.logprobs)
    requested_max_tokens(call.body)
    facts, decision = decide_remotely(call, backend, routed.class_name, "explain", request, gateway, dry=True)
    return {
        "facts": {name: getattr(facts, name) for name in type(facts).__slots__ if name != "request_id"},
        "decision": decision.as_dict(),
        "plan": msgspec.to_builtins(report_of(backend, decision, routed.why)),
        "statistics": None,
    }


def decide_remotely(
    call: Call,
    backend: UpstreamBackend,
    class_name: str,
    answer_id: str,
    request: Request[Any, Any, Any],
    gateway: GatewayState,
    *,
    dry: bool = False,
) -> tuple[RequestFacts, Decision]:
    """The policy's word on temperature and deadline, which hold for whoever decodes. How it decodes is not ours."""
    candidate = backend.candidate(call.body)
    facts = facts_of(
        call.body,
        class_name,
        answer_id,
        request,
        backend.info,
        prompt_tokens=max(call.estimated_tokens, default=0),
        load=candidate.load,
    )
    decision = gateway.controller.decide(facts, dry=dry)
    if call.body.decoding is not None:
        # What the policy forbids a client is not to be had by way of an upstream either.
        refuse_what_policy_forbids(call.body.decoding, decoding_wishes(call.body.decoding), decision)
    return facts, decision


def report_of(backend: UpstreamBackend, decision: Decision, why: str | None) -> RemoteReport:
    reasons = [f"{backend.model} is served by the upstream '{backend.name}', which decodes as it will"]
    reasons += [stage.reason for stage in decision.stages if stage.name in ("rule", "temperature")]
    return RemoteReport(
        backend=backend.name,
        upstream_model=backend.spec.upstream_model,
        reason="; ".join([*reasons, *([why] if why else [])]),
        rule=decision.rule,
        policy_version=decision.policy_version,
    )


def _set_by_policy(decision: Decision) -> bool:
    return any(stage.name == "temperature" for stage in decision.stages)


async def _counted(
    chunks: AsyncGenerator[Chunk, None],
    tally: Tally,
    ticket: Ticket,
    record: RequestRecord,
    clock: Callable[[], float],
) -> AsyncGenerator[Chunk, None]:
    """The same chunks; what they cost is kept where the key's limits and the request's record find it."""
    reasons: dict[int, str] = {}
    async for chunk in chunks:
        tally.take(chunk)
        ticket.used_tokens = tally.tokens
        record.prompt_tokens, record.output_tokens = tally.prompt_tokens, tally.answer_tokens
        if chunk.begins and record.first_token_at is None:
            record.first_token_at = clock()
        ends = {choice.index: choice.finish_reason for choice in chunk.choices if choice.finish_reason is not None}
        if ends:
            reasons |= ends
            record.finish_reasons = tuple(reasons[index] for index in sorted(reasons))
        yield chunk


def _pay_for_the_prompt(ticket: Ticket, tally: Tally) -> None:
    """Of an answer whose deadline came before its first word."""
    if ticket.used_tokens is None:
        ticket.used_tokens = tally.tokens


async def _gather(chunks: AsyncGenerator[Chunk, None], sequences: int, tally: Tally) -> Gathered:
    gathered = Gathered([GatheredChoice() for _ in range(sequences)], tally)
    async for chunk in chunks:
        gathered.take(chunk)
    return gathered


async def _first(chunks: AsyncGenerator[Chunk, None]) -> Chunk:
    async for chunk in chunks:
        return chunk
    raise UpstreamFailure("The upstream ended this request without an answer.")


async def _until(
    chunks: AsyncGenerator[Chunk, None], seconds: float, cut: CutAtDeadline
) -> AsyncGenerator[Chunk, None]:
    """The same chunks, up to a moment; after it one that is empty, so that there is a first chunk in any case."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    try:
        while True:
            async with asyncio.timeout_at(end):
                chunk = await anext(chunks)
            yield chunk
    except StopAsyncIteration:
        return
    except TimeoutError:
        cut.hit = True
        yield Chunk()
