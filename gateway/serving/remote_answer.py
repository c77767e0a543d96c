"""A call that an upstream answers: the policy's part of it, the wire, and the response."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.admission import Ticket
from gateway.request_record import noting_failure
from gateway.serving.arms import ChosenArm
from gateway.serving.backend import Parameters, Prepared, Prompts
from gateway.serving.call import Call
from gateway.serving.planning import refuse_what_policy_forbids
from gateway.settings import GatewaySettings
from gateway.upstream.backend import UpstreamBackend
from gateway.upstream.chunk import Chunk
from gateway.upstream.errors import UpstreamFailure
from gateway.upstream.knobs import knobs
from gateway.upstream.meter import Meter
from gateway.upstream.payload import decoding_wishes, payload
from gateway.upstream.relay import CutAtDeadline, Gathered, GatheredChoice, Identity, RelayWriter, relayed_events
from gateway.upstream.stream import OnEnd, UpstreamAnswer
from gateway.upstream.tally import Tally
from gateway.wire.errors import APIError, shutting_down
from gateway.wire.hops import HOPS_HEADER
from gateway.wire.responses import RemoteReport
from policy.decision import Decision
from telemetry.request import RequestRecord
from telemetry.service import OutgoingCall


def measure(call: Call, parameters: Parameters, settings: GatewaySettings) -> Prompts:
    """By length: the upstream's tokenizer is not known here."""
    most = settings.default_max_tokens if parameters.most_tokens is None else parameters.most_tokens
    tokens = call.estimated_tokens
    return Prompts(sum(tokens), max(tokens, default=0), most * call.sequences)


@dataclass(frozen=True, slots=True)
class RemotePlan:
    """The policy's word on temperature and deadline holds for whoever decodes. How it decodes is not ours.

    ``temperature`` None: the upstream's default. ``report``: what is said of it beside the answer. ``knobs``: what it
    is told of drafting. ``arm``: why it was chosen among those that decode differently.
    """

    backend: UpstreamBackend
    temperature: float | None
    report: RemoteReport
    knobs: Mapping[str, Any]
    arm: ChosenArm | None = None

    decoding = None

    @classmethod
    def of(
        cls, call: Call, backend: UpstreamBackend, decision: Decision, why: str | None, arm: ChosenArm | None = None
    ) -> RemotePlan:
        """Raises :class:`InvalidRequest`."""
        body = call.body
        if body.decoding is not None:
            # What the policy forbids a client is not to be had by way of an upstream either.
            refuse_what_policy_forbids(body.decoding, decoding_wishes(body.decoding), decision)
        set_here = body.temperature is not None or any(stage.name == "temperature" for stage in decision.stages)
        told = knobs(backend.spec.dialect, backend.spec.variant, decision)
        if body.decoding is not None and "decoding" in told and decoding_wishes(body.decoding):
            told = {}
        report = report_of(backend, decision, why, arm, told)
        return cls(backend, decision.temperature if set_here else None, report, told, arm)

    def as_dict(self) -> dict[str, Any]:
        return msgspec.to_builtins(self.report)

    def start(self, prepared: Prepared) -> RemoteAnswer:
        """Raises :class:`UpstreamFailure` for what another backend may do better."""
        if prepared.ticket.aborted:
            # The drain ran out of patience while the key's limits were asked.
            raise shutting_down()
        call, spec = prepared.call, self.backend.spec
        path, sent = payload(call.body, call.prompt, spec.dialect, spec.upstream_model, self.temperature, self.knobs)
        headers = {HOPS_HEADER: str(prepared.hops + 1), "x-request-id": prepared.request_id}
        permit = self.backend.begin()
        # The upstream's spans become children of ours, or of the client's where we have none.
        out = prepared.telemetry.call_out(
            prepared.record, self.backend.name, spec.url, spec.upstream_model or self.backend.model, headers
        )
        meter = None
        if self.arm is not None:
            meter = Meter(self.backend.clock, Tally(prepared.prompts.total), call.sequences)
            prepared.record.arm = self.arm.choice.name, self.arm.choice.rule
        ended = _ended(out, self.arm, meter)
        answer = UpstreamAnswer(self.backend, permit, path, sent, headers, call.sequences, meter=meter, on_end=ended)
        prepared.ticket.on_abort = answer.abort_for_shutdown
        return RemoteAnswer(answer, self.report, self.backend.model, prepared)


