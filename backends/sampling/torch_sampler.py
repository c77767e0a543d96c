"""Inverse-CDF sampling in torch operations, on any device: the same rule as ``mg_sample`` in the C kernels."""

from __future__ import annotations

import torch

from backends.sampling.rows import NO_TOKEN, RowSampling


def best_rows(logits: torch.Tensor) -> list[int]:
    """Lowest index of the maximum of each row of ``logits`` [n, V]; ``NO_TOKEN`` where that is not finite."""
    return torch.where(logits.amax(dim=-1).isfinite(), torch.argmax(logits, dim=-1), NO_TOKEN).tolist()


def draw_rows(logits: torch.Tensor, params: RowSampling) -> list[int]:
    """One token from each row of ``logits`` [n, V]: temperature, then top-k, top-p (of what is left) and min-p.

    With a filter the kept tokens are taken most probable first, else in order of their ids; the token is the first
    whose cumulative weight exceeds the uniform number's share of the total. Rows are handled one by one, so that a
    row's token does not depend on which other rows are drawn. ``NO_TOKEN`` where the highest logit is not finite.
    """
    return [
        _draw_row(
            row,
            float(params.temperature[i]),
            int(params.top_k[i]),
            float(params.top_p[i]),
            float(params.min_p[i]),
            float(params.uniform[i]),
        )
        for i, row in enumerate(logits)
    ]


def _draw_row(row: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float, uniform: float) -> int:
    highest = row.max()  # NaN where any of the row is
    weights = torch.exp((row.double() - highest.double()) / temperature)
    ids: torch.Tensor | None = None
    if top_k > 0 or top_p < 1.0 or min_p > 0.0:
        weights, ids = torch.sort(weights, descending=True, stable=True)
        keep = weights >= min_p
        if top_k > 0:
            keep[top_k:] = False
            weights = weights[: max(top_k, 1)]
            keep = keep[: len(weights)]
        if top_p < 1.0:
            before = torch.cumsum(weights, 0) - weights
            keep &= before < top_p * weights.sum()
        keep[0] = True
        weights = weights[keep]
        ids = ids[: len(keep)][keep]
    cumulative = torch.cumsum(weights, 0)
    index = torch.searchsorted(cumulative, uniform * cumulative[-1], right=True).clamp(max=len(weights) - 1)
    # One answer from the device: where the highest is not finite, the index says nothing.
    return int(torch.where(highest.isfinite(), index if ids is None else ids[index], NO_TOKEN))
