"""Medusa heads: the torch module. :mod:`backends.heads.format` keeps them in files.

Head ``i`` (counted from 0) guesses the token at position ``t + 2 + i`` from the backbone's final-norm hidden state at
position ``t``; position ``t + 1`` is the *pending* token, sampled but not yet run through the backbone. Unlike the
heads of the Medusa paper (Cai et al., 2024, section 2.1) the block also sees the pending token's input embedding, known
before anything is drafted (the idea of Hydra, Ankner et al., 2024, without its sequential part), and the output
projection is the backbone's own ``lm_head``, cut down to frequent tokens (FR-Spec, Zhao et al., 2025).

*Sequential* heads (Hydra's sequential part; as in EAGLE, Li et al., 2024, a chain of states, but without attention):
head ``i`` is fed the state of head ``i - 1`` and the embedding of the token chosen from it instead of the backbone's
state and the pending token.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from backends.tree import MAX_DEPTH

HeadInput = Literal["hidden", "hidden+token"]


class HeadsError(ValueError):
    """Heads that can't be used with this backbone; the message says why."""


def check_head_count(count: int, where: str) -> None:
    """Raises :class:`HeadsError` for no heads, or more than a step can verify."""
    if not 1 <= count <= MAX_DEPTH:
        raise HeadsError(
            f"{where}: {count} heads; from 1 to {MAX_DEPTH} can be used, for a step verifies no deeper tree"
        )


