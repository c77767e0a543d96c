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
class RequestRecord:
    """Times are of ``time.monotonic``, in seconds. What a request did not come to stays at its default.

    ``asked``: attributes of what the client asked for; ``error``: the code of the error that it was told, ``param`` the
    field that it names;
    ``first_token_at``: of the sequence that was first. ``content``: prompt and answers, only where the operator wants
    them logged.
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
    submitted_at: float | None = None
    first_token_at: float | None = None
    output_tokens: int = 0
    finish_reasons: tuple[str, ...] = ()
    sequences: tuple[GenerationStats, ...] = ()
    completed: bool = False
    content: dict[str, Any] | None = None

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
