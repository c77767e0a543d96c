"""The record of a request that telemetry is made from, where whatever handles the request finds it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from litestar.types import Scope

from telemetry.request import RequestRecord

if TYPE_CHECKING:
    from gateway.serving.results import ChoiceResult
    from gateway.wire.requests import GenerationFields

_KEY = "request_record"


def keep_record(scope: Scope, record: RequestRecord) -> None:
    scope.setdefault("state", {})[_KEY] = record


def record_of(scope: Scope) -> RequestRecord:
    """The record of the request in ``scope``; for one that nobody observes, one that nobody reads."""
    return scope.get("state", {}).get(_KEY) or RequestRecord("", scope["path"], 0.0)


def note_asked(record: RequestRecord, body: GenerationFields, max_tokens: int | None) -> None:
    """What the client asked for, by the conventions' names. Neither prompt nor stop strings."""
    record.asked = {
        "gen_ai.request.max_tokens": max_tokens,
        "gen_ai.request.temperature": body.temperature,
        "gen_ai.request.top_p": body.top_p,
        "gen_ai.request.top_k": body.top_k,
        "gen_ai.request.presence_penalty": body.presence_penalty,
        "gen_ai.request.frequency_penalty": body.frequency_penalty,
        "gen_ai.request.seed": body.seed,
        "gen_ai.request.choice.count": body.n,
        "gen_ai.request.stream": bool(body.stream),
    }


def note_results(record: RequestRecord, results: Sequence[ChoiceResult]) -> None:
    """The answer is complete."""
    record.sequences = tuple(result.stats for result in results if result.stats is not None)
    record.output_tokens = sum(result.num_tokens for result in results)
    record.finish_reasons = tuple(result.finish_reason for result in results)
    record.completed = True
    if record.content is not None:
        record.content["gen_ai.output.messages"] = [result.text for result in results]
