"""Limits of one engine."""

from __future__ import annotations

from dataclasses import dataclass

PREFIX_CACHES = ("tenant", "shared", "none")


@dataclass(frozen=True)
class EngineConfig:
    """``max_rows``: rows of one step. ``prefill_rows``: rows that waiting prompts get in any case.

    ``proposals``: guesses kept per head. ``prefix_cache``: whether prompts that begin alike share what is computed of
    them: within a tenant, between all, or not at all. Not where several engines take turns on one runner: none knows
    what the others write. ``spare_pages``: free pages that each running sequence keeps others from being let in by; the
    fewer, the more often one that was let in loses its memory again.
    """

    max_model_len: int
    max_running: int = 32
    max_rows: int = 256
    prefill_rows: int = 64
    proposals: int = 10
    prefix_cache: str = "none"
    spare_pages: int = 1
    eos_token_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if self.max_running + self.prefill_rows > self.max_rows:
            raise ValueError("max_rows must hold max_running and prefill_rows")
        if self.prefix_cache not in PREFIX_CACHES:
            raise ValueError(f"prefix_cache is {self.prefix_cache!r}; it can be {', '.join(PREFIX_CACHES)}")
