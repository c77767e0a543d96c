"""Tokens drawn on the device: what ``argmax`` and ``sample`` of the runner do, one copy back for all rows."""

# Numbers that a kernel is compiled for are given as ints.
# pyright: reportArgumentType=false

from __future__ import annotations

import numpy as np
import torch

from backends.runners.triton import ops
from backends.runners.triton.sampling import best_kernel, block_best_kernel, filter_kernel, race_kernel
from backends.runners.triton.tiling import Tiling, power_of_two
from backends.sampling.rows import RowSampling


class DeviceSampler:
    """Draws from rows of logits [n, V] float32 on ``device``. A row's token depends on that row, its parameters and its
    random number only."""

    def __init__(self, tiling: Tiling, device: torch.device, vocab_size: int) -> None:
        self._device, self._vocab = device, vocab_size
        self._block = tiling.vocabulary
        self._blocks = -(-vocab_size // self._block)

    def _put(self, values: object, dtype: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(np.asarray(values)).to(self._device, dtype)

    def _grid(self, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Best and its id by blocks, the rows' maxima, and their tokens."""

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(*shape, dtype=dtype, device=self._device)

        blocks, ints = self._blocks, torch.int32
        return empty(count, blocks), empty(count, blocks, dtype=ints), empty(count), empty(count, dtype=ints)

    def _merge(self, best: torch.Tensor, ids: torch.Tensor, highest: torch.Tensor, token: torch.Tensor) -> None:
        best_kernel[(len(token),)](
            best, ids, highest, token, self._blocks, B=power_of_two(self._blocks), **ops.launch(4)
        )

    def _best(
        self, logits: torch.Tensor, index: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        best, ids, highest, token = self._grid(len(index))
        block_best_kernel[(len(index), self._blocks)](
            logits, index, best, ids, self._vocab, logits.stride(0), self._blocks, B=self._block, **ops.launch(4)
        )
        self._merge(best, ids, highest, token)
        return best, ids, highest, token

    def argmax(self, logits: torch.Tensor, rows: list[int]) -> list[int]:
        """See :class:`backends.sampling.rows.RowSampler`."""
        index = self._put(rows, torch.int32)
        return self._best(logits, index)[3].tolist()

    def sample(self, logits: torch.Tensor, rows: list[int], params: RowSampling) -> list[int]:
        """See :class:`backends.sampling.rows.RowSampler`; the random numbers' 53 bits are the rows' keys."""
        return self.draw(
            logits,
            self._put(rows, torch.int32),
            self._put((np.asarray(params.uniform) * 2.0**53).astype(np.int64), torch.int64),
            params,
        ).tolist()

    def draw(self, logits: torch.Tensor, index: torch.Tensor, keys: torch.Tensor, params: RowSampling) -> torch.Tensor:
        """Tokens [rows] int32 on the device: of each row named in ``index``, greedy where its temperature is 0."""
        count, vocab, stride = len(index), self._vocab, logits.stride(0)
        best, ids, highest, token = self._best(logits, index)
        temperatures = self._put(params.temperature, torch.float32)
        cut = torch.full((count,), -torch.inf, device=self._device)
        cut_id = torch.full((count,), vocab, dtype=torch.int32, device=self._device)
        if (params.top_k > 0).any() or (params.top_p < 1.0).any() or (params.min_p > 0.0).any():
            filter_kernel[(count,)](
                logits,
                index,
                highest,
                temperatures,
                self._put(params.top_k, torch.int32),
                self._put(params.top_p, torch.float32),
                self._put(params.min_p, torch.float32),
                cut,
                cut_id,
                vocab,
                stride,
                B=self._block,
                **ops.launch(8),
            )
        race_kernel[(count, self._blocks)](
            logits,
            index,
            highest,
            keys,
            temperatures,
            cut,
            cut_id,
            best,
            ids,
            vocab,
            stride,
            self._blocks,
            B=self._block,
            **ops.launch(4),
        )
        self._merge(best, ids, highest, token)
        return token