class MedusaHeads(nn.Module):
    """All heads of one backbone, stacked so that one batched product evaluates them.

    ``h = x + W_down silu(W_up [x / rms(x); e / rms(e)] + b_up)`` for every head, with ``x`` the hidden state and ``e``
    the embedding of the pending token; with several ``layers`` the next such block takes ``h`` for ``x``. ``W_down``
    starts at zero: an untrained head says what ``lm_head`` says.

    ``output_rows`` [V', H] (what the heads' own output layers start from): give every head an output layer of its own
    instead of ``lm_head``.
    """

    draft_token_ids: torch.Tensor | None
    output: _StackedLinear | None

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        inner_size: int,
        *,
        head_input: HeadInput = "hidden+token",
        sequential: bool = False,
        draft_token_ids: torch.Tensor | None = None,
        layers: int = 1,
        output_rows: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        check_head_count(num_heads, "MedusaHeads")
        if sequential and head_input != "hidden+token":
            raise ValueError('sequential heads need head_input "hidden+token"')
        self.hidden_size = hidden_size
        self.sequential = sequential
        self.head_input: HeadInput = head_input
        input_size = hidden_size * (2 if head_input == "hidden+token" else 1)
        self.up = _StackedLinear(num_heads, input_size, inner_size, bias=True)
        self.down = _StackedLinear(num_heads, inner_size, hidden_size, bias=False)
        self.further = nn.ModuleList(_Block(num_heads, input_size, inner_size, hidden_size) for _ in range(layers - 1))
        self.output = None
        if output_rows is not None:
            self.output = _StackedLinear(num_heads, hidden_size, len(output_rows), bias=False)
            with torch.no_grad():
                self.output.weight.copy_(output_rows)
        self.register_buffer("draft_token_ids", draft_token_ids)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for up, down in self.blocks:
            bound = up.weight.shape[2] ** -0.5
            nn.init.uniform_(up.weight, -bound, bound)
            assert up.bias is not None
            nn.init.zeros_(up.bias)
            nn.init.zeros_(down.weight)

    @property
    def blocks(self) -> list[tuple[_StackedLinear, _StackedLinear]]:
        """``W_up`` and ``W_down`` of each layer, of all heads."""
        return [(self.up, self.down), *((block.up, block.down) for block in self.further)]  # type: ignore[list-item]

    @property
    def layers(self) -> int:
        return 1 + len(self.further)

    @property
    def own_output(self) -> bool:
        return self.output is not None

    @property
    def num_heads(self) -> int:
        return self.up.weight.shape[0]

    @property
    def inner_size(self) -> int:
        return self.up.weight.shape[1]

    def block_input(self, hidden: torch.Tensor, pending_embedding: torch.Tensor) -> torch.Tensor:
        """What ``W_up`` is fed: [..., n, input] of ``hidden`` [..., n, H] and ``pending_embedding`` [n, H]."""
        normed = F.rms_norm(hidden, (self.hidden_size,), eps=1e-6)
        if self.head_input == "hidden":
            return normed
        token = F.rms_norm(pending_embedding, (self.hidden_size,), eps=1e-12)
        return torch.cat([normed, token.expand_as(normed)], dim=-1)

    def propose_hidden(
        self, hidden: torch.Tensor, pending_embedding: torch.Tensor, dropout: float = 0.0
    ) -> torch.Tensor:
        """Hidden states whose ``lm_head`` logits are the heads' guesses.

        ``hidden`` [n, H]: final-norm states; ``pending_embedding`` [n, H]: input embeddings of the token after each
        (ignored by heads of input "hidden"). Returns [heads, n, H] in the dtype of ``hidden``.
        """
        states = hidden
        for up, down in self.blocks:
            inputs = self.block_input(states, pending_embedding).expand(self.num_heads, -1, -1)
            inner = F.dropout(F.silu(up(inputs)), dropout, training=self.training)
            states = states + down(inner)
        return states

    def follow_hidden(
        self, head: int, state: torch.Tensor, embedding: torch.Tensor, dropout: float = 0.0
    ) -> torch.Tensor:
        """One sequential head: the state of the head before (``hidden`` for the first) and the embedding of the token
        chosen from it (the pending token for the first), both [n, H] -> this head's state [n, H]."""
        for up, down in self.blocks:
            inner = F.silu(up.of_head(head, self.block_input(state, embedding)))
            state = state + down.of_head(head, F.dropout(inner, dropout, training=self.training))
        return state

    def path_hidden(self, hidden: torch.Tensor, embeddings: torch.Tensor, dropout: float = 0.0) -> torch.Tensor:
        """States of all heads when the tokens on the path are known (in training).

        ``hidden`` [n, H]; ``embeddings`` [heads, n, H]: of the pending token and the tokens after it; heads that are
        not sequential use the first only. Returns [heads, n, H].
        """
        if not self.sequential:
            return self.propose_hidden(hidden, embeddings[0], dropout)
        states, state = [], hidden
        for head in range(self.num_heads):
            state = self.follow_hidden(head, state, embeddings[head], dropout)
            states.append(state)
        return torch.stack(states)

    def logits(self, states: torch.Tensor, lm_head_rows: torch.Tensor) -> torch.Tensor:
        """What all heads say: ``states`` [heads, n, H] -> [heads, n, V'] float32. ``lm_head_rows`` [V', H] of the draft
        vocabulary: for heads without output layers of their own."""
        if self.output is not None:
            return self.output(states).float()
        return F.linear(states.to(lm_head_rows.dtype), lm_head_rows).float()

    forward = propose_hidden


class _Block(nn.Module):
    """A residual block of every head after its first."""

    def __init__(self, num_heads: int, input_size: int, inner_size: int, hidden_size: int) -> None:
        super().__init__()
        self.up = _StackedLinear(num_heads, input_size, inner_size, bias=True)
        self.down = _StackedLinear(num_heads, inner_size, hidden_size, bias=False)


class _StackedLinear(nn.Module):
    """One linear layer per head: [heads, n, in] -> [heads, n, out]."""

    bias: nn.Parameter | None

    def __init__(self, num_heads: int, input_size: int, output_size: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads, output_size, input_size))
        self.bias = nn.Parameter(torch.empty(num_heads, output_size)) if bias else None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        weight = self.weight.to(inputs.dtype).transpose(1, 2)
        if self.bias is None:
            return torch.bmm(inputs, weight)
        return torch.baddbmm(self.bias.to(inputs.dtype).unsqueeze(1), inputs, weight)

    def of_head(self, head: int, inputs: torch.Tensor) -> torch.Tensor:
        """One head alone: [n, in] -> [n, out]."""
        bias = None if self.bias is None else self.bias[head].to(inputs.dtype)
        return F.linear(inputs, self.weight[head].to(inputs.dtype), bias)
