"""Upstreams that answer by a script under a clock of their own: nothing waits, and every figure is known beforehand."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.support.scripted_upstream import DONE, MODELS, event


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


class _Paced(httpx.AsyncByteStream):
    def __init__(self, upstream: PacedUpstream, prompt: int) -> None:
        self._upstream, self._prompt = upstream, prompt

    async def __aiter__(self) -> AsyncIterator[bytes]:
        upstream = self._upstream
        upstream.clock.now += upstream.first_s
        sent = 0
        while sent < upstream.tokens:
            if sent:
                upstream.clock.now += upstream.pace_s * min(upstream.a_chunk, upstream.tokens - sent)
            count = min(upstream.a_chunk if sent else 1, upstream.tokens - sent)
            yield event("word " * count)
            sent += count
        usage = {"prompt_tokens": self._prompt, "completion_tokens": sent, "total_tokens": self._prompt + sent}
        yield event(None, "stop") + b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n" + DONE


@dataclass
class PacedUpstream(httpx.AsyncBaseTransport):
    """``first_s`` to the first token, ``pace_s`` for each later one, ``a_chunk`` of them in a chunk. ``dead``: it can't
    be reached. ``metrics``: its exposition."""

    clock: Clock
    pace_s: float
    first_s: float = 0.1
    tokens: int = 33
    a_chunk: int = 1
    dead: bool = False
    metrics: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            body = self.metrics.encode() if request.url.path == "/metrics" else MODELS
            return httpx.Response(200, content=body)
        if self.dead:
            raise httpx.ConnectError("refused")
        self.requests.append(json.loads(await request.aread()))
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=_Paced(self, 20))
