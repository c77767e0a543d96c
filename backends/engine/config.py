"""Limits of one engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineConfig:
    """``max_rows``: rows of one step. ``prefill_rows``: rows that waiting prompts get in any case.

    ``proposals``: guesses kept per head.
    """

    max_model_len: int
    max_running: int = 32
    max_rows: int = 256
    prefill_rows: int = 64
    proposals: int = 10
    eos_token_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if self.max_running + self.prefill_rows > self.max_rows:
            raise ValueError("max_rows must hold max_running and prefill_rows")
