"""When a request that has a deadline stops speculating because of it. Pure; the engine asks before every step."""

from __future__ import annotations

from dataclasses import dataclass

LEAST_TOKENS = 8
"""Tokens after the first before a pace is one."""
CLEAR_GAIN = 1.05
"""Drafts are kept by a request that is behind only where they shorten its way: speedup estimates this near 1 don't."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How far an answer has come: ``tokens`` after its first, in ``elapsed_s``; ``to_come`` is what ``max_tokens``
    leaves, so an upper bound; ``speedup`` what its drafts have measured so far, 1 without any."""

    elapsed_s: float
    tokens: int
    to_come: int
    left_s: float
    speedup: float


@dataclass(frozen=True, slots=True)
class Behind:
    """A request that won't end before its deadline if it goes on as it has. ``vanilla``: it drafts no more."""

    vanilla: bool
    reason: str


def behind(pace: Pace) -> Behind | None:
    """None while the tokens to come, at the pace so far, are done in time, or while there is no pace yet.

    A request that is behind goes vanilla at once, without the patience that :mod:`backends.speculation.backoff` has
    with drafts; unless these have clearly made it faster, for then vanilla decoding would put it further behind.
    """
    if pace.tokens < LEAST_TOKENS:
        return None
    token_s = pace.elapsed_s / pace.tokens
    if pace.to_come * token_s <= pace.left_s:
        return None
    reason = (
        f"behind its deadline: up to {pace.to_come} tokens to come at {token_s * 1e3:.1f} ms each, "
        f"{max(pace.left_s, 0.0):.2f} s left"
    )
    if pace.speedup >= CLEAR_GAIN:
        return Behind(False, f"{reason}; drafts go on, as they make it {pace.speedup:.2f} times as fast")
    return Behind(True, f"{reason}; vanilla from there on, as drafts measured {pace.speedup:.2f}")