def _ended(out: OutgoingCall, arm: ChosenArm | None, meter: Meter | None) -> OnEnd:
    def end(error: APIError | None, outcome: str) -> None:
        out.end(outcome, failed=error is not None)
        if arm is None or meter is None:
            return
        if isinstance(error, UpstreamFailure) and error.at_fault:
            arm.note(None)
        elif outcome == "completed" and (measured := meter.result()) is not None:
            arm.note(measured)

    return end


def report_of(
    backend: UpstreamBackend, decision: Decision, why: str | None, arm: ChosenArm | None, told: Mapping[str, Any]
) -> RemoteReport:
    how = "which decodes as it will" if arm is None else f"of arm '{arm.choice.name}': {arm.choice.reason}"
    reasons = [f"{backend.model} is served by the upstream '{backend.name}', {how}"]
    if told:
        reasons.append("the policy's bounds on drafting were sent with it")
    reasons += [stage.reason for stage in decision.stages if stage.name in ("rule", "temperature")]
    return RemoteReport(
        backend=backend.name,
        upstream_model=backend.spec.upstream_model,
        reason="; ".join([*reasons, *([why] if why else [])]),
        rule=decision.rule,
        policy_version=decision.policy_version,
        arm=None if arm is None else arm.report,
        sent=dict(told),
        engine=backend.engine_report(),
    )


class RemoteAnswer:
    """An upstream's answer on its way to the client, under our model name; a :class:`gateway.serving.backend.Running`.

    From the moment it exists, its ticket is its own to close.
    """

    def __init__(self, answer: UpstreamAnswer, report: RemoteReport, model: str, prepared: Prepared) -> None:
        self._answer = answer
        self._report = report
        self._model = model
        self._prepared = prepared
        self._tally = Tally(prepared.prompts.total)
        self._cut = CutAtDeadline("" if prepared.deadline is None else prepared.deadline.words)
        record = prepared.record
        chunks = noting_failure(answer.chunks(), record)
        self._chunks = _counted(chunks, self._tally, prepared.ticket, record, prepared.telemetry.clock)
        if prepared.deadline_s is not None:
            self._chunks = _until(self._chunks, prepared.deadline_s, self._cut)

    def close(self) -> None:
        self._answer.close()
        self._prepared.ticket.close()

    async def gather(self) -> None:
        gathered = Gathered([GatheredChoice() for _ in range(self._prepared.call.sequences)], self._tally)
        try:
            async for chunk in self._chunks:
                gathered.take(chunk)
        except APIError:
            # Nobody is given half an answer, so nobody pays for one.
            self._prepared.ticket.used_tokens = None
            raise
        self._pay_for_the_prompt()
        self._gathered = gathered

    async def body(self) -> bytes:
        report = self._cut.shown_in(self._gathered.report(self._report))
        self._settle(report)
        return self._gathered.body(self._identity(self._prepared.call.chunk_object.removesuffix(".chunk")), report)

    async def begin(self) -> None:
        self._first = await _first(self._chunks)
        self._pay_for_the_prompt()

    def events(self) -> AsyncGenerator[bytes, None]:
        call = self._prepared.call
        options = call.body.stream_options
        writer = RelayWriter(
            self._identity(call.chunk_object),
            self._report,
            call.sequences,
            self._tally,
            include_usage=bool(options and options.include_usage),
            continuous_usage=bool(options and options.continuous_usage_stats),
            on_end=self._settle,
        )
        return relayed_events(self._first, self._chunks, writer, self.close, self._cut)

    def _identity(self, object_name: str) -> Identity:
        return Identity(self._prepared.answer_id, object_name, self._prepared.created, self._model)

    def _settle(self, report: RemoteReport) -> None:
        self._prepared.record.deadline_cut = self._cut.hit
        self._prepared.settle(report, 0.0)
        self._prepared.record.completed = True

    def _pay_for_the_prompt(self) -> None:
        """Of an answer whose deadline came before its first word."""
        ticket = self._prepared.ticket
        if ticket.used_tokens is None:
            ticket.used_tokens = self._tally.tokens


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
        now = clock()
        if chunk.begins and record.first_token_at is None:
            record.first_token_at = now
        record.said(now)
        ends = {choice.index: choice.finish_reason for choice in chunk.choices if choice.finish_reason is not None}
        if ends:
            reasons |= ends
            record.finish_reasons = tuple(reasons[index] for index in sorted(reasons))
        yield chunk


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
