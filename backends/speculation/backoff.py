"""When one sequence stops drafting, and when it tries again. Pure bookkeeping, one object per sequence."""

from __future__ import annotations

from dataclasses import dataclass

# About the last twenty-five steps count: one step accepts anything from nothing to all, so a shorter memory pauses on
# bad luck. For the same reason a loss must be clear.
_DECAY = 0.96
_CLEAR_LOSS = 0.93
_PRIOR_TOKENS = 4.0
_STEPS_BEFORE_JUDGING = 6
_FIRST_PAUSE = 8
_LONGEST_PAUSE = 128


@dataclass(slots=True)
class Speculation:
    """The record of one sequence's drafts.

    ``trust`` corrects the heads' probabilities by what this text has shown. When the estimated speedup of recent steps
    falls clearly below 1 the sequence decodes vanilla for a pause, which doubles every time a new try fails as well.
    """

    enabled: bool
    _expected: float = 0.0
    _accepted: float = 0.0
    _gain: float = 0.0
    _cost: float = 0.0
    _judged: int = 0
    _pause_left: int = 0
    _next_pause: int = _FIRST_PAUSE
    pauses: int = 0

    @property
    def trust(self) -> float:
        return (self._accepted + _PRIOR_TOKENS) / (self._expected + _PRIOR_TOKENS)

    @property
    def wants_proposals(self) -> bool:
        """Whether the heads should run for this sequence at the end of the present step."""
        return self.enabled and self._pause_left <= 1

    def rest(self) -> None:
        """A step without proposals has passed."""
        if self._pause_left:
            self._pause_left -= 1

    def observe(self, *, expected: float, accepted: int, vanilla_ms: float, step_ms: float) -> None:
        """A step with proposals: draft tokens expected and accepted; what the step and a vanilla one cost."""
        self._pause_left = 0
        self._expected = self._expected * _DECAY + expected
        self._accepted = self._accepted * _DECAY + accepted
        self._gain = self._gain * _DECAY + (1 + accepted) * vanilla_ms
        self._cost = self._cost * _DECAY + step_ms
        self._judged += 1
        if self._judged < _STEPS_BEFORE_JUDGING:
            return
        if self._gain < self._cost * _CLEAR_LOSS:
            self._pause_left, self._judged = self._next_pause, 0
            self._next_pause = min(self._next_pause * 2, _LONGEST_PAUSE)
            self._gain = self._cost = 0.0
            self.pauses += 1
        elif self._judged >= 4 * _STEPS_BEFORE_JUDGING:
            self._next_pause = _FIRST_PAUSE
