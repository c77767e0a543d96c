"""Rows to draw a token from, and what a model runner must offer for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

# What argmax and sample answer for a row from which no token can be drawn: something in it is NaN or +inf, or all is
# -inf. Only a broken model says such things; the engine ends that request.
NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class RowSampling:
    """Sampling parameters of rows to draw, as arrays of one value per row. ``uniform`` in [0, 1)."""

    temperature: NDArray[np.float32]
    top_k: NDArray[np.int32]
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    uniform: NDArray[np.float64]


class RowSampler(Protocol):
    """Draws tokens from rows of logits; every :class:`backends.runners.base.ModelRunner` does."""

    def argmax(self, logits: torch.Tensor, rows: list[int]) -> list[int]:
        """Lowest index of the maximum of each named row of [R, V]; :data:`NO_TOKEN` where that is not finite."""
        ...

    def sample(self, logits: torch.Tensor, rows: list[int], params: RowSampling) -> list[int]:
        """One token drawn from each named row after temperature, top-k, top-p and min-p, in that order;
        :data:`NO_TOKEN` where the highest logit is not finite."""
        ...
