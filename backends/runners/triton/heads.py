"""The project's own heads through the Triton kernels."""

# Numbers that a kernel is compiled for are given as ints.
# pyright: reportArgumentType=false

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from backends.heads.expansion import GuessLists, plan_of_tree
from backends.heads.module import MedusaHeads
from backends.runners.base import ProposalRequest, Proposals
from backends.runners.triton import ops
from backends.runners.triton.guesses import block_top_kernel, head_input_kernel, top_kernel
from backends.runners.triton.tiling import power_of_two
from backends.tree import MAX_RANKS

if TYPE_CHECKING:
    from backends.runners.triton.runner import TritonRunner

Guesses = tuple[NDArray[np.int32], NDArray[np.float32]]


def why_not_in_triton(heads: MedusaHeads) -> str | None:
    """What the kernels lack for these heads; None: they can run them."""
    if heads.layers > 1:
        return f"{heads.layers} layers for each head"
    if heads.own_output:
        return "output layers of their own"
    if heads.inner_size % 16:
        return f"inner size {heads.inner_size} is not a multiple of 16"
    return None


class TritonHeads:
    """See :class:`backends.runners.base.HeadsRunner`. Parallel heads come back in one copy; sequential ones level by
    level, as the host chooses which guesses to follow."""

    def __init__(self, runner: TritonRunner, heads: MedusaHeads) -> None:
        if heads.hidden_size != runner.hidden_size:
            raise ValueError(f"heads are for hidden size {heads.hidden_size}, the backbone has {runner.hidden_size}")
        self._runner, self.num_heads = runner, heads.num_heads
        self._sequential, self._token = heads.sequential, heads.head_input == "hidden+token"

        def put(tensor: torch.Tensor | None) -> torch.Tensor:
            assert tensor is not None
            return tensor.detach().to(runner.device, runner.dtype).contiguous()

        self._up, self._bias, self._down = put(heads.up.weight), put(heads.up.bias), put(heads.down.weight)
        ids = heads.draft_token_ids
        self._ids = None if ids is None else ids.to(runner.device, torch.int32)
        lm_head = runner.weights.lm_head
        self._lm_head = lm_head if ids is None else lm_head[ids.to(runner.device).long()].contiguous()

    @torch.inference_mode()
    def propose(self, request: ProposalRequest) -> list[Proposals]:
        self._runner.use_device()
        k = min(request.k, MAX_RANKS, len(self._lm_head))
        states = request.states.to(self._runner.device, self._runner.dtype).contiguous()
        if self._sequential:
            return self._follow(request, states, k)
        every = list(range(len(request.contexts)))
        levels = [self._level(head, states, every, request.pending, k) for head in range(self.num_heads)]
        tokens = torch.stack([level[1] for level in levels]).cpu().numpy()
        chances = torch.stack([level[2] for level in levels]).cpu().numpy()
        return [Proposals(tokens[:, i], chances[:, i]) for i in every]

    def _follow(self, request: ProposalRequest, states: torch.Tensor, k: int) -> list[Proposals]:
        pending = request.pending
        trees = request.trees or [None] * len(pending)
        grown = [
            GuessLists(plan_of_tree(tree, self.num_heads, k) if tree else None, request.min_survival) for tree in trees
        ]
        rows, above, levels = list(enumerate(pending)), list(range(len(pending))), 0
        for head in range(self.num_heads):
            levels += 1
            states, tokens, chances = self._level(head, states, above, [token for _, token in rows], k)
            found: Guesses = tokens.cpu().numpy(), chances.cpu().numpy()
            for row, (sequence, _) in enumerate(rows):
                grown[sequence].add(found[0][row], found[1][row], row)
            if head + 1 < self.num_heads:
                opened = [(i, *each) for i, lists in enumerate(grown) for each in lists.open()]
                rows, above = [(i, token) for i, token, _ in opened], [row for _, _, row in opened]
                if not rows:
                    break
        return [Proposals(*lists.arrays(), levels) for lists in grown]

    def _level(
        self, head: int, states: torch.Tensor, above: list[int], tokens: list[int], k: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """One head for rows that follow ``states[above]`` and ``tokens``: its states [rows, H], and its ``k`` best
        tokens and their probabilities, [rows, k] each."""
        runner, tiling = self._runner, self._runner.tiling
        rows, hidden, device = len(above), runner.hidden_size, runner.device

        def empty(*shape: int, dtype: torch.dtype = runner.dtype) -> torch.Tensor:
            return torch.empty(*shape, dtype=dtype, device=device)

        fed, taken, inner = empty(rows, self._up.shape[2]), empty(rows, hidden), empty(rows, self._up.shape[1])
        made, logits = empty(rows, hidden), empty(rows, len(self._lm_head), dtype=torch.float32)
        given = torch.tensor([above, tokens], dtype=torch.int32).to(device, non_blocking=True)
        table = runner.weights.embeddings
        head_input_kernel[(rows,)](
            states,
            given[0],
            table,
            given[1],
            taken,
            fed,
            hidden,
            TOKEN=self._token,
            B=power_of_two(hidden),
            **ops.launch(8),
        )
        ops.linear(tiling, fed, self._up[head], inner, rows, bias=self._bias[head], silu=True)
        ops.linear(tiling, inner, self._down[head], made, rows, residual=taken)
        ops.linear(tiling, made, self._lm_head, logits, rows)
        found, chances = self._best(logits, k)
        return made, found, chances

    def _best(self, logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        (rows, vocab), block, device = logits.shape, self._runner.tiling.vocabulary, logits.device
        blocks = -(-vocab // block)

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(*shape, dtype=dtype, device=device)

        values, columns = empty(rows, blocks, k), empty(rows, blocks, k, dtype=torch.int32)
        tops, sums = empty(rows, blocks), empty(rows, blocks)
        tokens, chances = empty(rows, k, dtype=torch.int32), empty(rows, k)
        block_top_kernel[(rows, blocks)](
            logits, values, columns, tops, sums, vocab, logits.stride(0), blocks, K=k, B=block, **ops.launch(4)
        )
        top_kernel[(rows,)](
            values,
            columns,
            tops,
            sums,
            columns if self._ids is None else self._ids,
            tokens,
            chances,
            blocks,
            IDS=self._ids is not None,
            K=k,
            B=power_of_two(blocks * k),
            **ops.launch(4),
        )
        return tokens, chances
