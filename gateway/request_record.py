"""The record of a request that telemetry is made from, where whatever handles the request finds it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import TypeVar

from litestar.types import Scope

from gateway.wire.errors import APIError
from gateway.wire.requests import GenerationFields
from telemetry.request import RequestRecord

T = TypeVar("T")

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


async def noting_failure(chunks: AsyncGenerator[T, None], record: RequestRecord) -> AsyncGenerator[T, None]:
    """The same chunks. A stream that breaks has its status already: only its record can still say so."""
    try:
        async for chunk in chunks:
            yield chunk
    except APIError as error:
        record.error = error.code or error.type
        raise
