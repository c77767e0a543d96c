"""The processes that train together: one, or several that a launcher started."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta

import torch
from torch import nn

from backends.training.checkpoint import TrainingError

# The first process makes answers while the others wait for it, which may take hours.
_PATIENCE = timedelta(days=2)


@dataclass(frozen=True, slots=True)
class Workers:
    """This process among ``count`` of them (``index`` from 0) and the device it trains on.

    Every worker holds all parameters and takes its share of each batch; gradients are *summed* over the workers, so
    losses must be scaled by the counts of the whole batch. Parameters stay equal because every worker starts from equal
    ones and makes equal steps.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    count: int = 1
    index: int = 0

    @property
    def is_main(self) -> bool:
        return self.index == 0

    def share(self, rows: torch.Tensor) -> torch.Tensor:
        """This worker's part of a batch; may be empty."""
        return rows[self.index :: self.count]

    def parts(self, rows: torch.Tensor, count: int) -> Iterator[tuple[int, torch.Tensor]]:
        """This worker's part of a batch in at most ``count`` pieces, each with its number, none of them empty."""
        for number, part in enumerate(self.share(rows).tensor_split(count)):
            if len(part):
                yield number, part

    def wait(self) -> None:
        """Until every worker is here."""
        if self.count > 1:
            torch.distributed.barrier()

    @contextlib.contextmanager
    def main_first(self) -> Iterator[None]:
        """The main worker runs the block before the others do: what it wrote is there for them.

        If it fails there, the others don't enter the block: they raise :class:`TrainingError`.
        """
        if not self.is_main and self._any_failed(failed=False):
            raise TrainingError("the first of the processes could not go on, and says why")
        failed = True
        try:
            yield
            failed = False
        finally:
            if self.is_main:
                self._any_failed(failed=failed)

    def _any_failed(self, *, failed: bool) -> bool:
        """Once every worker is here: whether one of them says so."""
        return bool(self.sum(torch.tensor([float(failed)], device=self.device)).item())

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        if self.count == 1:
            return value
        from accelerate.utils import reduce

        summed = reduce(value, reduction="sum")
        assert isinstance(summed, torch.Tensor)
        return summed

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add up the gradients of all workers in one message; a worker without rows adds nothing."""
        if self.count == 1:
            return
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1).float() for p in trained])
        parts = self.sum(flat).split([p.numel() for p in trained])
        for parameter, part in zip(trained, parts, strict=True):
            parameter.grad = part.view_as(parameter).to(parameter.dtype)


@contextlib.contextmanager
def joined_workers() -> Iterator[Workers]:
    """The workers as the launcher's environment says (``accelerate launch`` or ``torchrun``), one alone without it.

    On a machine without accelerators they train on its CPU. Raises RuntimeError when they can't find each other.
    """
    # This module has the group of its import's moment in the defaults of its functions, and optimisers import it. Once
    # it has a real one, leaving the group ends none of its threads, and one that still runs when the process exits now
    # and then aborts it ("terminate called without an active exception"). So it is imported while there is none.
    import torch.distributed.nn.functional
    from accelerate import PartialState

    state = PartialState(cpu=not torch.accelerator.is_available(), timeout=_PATIENCE)
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if state.num_processes != started:
        raise RuntimeError(f"{started} processes were started, but accelerate sees {state.num_processes}")
    try:
        yield Workers(torch.device(state.device or "cpu"), state.num_processes, state.process_index)
        # Whoever leaves first would tear down what the others still talk through.
        state.wait_for_everyone()
    finally:
        state.destroy_process_group()
