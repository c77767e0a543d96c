"""Whether drafting pays at all in a batch of this size. The heads cost time too, so they are not run where it doesn't.

The planner (:mod:`backends.speculation.tree_builder`) decides how many candidates are worth their rows *after* the
heads have spoken. This gate decides whether to ask them. It starts from the accuracies measured in training and the
cost table, and then follows what steps of that size have really gained.
"""

from __future__ import annotations

from collections.abc import Sequence

from backends.cost.step_cost import StepCost
from backends.tree import best_first_paths

_OPEN_AT, _CLOSE_AT = 1.02, 1.0
_MEMORY = 0.05
_PROBE_MEMORY = 0.25
_PROBE_EVERY = 64
# Open, so many steps apart two go without the heads: the second is a vanilla step throughout, for calibration. More
# often at first, when nothing is known.
_FIRST_REFERENCE, _REFERENCE_EVERY, _REFERENCE_STEPS = 16, 128, 2
_NODES_CONSIDERED = 8


class DraftGate:
    """One estimate of speedup for each power of two of concurrently decoding sequences.

    Closed, it lets one step in :data:`_PROBE_EVERY` through, to notice when the traffic has changed. Open, it holds a
    step back now and then, so that :class:`backends.cost.calibration.Calibration` sees both kinds side by side.
    ``accuracies[h][r]`` as in :meth:`CandidateTree.from_accuracies`; empty: open everywhere at first.
    """

    def __init__(self, cost: StepCost, accuracies: Sequence[Sequence[float]] = ()) -> None:
        self._cost, self._accuracies = cost, accuracies
        self._speedup: dict[int, float] = {}
        self._open: dict[int, bool] = {}
        self._denied: dict[int, int] = {}
        self._allowed: dict[int, int] = {}
        self._reference_after: dict[int, int] = {}
        self._observed: set[int] = set()

    def use_cost(self, cost: StepCost) -> None:
        """A better table: what was concluded from the last one alone is forgotten, what steps have shown is not."""
        self._cost = cost
        for bucket in self._speedup.keys() - self._observed:
            del self._speedup[bucket]
            self._open.pop(bucket, None)

    def speedup(self, sequences: int) -> float:
        """The present estimate for a batch of this size."""
        bucket = self._bucket(sequences)
        estimate = self._speedup.get(bucket)
        if estimate is None:
            estimate = self._speedup[bucket] = self._prior(sequences)
        return estimate

    def allows(self, sequences: int) -> bool:
        """Whether the heads should run for the next step of ``sequences`` decoding sequences."""
        bucket = self._bucket(sequences)
        if self.is_open(sequences):
            return not self._is_reference(bucket)
        self._denied[bucket] = self._denied.get(bucket, 0) + 1
        return self._denied[bucket] % _PROBE_EVERY == 0

    def is_open(self, sequences: int) -> bool:
        """Whether drafting is thought to pay in a batch of this size."""
        bucket = self._bucket(sequences)
        is_open = self._open.get(bucket)
        if is_open is None:
            is_open = self._open[bucket] = self.speedup(sequences) >= _CLOSE_AT
        return is_open

    def observe(self, sequences: int, *, accepted: int, vanilla_ms: float, step_ms: float) -> None:
        """A step with proposals: ``accepted`` draft tokens over all its sequences, and what it cost by the table."""
        bucket = self._bucket(sequences)
        self._observed.add(bucket)
        gained = (sequences + accepted) / sequences * vanilla_ms / step_ms
        is_open = self._open.get(bucket, True)
        memory = _MEMORY if is_open else _PROBE_MEMORY
        estimate = self.speedup(sequences)
        estimate += memory * (gained - estimate)
        self._speedup[bucket] = estimate
        self._open[bucket] = estimate >= (_CLOSE_AT if is_open else _OPEN_AT)

    def _is_reference(self, bucket: int) -> bool:
        after = self._reference_after.get(bucket, _FIRST_REFERENCE)
        count = self._allowed[bucket] = self._allowed.get(bucket, 0) + 1
        if count == after + _REFERENCE_STEPS:
            self._allowed[bucket] = 0
            self._reference_after[bucket] = min(2 * after, _REFERENCE_EVERY)
        return count > after

    def _prior(self, sequences: int) -> float:
        if not self._accuracies:
            return _OPEN_AT
        _, survival = best_first_paths(self._accuracies, _NODES_CONSIDERED)
        vanilla, heads = self._cost.forward_ms(sequences), self._cost.heads_ms(sequences)
        best, tokens = vanilla / (vanilla + heads), 1.0
        for nodes, probability in enumerate(survival, start=1):
            tokens += probability
            best = max(best, tokens * vanilla / (self._cost.forward_ms(sequences * (1 + nodes)) + heads))
        return best

    @staticmethod
    def _bucket(sequences: int) -> int:
        return sequences.bit_length()
