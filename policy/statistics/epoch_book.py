"""A replica's own counters by epoch: what it owes the store, and what it has counted since it started.

Each (replica, epoch, key) is a register that only its replica writes and whose value only grows. Writing a register
again changes nothing, and a reader that sums the registers of all replicas counts every step exactly once, however
often a write was retried (a grow-only counter: Shapiro et al., 2011).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from backends.types import DecodeCounters
from policy.statistics.counters import add_counters, copy_of

EPOCH_S = 10.0
RETAINED_EPOCHS = 180
"""Half an hour. A store that is away for longer misses what is older; the replica's own decisions never do."""


def epoch_of(wall_time: float) -> int:
    return int(wall_time // EPOCH_S)


@dataclass(slots=True)
class _Epoch:
    counters: dict[str, DecodeCounters] = field(default_factory=dict)
    version: int = 0
    stored_version: int = 0


class EpochBook:
    """Used from one thread only."""

    def __init__(self) -> None:
        self._epochs: dict[int, _Epoch] = {}
        self._total: dict[str, DecodeCounters] = {}

    def add(self, key: str, counters: DecodeCounters, wall_time: float) -> None:
        epoch = self._epochs.setdefault(epoch_of(wall_time), _Epoch())
        add_counters(epoch.counters.setdefault(key, DecodeCounters()), counters)
        epoch.version += 1
        add_counters(self._total.setdefault(key, DecodeCounters()), counters)
        for old in [number for number in self._epochs if number <= epoch_of(wall_time) - RETAINED_EPOCHS]:
            del self._epochs[old]

    def unstored(self) -> dict[int, tuple[int, dict[str, DecodeCounters]]]:
        """Whole registers of every epoch that the store doesn't have in full, each with its version."""
        return {
            number: (epoch.version, {key: copy_of(value) for key, value in epoch.counters.items()})
            for number, epoch in self._epochs.items()
            if epoch.version > epoch.stored_version
        }

    def stored(self, versions: Mapping[int, int]) -> None:
        """The store has confirmed these versions. One it never confirmed is simply written again."""
        for number, version in versions.items():
            if number in self._epochs:
                self._epochs[number].stored_version = max(self._epochs[number].stored_version, version)

    def compare(self, number: int, found: Mapping[str, DecodeCounters]) -> bool:
        """Check one epoch against what the store holds of it; a store that lost something will be told again.

        Returns whether something was missing.
        """
        epoch = self._epochs.get(number)
        if epoch is None or epoch.version > epoch.stored_version:
            return False
        if all(found.get(key) == value for key, value in epoch.counters.items()):
            return False
        epoch.stored_version = 0
        return True

    def total(self) -> dict[str, DecodeCounters]:
        """Everything counted since the start, by key: the replica's own books."""
        return {key: copy_of(value) for key, value in self._total.items()}

    @property
    def epochs(self) -> list[int]:
        return sorted(self._epochs)
