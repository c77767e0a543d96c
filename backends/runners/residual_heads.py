"""Heads as other projects build them, evaluated in torch operations beside any runner.

A head is a stack of residual blocks ``x + silu(W x + b)`` (Cai et al., 2024, section 2.1) and a projection onto the
vocabulary: its own, one that all heads share, or the backbone's ``lm_head``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from backends.heads.expansion import LEAST_SURVIVAL
from backends.runners.base import ModelRunner, Proposals, best_tokens
from backends.tree import CandidateTree

_ROW_MULTIPLE = 4


@dataclass(frozen=True, slots=True)
class ResidualBlock:
    """``weight`` [H, H], ``bias`` [H] or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.silu(F.linear(x, self.weight, self.bias))


@dataclass(frozen=True, slots=True)
class ResidualHeads:
    """``blocks[h]``: the blocks of head h, first to last; the hidden state [n, H] goes in.

    ``projections``: one [V', H] for each head, one for all, or none: the backbone's ``lm_head``. ``token_ids`` [V']
    int64: the token that each output stands for; None: token i. ``logit_scale`` multiplies what own projections say.
    """

    blocks: tuple[tuple[ResidualBlock, ...], ...]
    projections: tuple[torch.Tensor, ...] = ()
    token_ids: torch.Tensor | None = None
    logit_scale: float = 1.0

    @property
    def num_heads(self) -> int:
        return len(self.blocks)

    @property
    def hidden_size(self) -> int:
        return (self.blocks[0][0].weight if self.blocks[0] else self.projections[0]).shape[1]

    @property
    def draft_vocab_size(self) -> int | None:
        """None: the backbone's."""
        return self.projections[0].shape[0] if self.projections else None

    def to(self, device: torch.device, dtype: torch.dtype) -> ResidualHeads:
        def moved(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(device, dtype)

        return ResidualHeads(
            tuple(
                tuple(ResidualBlock(moved(b.weight), None if b.bias is None else moved(b.bias)) for b in blocks)
                for blocks in self.blocks
            ),
            tuple(moved(projection) for projection in self.projections),
            None if self.token_ids is None else self.token_ids.to(device),
            self.logit_scale,
        )

    def states(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        """Of each head [n, H], before its projection."""
        found = []
        for blocks in self.blocks:
            x = hidden
            for block in blocks:
                x = block(x)
            found.append(x)
        return found


class TorchHeads:
    """:class:`ResidualHeads` bound to a runner. See :class:`backends.runners.base.HeadsRunner`.

    They keep the runner's floating-point type, also when its linear layers are quantised.
    """

    def __init__(self, runner: ModelRunner, heads: ResidualHeads) -> None:
        self._runner = runner
        self._heads = heads.to(runner.device, runner.dtype)
        self.num_heads = heads.num_heads
        ids = heads.token_ids
        self._token_ids = None if ids is None else ids.cpu().numpy().astype(np.int32)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of every head for ``hidden`` [n, H]: [heads, n, V'] float32."""
        heads, n = self._heads, len(hidden)
        # Padded as the runner's rows are, so that guesses don't depend on how many sequences ask.
        padding = -n % _ROW_MULTIPLE
        states = heads.states(torch.cat([hidden, hidden[:1].expand(padding, -1)]) if padding else hidden)
        if not heads.projections:
            out = self._runner.logits(torch.cat(states)).unflatten(0, (self.num_heads, -1))[:, :n]
            return out if heads.token_ids is None else out[..., heads.token_ids]
        projections = heads.projections * (self.num_heads if len(heads.projections) == 1 else 1)
        out = torch.stack([F.linear(x, w)[:n].float() for x, w in zip(states, projections, strict=True)])
        return out if heads.logit_scale == 1.0 else out * heads.logit_scale

    @torch.inference_mode()
    def propose(
        self,
        hidden: torch.Tensor,
        contexts: list[list[int]],
        k: int,
        trees: Sequence[CandidateTree | None] = (),
        *,
        rows: Sequence[int] | None = None,
        least: float = LEAST_SURVIVAL,
    ) -> list[Proposals]:
        states = hidden if rows is None else hidden[list(rows)]
        tokens, probabilities = best_tokens(self.logits(states), k, self._token_ids)
        return [Proposals(tokens[:, i], probabilities[:, i]) for i in range(len(contexts))]
