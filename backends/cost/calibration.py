"""How far the cost table is from the clock, kept up to date while serving.

The table is measured at start, on an idle engine; a served step also plans, samples and formats, and a shared machine
changes from one second to the next. What decides about drafting is only whether steps with drafts are misjudged *more*
than steps without, so that is what is learned, from steps of both kinds that stand next to each other: whatever the
machine's mood, it is the same for both. :class:`backends.speculation.batch_gate.DraftGate` sees to it that both kinds
occur.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

_LEAST, _MOST = 0.8, 2.0
# Where steps change from one kind to the other, the first is compared with the median of the last few of the other.
# Medians of few, because single steps stall, and those of a minute ago were another machine's.
_BESIDE, _FEWEST_BESIDE, _BESIDE_WITHIN = 8, 3, 24
_PAIRS, _FEWEST_PAIRS = 15, 3
_MIN_ROW_COST_FACTOR, _MAX_ROW_COST_FACTOR = 0.5, 4.0
_MEMORY = 0.1
# Of the differences between neighbouring drafting steps: their memory, what is a stall, and what the pairs' word weighs
# against them, in squares of a vanilla step.
_SLOPE_DECAY, _STALL, _PRIOR_WEIGHT = 0.98, 0.4, 0.04


@dataclass(slots=True)
class _Size:
    """Steps of a size. ``recent``: number and ratio of the last ones of each kind; ``pairs``: drafting over vanilla;
    ``planned``: what drafting steps take by the table, over a vanilla step; ``last``: the last drafting step by table
    and clock; ``products``, ``squares``: of table differences with clock differences, and with themselves."""

    steps: int = 0
    drafting: bool | None = None
    recent: dict[bool, deque[tuple[int, float]]] = field(
        default_factory=lambda: {kind: deque(maxlen=_BESIDE) for kind in (False, True)}
    )
    pairs: deque[float] = field(default_factory=lambda: deque(maxlen=_PAIRS))
    factor: float | None = None
    planned: float | None = None
    last: tuple[float, float] | None = None
    products: float = 0.0
    squares: float = 0.0
    vanilla_ms: float = 0.0

    def compare(self, predicted_ms: float, measured_ms: float) -> None:
        """A drafting step with the one just before it: by how much the clock says that one more row is dearer."""
        if self.last is not None:
            planned, found = predicted_ms - self.last[0], measured_ms - self.last[1]
            if abs(found) < _STALL * self.last[1]:
                self.products = self.products * _SLOPE_DECAY + planned * found
                self.squares = self.squares * _SLOPE_DECAY + planned * planned
        self.last = (predicted_ms, measured_ms)


@dataclass(slots=True)
class Calibration:
    """What a drafting step takes over the table's word, relative to a vanilla step, by power of two of sequences.

    Switched off, the table's word stands: for comparisons that other work on the machine must not disturb.
    """

    enabled: bool = True
    start: Mapping[int, float] = field(default_factory=dict)
    """What an earlier run of this engine had :meth:`learned`; counts until this one knows better."""
    _sizes: dict[int, _Size] = field(default_factory=dict)

    def observe(
        self, sequences: int, *, drafting: bool, predicted_ms: float, measured_ms: float, vanilla_ms: float = 0.0
    ) -> None:
        """A step of one kind: with candidates (``drafting``), or with neither candidates nor heads; no prompt rows.

        ``vanilla_ms``: what a vanilla step takes by the table.
        """
        if not self.enabled or measured_ms <= 0.0 or predicted_ms <= 0.0:
            return  # a clock that stands still says nothing
        bucket = sequences.bit_length()
        size = self._sizes.get(bucket)
        if size is None:
            size = self._sizes[bucket] = _Size()
        ratio = min(max(measured_ms / predicted_ms, 1e-3), 1e3)
        size.steps += 1
        size.recent[drafting].append((size.steps, ratio))
        if drafting and predicted_ms > vanilla_ms > 0.0:
            planned = predicted_ms / vanilla_ms
            size.planned = planned if size.planned is None else size.planned + _MEMORY * (planned - size.planned)
            size.vanilla_ms = vanilla_ms
            size.compare(predicted_ms, measured_ms)
        else:
            size.last = None
        if drafting == size.drafting:
            return
        size.drafting = drafting
        others = [other for step, other in size.recent[not drafting] if size.steps - step <= _BESIDE_WITHIN]
        if len(others) >= _FEWEST_BESIDE:
            beside = median(others)
            size.pairs.append(ratio / beside if drafting else beside / ratio)
            if len(size.pairs) >= _FEWEST_PAIRS:
                size.factor = _clipped(median(size.pairs))

    def factor(self, sequences: int) -> float:
        """By ``start``, else 1, until steps of both kinds were seen side by side."""
        bucket = sequences.bit_length()
        size = self._sizes.get(bucket)
        if size is None or size.factor is None:
            return _clipped(self.start.get(bucket, 1.0))
        return size.factor

    def row_cost_factor(self, sequences: int) -> float:
        """What one more candidate takes, over what the table says.

        Told by the differences between neighbouring drafting steps, which had more or fewer of them. Where these differ
        little, by drafting and vanilla steps: if steps are planned at 1.2 vanilla steps and take 1.4, all that drafting
        adds costs twice what the table says.
        """
        size = self._sizes.get(sequences.bit_length())
        if size is None or size.planned is None:
            return 1.0
        of_pairs = (self.factor(sequences) * size.planned - 1.0) / max(size.planned - 1.0, 1e-3)
        of_pairs = min(max(of_pairs, _MIN_ROW_COST_FACTOR), _MAX_ROW_COST_FACTOR)
        weight = _PRIOR_WEIGHT * size.vanilla_ms * size.vanilla_ms
        wanted = (size.products + weight * of_pairs) / (size.squares + weight)
        return min(max(wanted, _MIN_ROW_COST_FACTOR), _MAX_ROW_COST_FACTOR)

    def learned(self) -> dict[int, float]:
        """Factors by power of two of sequences, where they rest on as many pairs as are kept. Safe from any thread."""
        sizes = list(self._sizes.items())
        return {bucket: size.factor for bucket, size in sizes if size.factor is not None and len(size.pairs) == _PAIRS}


def _clipped(factor: float) -> float:
    return min(max(factor, _LEAST), _MOST)
