"""The order in which training meets its data does not depend on interruptions."""

from __future__ import annotations

import pytest
import torch

from backends.training.epochs import Epochs


def steps(epochs: Epochs, done: int = 0, until: int | None = None) -> list[list[int]]:
    return [batch.tolist() for batch in epochs.batches(done, until)]


def test_every_epoch_meets_each_item_once_in_another_order() -> None:
    epochs = Epochs(torch.arange(100, 110), batch_size=4, count=3, seed=1)
    whole = steps(epochs)
    assert epochs.steps_per_epoch == 3
    assert [len(batch) for batch in whole] == [4, 4, 2] * 3
    rounds = [[item for batch in whole[first : first + 3] for item in batch] for first in (0, 3, 6)]
    assert all(sorted(each) == list(range(100, 110)) for each in rounds)
    assert len({tuple(each) for each in rounds}) == 3


@pytest.mark.parametrize("done", range(10))
def test_a_resumed_run_gets_the_batches_that_are_left(done: int) -> None:
    epochs = Epochs(torch.arange(10), batch_size=4, count=3, seed=1)
    assert steps(epochs, until=done) + steps(epochs, done) == steps(epochs)
