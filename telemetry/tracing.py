"""From the record of a request to its spans, made when it is over, of times that were taken as it went by."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer

from backends.types import GenerationStats
from telemetry.attributes import FALLBACK_EVENT
from telemetry.attributes import Attributes as A
from telemetry.request import PROVIDER, RequestRecord

MOST_SEQUENCES = 16
"""Sequences of one request with spans of their own."""


@dataclass(frozen=True, slots=True)
class ChildSpan:
    """``events``: when, name and attributes."""

    name: str
    began: float
    ended: float
    attributes: Mapping[str, Any] = field(default_factory=dict)
    events: tuple[tuple[float, str, Mapping[str, Any]], ...] = ()


@dataclass(frozen=True, slots=True)
class Epoch:
    """Turns monotonic seconds into the nanoseconds since 1970 that spans have."""

    monotonic: float
    wall_ns: int

    @classmethod
    def now(cls, clock: Callable[[], float] = time.monotonic) -> Epoch:
        return cls(clock(), time.time_ns())

    def ns(self, at: float) -> int:
        return self.wall_ns + round((at - self.monotonic) * 1e9)


def start_server_span(tracer: Tracer, record: RequestRecord, parent: Context, epoch: Epoch) -> trace.Span:
    """The span of the request itself; what the sampler may look at is known."""
    return tracer.start_span(
        f"POST {record.route}",
        context=parent,
        kind=SpanKind.SERVER,
        start_time=epoch.ns(record.arrived),
        attributes={
            "http.request.method": "POST",
            "http.route": record.route,
            "gen_ai.operation.name": record.operation,
            "gen_ai.provider.name": PROVIDER,
        },
    )


def start_client_span(tracer: Tracer, record: RequestRecord, backend: str, url: str, upstream_model: str) -> trace.Span:
    """The span of one request to an upstream, below the present one."""
    address = urlsplit(url)
    return tracer.start_span(
        f"{record.operation} {upstream_model}",
        kind=SpanKind.CLIENT,
        attributes=_known(
            {
                A.BACKEND: backend,
                "http.request.method": "POST",
                "server.address": address.hostname,
                "server.port": address.port or (443 if address.scheme == "https" else 80),
                "gen_ai.operation.name": record.operation,
                "gen_ai.request.model": upstream_model,
            }
        ),
    )


def end_client_span(span: trace.Span, outcome: str, *, failed: bool) -> None:
    span.set_attribute(A.OUTCOME, outcome)
    if failed:
        span.set_attribute("error.type", outcome)
        span.set_status(Status(StatusCode.ERROR, outcome))
    span.end()


def end_server_span(tracer: Tracer, span: trace.Span, context: Context, record: RequestRecord, epoch: Epoch) -> None:
    """Add the children and all that is known by now; nothing of it for a span that is not sampled."""
    if span.is_recording():
        for child in child_spans(record):
            made = tracer.start_span(
                child.name, context=context, start_time=epoch.ns(child.began), attributes=child.attributes
            )
            for at, name, attributes in child.events:
                made.add_event(name, attributes, epoch.ns(at))
            made.end(epoch.ns(child.ended))
        if record.model:
            span.update_name(f"{record.operation} {record.model}")
        span.set_attributes(server_attributes(record))
        if record.status >= 500 or (record.error is not None and record.status == 200):
            span.set_status(Status(StatusCode.ERROR, record.error))
    span.end(epoch.ns(record.ended))


def server_attributes(record: RequestRecord) -> dict[str, Any]:
    """By the conventions for HTTP and GenAI; without prompts, answers and stop strings."""
    return _known(
        {
            "http.response.status_code": record.status,
            "error.type": record.error,
            A.REQUEST_ID: record.request_id,
            A.TENANT: record.tenant or None,
            A.BACKEND: record.backend or None,
            A.ATTEMPTS: tuple(f"{each.backend}: {each.outcome or 'abandoned'}" for each in record.attempts) or None,
            A.UPSTREAM_ARM: None if record.arm is None else record.arm[0],
            A.UPSTREAM_ARM_RULE: None if record.arm is None else record.arm[1],
            "gen_ai.request.model": record.model or None,
            **record.asked,
            "gen_ai.response.model": record.model if record.answer_id else None,
            "gen_ai.response.id": record.answer_id or None,
            "gen_ai.response.finish_reasons": record.finish_reasons or None,
            "gen_ai.usage.input_tokens": record.prompt_tokens or None,
            "gen_ai.usage.output_tokens": record.output_tokens or None,
            "gen_ai.response.time_to_first_chunk": None
            if record.first_token_at is None
            else record.first_token_at - record.arrived,
            A.SEQUENCES: len(record.sequences) or None,
            A.CLASS: record.class_name if record.decision is not None else None,
            A.RULE: record.plan.rule if record.plan is not None else None,
        }
    )


def child_spans(record: RequestRecord) -> Iterator[ChildSpan]:
    """classify, decide, and for each sequence queue, prefill and decode, as far as the request came."""
    if record.classified is not None:
        attributes = {A.CLASS: record.class_name, A.CLASS_SOURCE: record.class_source}
        yield ChildSpan("classify", *record.classified, attributes)
    if record.decided is not None:
        yield ChildSpan("decide", *record.decided, decide_attributes(record))
    for choice, stats in enumerate(record.sequences[:MOST_SEQUENCES]):
        yield from _sequence_spans(record, choice, stats)
    if record.plan is not None and not record.sequences and record.first_token_at is not None and not record.completed:
        # The client left in the middle of an engine's answer, and took the engine's counts with it.
        yield ChildSpan("decode", record.first_token_at, record.ended, {"error.type": record.error or "aborted"})


def decide_attributes(record: RequestRecord) -> dict[str, Any]:
    """What was decided, why, and on which statistics of what age."""
    decision, plan, stats = record.decision, record.plan, record.stats
    found: dict[str, Any] = {A.CLASS: record.class_name}
    # The plan knows of the client's wishes too; an upstream's answer has none.
    if (why := plan or decision) is not None:
        found |= {A.RULE: why.rule, A.REASON: why.reason, A.POLICY_VERSION: why.policy_version}
    if decision is not None:
        found |= {
            A.ARM: decision.group,
            A.PLAN_TEMPERATURE: decision.temperature,
            A.STATS_SOURCE: decision.stats_source,
            A.STATS_AGE: decision.stats_age_s,
        }
    if record.deadline is not None:
        found[A.DEADLINE], found[A.DEADLINE_OF] = record.deadline
    if record.control_share is not None:
        found[A.CONTROL_SHARE] = record.control_share
    if plan is not None:
        found |= {
            A.PLAN_METHOD: plan.method,
            A.PLAN_HEADS: plan.num_heads,
            A.PLAN_MAX_NODES: plan.max_nodes,
            A.PLAN_TREE: None if plan.tree is None else str([list(path) for path in plan.tree.nodes]),
            A.PLAN_ACCEPTANCE: plan.acceptance,
        }
    if stats is not None:
        found |= {
            A.STATS_STEPS: stats.steps,
            A.STATS_SPEEDUP: stats.speedup,
            A.STATS_ACCEPTANCE_RATE: stats.acceptance_rate,
            A.STATS_TOKENS_PER_STEP: stats.tokens_per_step,
            A.STATS_HEAD_ACCURACY: tuple(ranks[0] for ranks in stats.accuracies if ranks) or None,
        }
    return _known(found)


def decode_attributes(stats: GenerationStats) -> dict[str, Any]:
    return {
        A.PLAN_METHOD: stats.method,
        A.STEPS: stats.steps,
        A.MEDUSA_STEPS: stats.medusa_steps,
        A.DRAFTED: stats.drafted_tokens,
        A.ACCEPTED: stats.accepted_draft_tokens,
        A.EMITTED: stats.emitted_tokens,
        A.SPEEDUP: stats.speedup_estimate,
        A.REASON: stats.reason,
    }


def _sequence_spans(record: RequestRecord, choice: int, stats: GenerationStats) -> Iterator[ChildSpan]:
    """What the engine did not come to, or did not time (a remote one doesn't), has no span."""
    which = {A.CHOICE: choice}
    ended = record.ended if stats.finished_at is None else stats.finished_at
    if record.submitted_at is not None and (stats.admitted_at is not None or stats.first_token_at is None):
        left = ended if stats.admitted_at is None else max(stats.admitted_at, record.submitted_at)
        yield ChildSpan("queue", record.submitted_at, left, which)
    if stats.admitted_at is not None:
        prefilled = ended if stats.first_token_at is None else stats.first_token_at
        yield ChildSpan("prefill", stats.admitted_at, prefilled, {**which, A.PROMPT_TOKENS: record.prompt_tokens})
    began = record.first_token_at if stats.first_token_at is None else stats.first_token_at
    if began is None:
        return
    attributes = {**which, **decode_attributes(stats)}
    if choice < len(record.finish_reasons):
        attributes[A.FINISH_REASON] = record.finish_reasons[choice]
    events = [(at, FALLBACK_EVENT, {A.REASON: "drafts did not pay in this sequence"}) for at in stats.paused_at]
    if stats.behind_at is not None:
        events.append((stats.behind_at, FALLBACK_EVENT, {A.REASON: "behind its deadline"}))
    if record.decision is not None:
        stages = [stage for stage in record.decision.stages if stage.name == "fallback" and stage.value == "vanilla"]
        events = [*((began, FALLBACK_EVENT, {A.REASON: stage.reason}) for stage in stages), *events]
    yield ChildSpan("decode", began, ended, attributes, tuple(events))


def _known(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if value is not None}
