"""Rows added to a linear layer's input, so that every row's result is the same whatever other rows are in the call."""

from __future__ import annotations

import torch

# F.linear is bitwise independent of the number of rows in multiples of this, on the CPUs tried (docs/exactness.md).
ROW_MULTIPLE = 4


def padding_of(rows: int) -> int:
    """How many rows are missing to the next multiple."""
    return -rows % ROW_MULTIPLE


def pad_rows(tensor: torch.Tensor, padding: int) -> torch.Tensor:
    """Repeat row 0 ``padding`` times at the end."""
    return torch.cat([tensor, tensor[:1].expand(padding, *tensor.shape[1:])]) if padding else tensor
