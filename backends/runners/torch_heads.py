"""The project's own heads in torch operations, beside any runner: for what the kernels don't run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch

from backends.heads.expansion import LEAST_SURVIVAL, GuessLists, plan_of_tree
from backends.heads.module import MedusaHeads
from backends.runners.base import ModelRunner, Proposals, best_tokens
from backends.tree import CandidateTree


class HeadsInTorch:
    """Heads bound to a runner. See :class:`backends.runners.base.HeadsRunner`.

    ``embed``: token ids -> their input embeddings [n, H]. ``project``: states [..., H] -> what the backbone's
    ``lm_head`` says of the draft vocabulary, [..., V'] float32; heads with output layers of their own don't ask it.
    """

    def __init__(
        self,
        heads: MedusaHeads,
        runner: ModelRunner,
        embed: Callable[[list[int]], torch.Tensor],
        project: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self.num_heads = heads.num_heads
        # A copy: whoever brought the heads may go on with them, in their own precision.
        self._heads = copy.deepcopy(heads).to(runner.device, runner.dtype)
        self._embed, self._project = embed, project
        ids = heads.draft_token_ids
        self._draft_ids = None if ids is None else ids.cpu().numpy()

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
        pending = [context[-1] for context in contexts]
        if rows is not None:
            hidden = hidden[list(rows)]
        if self._heads.sequential:
            return self._follow(hidden, pending, k, trees, least)
        states = self._heads.propose_hidden(hidden, self._embed(pending))
        own = self._heads.output
        tokens, probabilities = best_tokens(
            self._project(states) if own is None else own(states).float(), k, self._draft_ids
        )
        return [Proposals(tokens[:, i], probabilities[:, i]) for i in range(len(contexts))]

    def _follow(
        self,
        hidden: torch.Tensor,
        pending: list[int],
        k: int,
        trees: Sequence[CandidateTree | None],
        least: float,
    ) -> list[Proposals]:
        """Sequential heads, level by level: one pass over the lists of all sequences for each head."""
        wanted = [plan_of_tree(tree, self.num_heads, k) if tree else None for tree in (trees or [None] * len(pending))]
        grown = [GuessLists(plan, least) for plan in wanted]
        rows, states = [(i, token) for i, token in enumerate(pending)], hidden
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
