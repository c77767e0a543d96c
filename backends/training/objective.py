"""What heads are trained for: targets over the draft vocabulary, and the loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from backends.heads.module import MedusaHeads
from backends.training.data.dataset import HiddenStates


@dataclass(frozen=True, slots=True)
class OutputProjection:
    """The backbone's frozen tensors that heads lean on, cut to the draft vocabulary.

    ``lm_head_rows`` [V', H] and ``embeddings`` [V, H] in the dtype of the matmuls; ``draft_token_ids`` [V'] int32 or
    None when V' = V. Not covered: backbones that scale, cap or bias their logits after ``lm_head``.
    """

    lm_head_rows: torch.Tensor
    embeddings: torch.Tensor
    draft_token_ids: torch.Tensor | None

    @classmethod
    def of_model(cls, model: Any, draft_token_ids: torch.Tensor | None) -> OutputProjection:
        lm_head = model.get_output_embeddings().weight.detach()
        rows = lm_head if draft_token_ids is None else lm_head[draft_token_ids.long()]
        return cls(rows.contiguous(), model.get_input_embeddings().weight.detach(), draft_token_ids)

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> OutputProjection:
        """The same tensors on ``device``, in the ``dtype`` that the matmuls are to have (None: as they are)."""
        return OutputProjection(
            self.lm_head_rows.to(device, dtype), self.embeddings.to(device, dtype), self.draft_token_ids
        )

    def draft_index(self, tokens: torch.Tensor) -> torch.Tensor:
        """Column of each token among the draft vocabulary; -1 for those outside and for negative tokens."""
        if self.draft_token_ids is None:
            return tokens
        column = torch.full((self.embeddings.shape[0] + 1,), -1, dtype=torch.int64)
        column[self.draft_token_ids.long()] = torch.arange(len(self.draft_token_ids))
        return column[tokens]


def frequent_tokens(states: HiddenStates, size: int | None, *, keep: tuple[int, ...] = ()) -> torch.Tensor | None:
    """The ``size`` most frequent tokens of the training answers, ascending int32 (FR-Spec's draft vocabulary).

    ``keep`` names tokens that are in whatever their frequency (end of text). None when ``size`` is None.
    """
    if size is None:
        return None
    rows = torch.cat([torch.arange(r.start, r.stop) for r in map(states.rows_of, states.training_indices)])
    counts = torch.bincount(states.tokens[rows])
    counts[list(keep)] = counts.max() + 1
    chosen = torch.argsort(counts, descending=True, stable=True)[:size]
    return chosen[counts[chosen] > 0].sort().values.to(torch.int32)


@dataclass(frozen=True, slots=True)
class Targets:
    """What heads should say, as a distribution over a few columns of the draft vocabulary.

    ``columns`` [heads, n, k] int64, ``shares`` [heads, n, k] float32: sums over k are 1, or 0 for no target.
    """

    columns: torch.Tensor
    shares: torch.Tensor

    def to(self, device: torch.device) -> Targets:
        return Targets(self.columns.to(device), self.shares.to(device))

    @classmethod
    def of_columns(cls, columns: torch.Tensor) -> Targets:
        """All mass on one column; ``columns`` [heads, n], -1 for none."""
        return cls(columns.clamp(min=0).unsqueeze(-1), (columns >= 0).float().unsqueeze(-1))


class Teacher:
    """The backbone's own distribution over the draft vocabulary at every row, cut to its ``ranks`` likeliest tokens.

    A single answer shows one continuation; the distribution it was drawn from says what else was likely, which is worth
    more than another epoch. Takes one ``lm_head`` product over all rows.
    """

    def __init__(
        self, states: HiddenStates, projection: OutputProjection, ranks: int, *, batch_size: int = 512
    ) -> None:
        rows = len(states.tokens)
        ranks = min(ranks, len(projection.lm_head_rows))
        self.columns = torch.empty((rows, ranks), dtype=torch.int32)
        self.probabilities = torch.empty((rows, ranks), dtype=torch.float32)
        for begin in range(0, rows, batch_size):
            part = slice(begin, begin + batch_size)
            hidden = states.hidden[part].to(projection.lm_head_rows)
            logits = nn.functional.linear(hidden, projection.lm_head_rows).float()
            best = logits.topk(ranks, dim=1)
            self.columns[part] = best.indices.to(torch.int32)
            self.probabilities[part] = best.values.softmax(dim=1)

    def mix(self, rows: torch.Tensor, columns: torch.Tensor, soft_share: float) -> Targets:
        """Targets at ``rows`` [n]: ``soft_share`` of the mass the teacher's, the rest on ``columns`` [heads, n]."""
        num_heads = len(columns)
        hard = Targets.of_columns(columns)
        # Head i guesses the token that the backbone predicts at the row 1 + i further on.
        ahead = rows + 1 + torch.arange(num_heads).unsqueeze(1)
        ahead = ahead.clamp(max=len(self.columns) - 1)
        soft_shares = self.probabilities[ahead] * hard.shares * soft_share
        return Targets(
            torch.cat([hard.columns, self.columns[ahead].long()], dim=-1),
            torch.cat([hard.shares * (1 - soft_share), soft_shares], dim=-1),
        )


def path_tokens(states: HiddenStates, rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """The pending token at each of ``rows`` [n] and those after it: [num_heads, n]. Past an answer's end the tokens
    are another answer's, where there is no target either."""
    ahead = rows + torch.arange(num_heads).unsqueeze(1)
    return states.tokens[ahead.clamp(max=len(states.tokens) - 1)]


class _CrossEntropyOverRows(torch.autograd.Function):
    """Weighted cross-entropy of ``hidden @ rows.T`` that never holds more than ``chunk`` rows of logits.

    The gradients are made in the forward pass, while the probabilities are at hand: half the memory traffic of
    autograd. That of ``rows`` only where it is asked for.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        # hidden [n, H], rows [V', H], columns and shares [n, k], weight [n]
        hidden, rows, columns, shares, weight, chunk = inputs
        gradient = torch.zeros_like(hidden)
        of_rows = torch.zeros_like(rows) if ctx.needs_input_grad[1] else None
        loss = hidden.new_zeros((), dtype=torch.float32)
        for kept in shares.sum(dim=1).nonzero().squeeze(1).split(chunk):
            kept_columns, kept_shares, kept_weight = columns[kept], shares[kept], weight[kept].unsqueeze(1)
            logits = nn.functional.linear(hidden[kept], rows).float()
            logits.sub_(logits.amax(dim=1, keepdim=True))
            wanted = (logits.gather(1, kept_columns) * kept_shares).sum(dim=1, keepdim=True)
            total = logits.exp_().sum(dim=1, keepdim=True)
            loss += ((total.log() - wanted) * kept_weight).sum()
            difference = logits.mul_(kept_weight / total)
            difference.scatter_add_(1, kept_columns, -kept_shares * kept_weight)
            difference = difference.to(hidden.dtype)
            gradient[kept] = difference @ rows
            if of_rows is not None:
                of_rows += difference.T @ hidden[kept]
        ctx.save_for_backward(gradient, of_rows)
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        found = (None if each is None else each * gradients[0].to(each.dtype) for each in ctx.saved_tensors)
        return *found, None, None, None, None


def heads_loss(
    heads: MedusaHeads,
    projection: OutputProjection,
    hidden: torch.Tensor,
    path: torch.Tensor,
    targets: Targets,
    *,
    dropout: float = 0.0,
    head_loss_decay: float = 0.8,
    chunk: int = 512,
    known_counts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Each head's mean cross-entropy over its targets, weighted ``decay ** head``, over the weights' sum: one float32.

    ``hidden`` [n, H]; ``path`` [heads, n] token ids: the pending tokens and those that follow (:func:`path_tokens`).
    ``known_counts`` [heads]: how many targets the mean is over, when these rows are
    only a part of a batch (the parts' losses then add up to the batch's); None: as many as are here.
    """
    guessed = heads.path_hidden(hidden, projection.embeddings[path].to(hidden.dtype), dropout)
    decay = head_loss_decay ** torch.arange(heads.num_heads, dtype=torch.float32, device=hidden.device)
    known = targets.shares.sum(dim=-1) > 0
    counts = known.sum(dim=1) if known_counts is None else known_counts
    weight = (decay / decay.sum() / counts.clamp(min=1)).unsqueeze(1).expand(known.shape)
    if heads.output is not None:
        rows = heads.output.weight.to(hidden.dtype)
        return torch.stack(
            [
                _cross_entropy(guessed[h], rows[h], targets.columns[h], targets.shares[h], weight[h], chunk)
                for h in range(heads.num_heads)
            ]
        ).sum()
    return _cross_entropy(
        guessed.flatten(0, 1),
        projection.lm_head_rows,
        targets.columns.flatten(0, 1),
        targets.shares.flatten(0, 1),
        weight.reshape(-1),
        chunk,
    )


def _cross_entropy(
    hidden: torch.Tensor,
    rows: torch.Tensor,
    columns: torch.Tensor,
    shares: torch.Tensor,
    weight: torch.Tensor,
    chunk: int,
) -> torch.Tensor:
    loss = _CrossEntropyOverRows.apply(hidden, rows, columns, shares, weight, chunk)
    assert isinstance(loss, torch.Tensor)
    return loss
