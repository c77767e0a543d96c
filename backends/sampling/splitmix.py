"""SplitMix64 (Steele, Lea, Flood 2014): neighbouring inputs give unrelated outputs. Free of torch."""

from __future__ import annotations

MASK_64 = 2**64 - 1
GOLDEN_GAMMA = 0x9E3779B97F4A7C15
"""The generator's step from state to state."""


def splitmix64(state: int) -> int:
    """The number that follows ``state``, between 0 and 2**64 - 1. Of ``state`` only its 64 lowest bits count."""
    state = (state + GOLDEN_GAMMA) & MASK_64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK_64
    return state ^ (state >> 31)
