"""Heads as other projects build them: the weights, and the states that they make.

A head is a stack of residual blocks ``x + silu(W x + b)`` (Cai et al., 2024, section 2.1) and a projection onto the
vocabulary: its own, one that all heads share, or the backbone's ``lm_head``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F


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
