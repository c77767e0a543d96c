"""How far the cost table is from the clock, kept up to date while serving.

The table is measured at start, on an idle engine; a served step also plans, samples and formats, and a shared machine
changes. What decides about drafting is only whether steps with drafts are misjudged *more* than steps without, so
that is what is learned: the ratio of two ratios, in which the machine's mood cancels out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

_MEMORY = 0.04
_LEAST, _MOST = 0.8, 2.0
_LEARNED_AFTER = 100
"""Steps of each kind after which a factor is worth keeping for the next start."""


@dataclass(slots=True)
class Calibration:
    """Measured over predicted time of decode steps, by power of two of decoding sequences, with and without drafts.

    Switched off, the table's word stands: for comparisons that other work on the machine must not disturb.
    """

    enabled: bool = True
    start: Mapping[int, float] = field(default_factory=dict)
    """What an earlier run of this engine had :meth:`learned`; counts until this one knows better."""
    _vanilla: dict[int, float] = field(default_factory=dict)
    _drafting: dict[int, float] = field(default_factory=dict)
    _any_vanilla: float | None = None
    _steps: dict[tuple[int, bool], int] = field(default_factory=dict)

    def observe(self, sequences: int, *, drafting: bool, predicted_ms: float, measured_ms: float) -> None:
        """A step without prompt rows. One stalled step counts no more than twice what was expected of it."""
        if not self.enabled or measured_ms <= 0.0 or predicted_ms <= 0.0:
            return  # a clock that stands still says nothing
        ratio, bucket = min(max(measured_ms / predicted_ms, 1e-3), 1e3), sequences.bit_length()
        book = self._drafting if drafting else self._vanilla
        known = book.get(bucket)
        self._steps[bucket, drafting] = self._steps.get((bucket, drafting), 0) + 1
        book[bucket] = ratio if known is None else known + _MEMORY * (min(ratio, 2.0 * known) - known)
        if not drafting:
            self._any_vanilla = book[bucket]

    def factor(self, sequences: int) -> float:
        """What a drafting step costs over the table's word, relative to vanilla; by ``start`` until both are known."""
        bucket = sequences.bit_length()
        drafting, vanilla = self._drafting.get(bucket), self._vanilla.get(bucket, self._any_vanilla)
        if drafting is None or vanilla is None:
            return min(max(self.start.get(bucket, 1.0), _LEAST), _MOST)
        return min(max(drafting / vanilla, _LEAST), _MOST)

    def learned(self) -> dict[int, float]:
        """Factors by power of two of sequences, where enough steps of both kinds were seen. Safe from any thread."""
        steps = dict(self._steps)
        known = [
            size
            for size, drafting in steps
            if drafting and min(steps[size, True], steps.get((size, False), 0)) >= _LEARNED_AFTER
        ]
        return {size: self.factor(1 << (size - 1)) for size in known}
