"""Heads in torch operations, beside any runner: for devices and heads that the kernels don't run.

Two classes, for the two have only the last step in common: :class:`MedusaHeadsInTorch` for the project's own heads,
which see drafted tokens, and :class:`ResidualHeadsInTorch` for other projects', which see the hidden state alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from backends.heads.expansion import GuessLists, plan_of_tree
from backends.heads.module import MedusaHeads
from backends.heads.residual import ResidualHeads
from backends.runners.base import ModelRunner, ProposalRequest, Proposals, best_tokens
from backends.runners.row_padding import pad_rows, padding_of

# States [..., H] -> what the backbone's lm_head says of the draft vocabulary, [..., V'] float32.
Project = Callable[[torch.Tensor], torch.Tensor]


def heads_in_torch(
    runner: ModelRunner, heads: MedusaHeads | ResidualHeads, project: Project | None = None
) -> MedusaHeadsInTorch | ResidualHeadsInTorch:
    """Any heads bound to any runner. ``project``: for the project's own heads; None: the runner's logits, of which the
    columns outside the draft vocabulary are computed for nothing."""
    if isinstance(heads, ResidualHeads):
        return ResidualHeadsInTorch(runner, heads)
    return MedusaHeadsInTorch(runner, heads, project or _logits_of(runner, heads))


def _logits_of(runner: ModelRunner, heads: MedusaHeads) -> Project:
    ids = None if heads.draft_token_ids is None else heads.draft_token_ids.long()

    def project(states: torch.Tensor) -> torch.Tensor:
        logits = runner.logits(states.flatten(0, -2).contiguous()).unflatten(0, states.shape[:-1])
        return logits if ids is None else logits[..., ids]

    return project


class MedusaHeadsInTorch:
    """The project's own heads bound to a runner. See :class:`backends.runners.base.HeadsRunner`.

    ``project`` is asked for heads without output layers of their own.
    """

    def __init__(self, runner: ModelRunner, heads: MedusaHeads, project: Project) -> None:
        self.num_heads = heads.num_heads
        # A copy: whoever brought the heads may go on with them, in their own precision.
        self._heads = copy.deepcopy(heads).to(runner.device, runner.dtype)
        self._embed, self._project = runner.embed, project
        ids = heads.draft_token_ids
        self._draft_ids = None if ids is None else ids.cpu().numpy()

    @torch.inference_mode()
    def propose(self, request: ProposalRequest) -> list[Proposals]:
        if self._heads.sequential:
            return self._follow(request)
        states = self._heads.propose_hidden(request.states, self._embed(request.pending))
        own = self._heads.output
        logits = self._project(states) if own is None else own(states).float()
        return _of_each_sequence(*best_tokens(logits, request.k, self._draft_ids))

    def _follow(self, request: ProposalRequest) -> list[Proposals]:
        """Sequential heads, level by level: one pass over the lists of all sequences for each head."""
        pending, k = request.pending, request.k
        trees = request.trees or [None] * len(pending)
        plans = [plan_of_tree(tree, self.num_heads, k) if tree else None for tree in trees]
        grown = [GuessLists(plan, request.min_survival) for plan in plans]
        rows, states = [(i, token) for i, token in enumerate(pending)], request.states
        above, own, levels = list(range(len(pending))), self._heads.output, 0
        for head in range(self.num_heads):
            levels += 1
            embedded = self._embed([token for _, token in rows])
            states = self._heads.follow_hidden(head, states[above], embedded)
            logits = self._project(states) if own is None else own.of_head(head, states).float()
            tokens, probabilities = best_tokens(logits, k, self._draft_ids)
            for row, (sequence, _) in enumerate(rows):
                grown[sequence].add(tokens[row], probabilities[row], row)
            if head + 1 < self.num_heads:
                opened = [(i, *found) for i, lists in enumerate(grown) for found in lists.open()]
                rows = [(i, token) for i, token, _ in opened]
                above = [row for _, _, row in opened]
                if not rows:
                    break
        return [Proposals(*lists.arrays(), levels) for lists in grown]


class ResidualHeadsInTorch:
    """Other projects' heads bound to a runner. See :class:`backends.runners.base.HeadsRunner`.

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
        states = heads.states(pad_rows(hidden, padding_of(n)))
        if not heads.projections:
            out = self._runner.logits(torch.cat(states)).unflatten(0, (self.num_heads, -1))[:, :n]
            return out if heads.token_ids is None else out[..., heads.token_ids]
        projections = heads.projections * (self.num_heads if len(heads.projections) == 1 else 1)
        out = torch.stack([F.linear(x, w)[:n].float() for x, w in zip(states, projections, strict=True)])
        return out if heads.logit_scale == 1.0 else out * heads.logit_scale

    @torch.inference_mode()
    def propose(self, request: ProposalRequest) -> list[Proposals]:
        return _of_each_sequence(*best_tokens(self.logits(request.states), request.k, self._token_ids))


def _of_each_sequence(tokens: NDArray[np.int32], probabilities: NDArray[np.float32]) -> list[Proposals]:
    """From what every head guesses for every sequence, [heads, n, k] each."""
    return [Proposals(tokens[:, i], probabilities[:, i]) for i in range(tokens.shape[1])]
