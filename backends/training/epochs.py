"""The way of a training run through its data, the same however often the run is interrupted and resumed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Epochs:
    """``count`` rounds over ``items`` (rows or answers, by number), each in an order of its own, a batch a step."""

    items: torch.Tensor
    batch_size: int
    count: int
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.items) // self.batch_size)

    @property
    def total_steps(self) -> int:
        return self.steps_per_epoch * self.count

    def batches(self, done: int, until: int | None = None) -> Iterator[torch.Tensor]:
        """The batches of the steps after the first ``done``, to the end or until ``until`` steps are done."""
        stop = self.total_steps if until is None else min(until, self.total_steps)
        order = self._order(done // self.steps_per_epoch)
        for step in range(done, stop):
            epoch, number = divmod(step, self.steps_per_epoch)
            if number == 0:
                order = self._order(epoch)
            yield order[number * self.batch_size :][: self.batch_size]

    def _order(self, epoch: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed * 100_003 + epoch)
        return self.items[torch.randperm(len(self.items), generator=generator)]
