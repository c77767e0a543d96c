"""Heads beside a runner of which nothing but the protocol is known, as one for another device would be."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from backends.checkpoints.loader import LoadedHeads
from backends.heads.residual import ResidualBlock, ResidualHeads
from backends.models.tiny import tiny_heads
from backends.runners.base import HeadsRunner, ModelRunner, ProposalRequest
from backends.runners.torch_heads import heads_in_torch
from tests.support.engine_helpers import shared_runner

PUBLIC = {name for name in vars(ModelRunner) if not name.startswith("_")} | ModelRunner.__annotations__.keys()


class ForeignRunner:
    """Passes on what the protocol names, and nothing else."""

    kind = "foreign"

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        if name not in PUBLIC:
            raise AttributeError(name)
        return getattr(self._runner, name)

    def bind_heads(self, heads: Any) -> HeadsRunner:
        runner: Any = self
        return heads_in_torch(runner, heads)


def residual(hidden: int) -> ResidualHeads:
    weights = torch.Generator().manual_seed(5)
    block = ResidualBlock(torch.randn(hidden, hidden, generator=weights) / hidden, None)
    return ResidualHeads(((block,), (block, block)), token_ids=torch.arange(3, 90, 2))


@pytest.mark.parametrize("made", ["the project's", "another project's"])
def test_a_runner_of_the_protocol_alone_binds_heads_that_guess_as_elsewhere(made: str) -> None:
    known: Any = shared_runner("transformers")
    heads = tiny_heads() if made == "the project's" else residual(known.hidden_size)
    loaded, foreign = LoadedHeads(heads, made, stale=None), ForeignRunner(known)
    hidden = torch.randn(4, known.hidden_size, generator=torch.Generator().manual_seed(1))
    rng = random.Random(2)
    request = ProposalRequest(hidden, [[1, rng.randrange(4, 60)] for _ in range(3)], 4, rows=[3, 0, 1])
    runner: Any = foreign
    for ours, theirs in zip(loaded.bind(runner).propose(request), loaded.bind(known).propose(request), strict=True):
        assert ours.tokens.tolist() == theirs.tokens.tolist()
        assert torch.allclose(torch.from_numpy(ours.probabilities), torch.from_numpy(theirs.probabilities), atol=1e-4)


def test_a_request_names_its_rows_and_pending_tokens() -> None:
    hidden = torch.arange(12.0).view(4, 3)
    assert ProposalRequest(hidden, [[1, 2], [3]], 4).pending == [2, 3]
    assert ProposalRequest(hidden, [[1], [3]], 4).states is hidden
    assert ProposalRequest(hidden, [[1], [3]], 4, rows=[2, 0]).states.tolist() == hidden[[2, 0]].tolist()
