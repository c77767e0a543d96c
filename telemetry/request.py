"""What is known of a request: filled in as it goes by, and turned into spans, figures and a log line at its end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from backends.types import DecodingPlan, GenerationStats
from policy.decision import Decision
from policy.statistics.snapshot import KeyStats

PROVIDER = "medusa-gateway"
"""``gen_ai.provider.name``: who answers."""
LEFT = "client_disconnected"
"""``error.type`` of an answer that nobody was left to read."""

Span = tuple[float, float]
"""When something began and ended."""


@dataclass(slots=True)
class Attempt:
    """A request to an upstream. ``outcome``: completed, abandoned, or the code of the error; empty while it runs."""

    backend: str
    outcome: str = ""


@dataclass(slots=True)
class RequestRecord:
    """Times are of ``time.monotonic``, in seconds. What a request did not come to stays at its default.

    ``asked``: attributes of what the client asked for; ``error``: the code of the error that it was told, ``param`` the
    field that it names;
    ``first_token_at``: of the sequence that was first. ``tenant``: the name of the API key, ``backend``: the last that
    was asked, ``attempts``: requests to upstreams, in their order. ``longest_gap`` between two pieces of a stream, the
    last of which came at ``said_at``. ``deadline``: seconds, and who set it; ``deadline_cut``: it ended the answer.
    ``cached_tokens``: of the prompts', those found in an engine's cache.
    ``control_share``: of the requests of the class that decode vanilla to compare with. ``content``: prompt and
    answers, only where the operator wants them logged. ``arm``: of the upstreams that decode differently, which one
    answered, and by which rule.
    """

    operation: str
    route: str
    arrived: float
    request_id: str = ""
    ended: float = 0.0
    status: int = 200
    error: str | None = None
    param: str = ""
    model: str = ""
    asked: Mapping[str, Any] = field(default_factory=dict)
    classified: Span | None = None
    class_name: str = "unclassified"
    class_source: str = ""
    decided: Span | None = None
    decision: Decision | None = None
    plan: DecodingPlan | None = None
    stats: KeyStats | None = None
    answer_id: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    submitted_at: float | None = None
    first_token_at: float | None = None
    output_tokens: int = 0
    finish_reasons: tuple[str, ...] = ()
    sequences: tuple[GenerationStats, ...] = ()
    completed: bool = False
    tenant: str = ""
    backend: str = ""
    attempts: list[Attempt] = field(default_factory=list)
    longest_gap: float | None = None
    said_at: float | None = None
    deadline_cut: bool = False
    deadline: tuple[float, str] | None = None
    control_share: float | None = None
    content: dict[str, Any] | None = None
    arm: tuple[str, str] | None = None

    def said(self, now: float) -> None:
        """A piece of a stream is ready to go out."""
        if self.said_at is not None:
            self.longest_gap = max(self.longest_gap or 0.0, now - self.said_at)
        self.said_at = now

    @property
    def outcome(self) -> str:
        """Whose doing the end was, one of :data:`telemetry.catalog.OUTCOMES`."""
        if self.error is None and self.status < 400:
            return "ok"
        if self.error == LEFT:
            return "left"
        if self.status in (401, 403):
            return "unauthorized"
        if self.status == 429:
            return "limited"
        return "client_error" if 400 <= self.status < 500 else "server_error"

    def close(self, now: float) -> None:
        """The response is over, one way or the other."""
        self.ended = now
        if self.completed:
            # Of a backend that failed before another took over, say.
            self.error, self.param = None, ""
        if not self.completed and self.error is None and self.submitted_at is not None:
            self.error = LEFT
        starts = [stats.first_token_at for stats in self.sequences if stats.first_token_at is not None]
        if starts:
            self.first_token_at = min(starts)
