"""What is believed of one statistics key: slow enough to be steady, and quick to follow a shift of traffic. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from policy.statistics.counters import Tally

FAST_HALF_LIFE = 50.0
SLOW_HALF_LIFE = 2000.0
"""In steps, not seconds: a quiet class keeps what it knows, a busy one renews it within moments."""
PRIOR_STEPS = 200.0
"""What a prior from earlier days may count for; a few seconds of traffic outweigh it."""
SETTLING_STEPS = 150.0
"""After a shift the short memory alone is believed for so many steps in which the heads were asked: at first it still
holds much of what was before."""
_SHIFT_SIGMAS = 4.0
_SHIFT_MIN_ATTEMPTS = 30.0


@dataclass(frozen=True, slots=True)
class Estimate:
    """Two decayed sums. When recent steps contradict the long memory, the memory is dropped."""

    fast: Tally = field(default_factory=Tally)
    slow: Tally = field(default_factory=Tally)
    updated_at: float = 0.0
    shifts: int = 0
    from_prior: bool = False
    settling: float = 0.0

    @classmethod
    def from_past(cls, prior: Tally, now: float) -> Estimate:
        """Start from an earlier day's sums, at a weight that present traffic soon outgrows."""
        weight = min(1.0, PRIOR_STEPS / prior.steps) if prior.steps > 0 else 0.0
        return cls(slow=prior.scaled(weight), updated_at=now, from_prior=True)

    def updated(self, delta: Tally, now: float) -> Estimate:
        """With the counts of some more steps."""
        fast = _faded(self.fast, delta, FAST_HALF_LIFE).plus(delta)
        if self.settling > 0:
            return Estimate(fast, fast, now, self.shifts, settling=self.settling - _asked(delta))
        slow = _faded(self.slow, delta, SLOW_HALF_LIFE).plus(delta)
        if shifted(fast, slow):
            return Estimate(fast, fast, now, self.shifts + 1, settling=SETTLING_STEPS)
        return Estimate(fast, slow, now, self.shifts, self.from_prior and slow.steps < 2 * PRIOR_STEPS)


def shifted(fast: Tally, slow: Tally) -> bool:
    """Whether the guesses of recent steps were right more or less often than chance can explain."""
    recent, past = sum(fast.attempts), sum(slow.attempts)
    if recent < _SHIFT_MIN_ATTEMPTS or past <= recent:
        return False
    hit = [sum(map(sum, tally.hits)) for tally in (fast, slow)]
    pooled = min(hit[1] / past, 1.0)
    # Half a hit keeps a rate of exactly 0 or 1 from making any difference infinitely unlikely.
    spread = math.sqrt(max(pooled * (1 - pooled), 0.5 / past) * (1 / recent + 1 / past))
    return abs(hit[0] / recent - hit[1] / past) > _SHIFT_SIGMAS * spread


def _faded(memory: Tally, delta: Tally, half_life: float) -> Tally:
    """``memory`` after the steps of ``delta``. What is known of the heads fades by how often they were asked: where the
    engine asks them in one step of many, all that is known would otherwise be gone before the next answer."""
    return memory.scaled(0.5 ** (delta.steps / half_life), 0.5 ** (_asked(delta) / half_life))


def _asked(delta: Tally) -> float:
    return max(delta.attempts, default=0.0)
