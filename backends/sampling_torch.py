"""Inverse-CDF sampling in torch operations, on any device: the same rule as ``mg_sample`` in the C kernels."""

from __future__ import annotations

import math

import torch

from backends.runner import RowSampling


def draw_rows(logits: torch.Tensor, params: RowSampling) -> list[int]:
    """One token from each row of ``logits`` [n, V]: temperature, then top-k, top-p (of what is left) and min-p.

    With a filter the kept tokens are taken most probable first, else in order of their ids; the token is the first
    whose cumulative weight exceeds the uniform number's share of the total. Rows are handled one by one, so that a
    row's token does not depend on which other rows are drawn. A row from which nothing can be drawn, as its logits are
    not finite, gives -1.
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
    weights = torch.exp((row.double() - row.max().double()) / temperature)
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
    index = int(torch.searchsorted(cumulative, uniform * cumulative[-1], right=True))
    if index == len(weights):
        # The share was rounded up to the total; or there is no total, and no comparison with it holds.
        if not math.isfinite(float(cumulative[-1])):
            return -1
        index -= 1
    return index if ids is None else int(ids[index])
