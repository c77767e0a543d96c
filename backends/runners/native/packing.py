"""Weight matrices in the layouts that the kernels multiply (``linear.h`` and ``int8.h`` say why)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

# Output columns of one packed unit: the floats of a vector register.
LANES = 16


def pack(weight: torch.Tensor) -> torch.Tensor:
    """[N, K] -> the kernels' operand: [ceil(N / 16), K / step, 16, step], zero rows added (step 2 in bfloat16)."""
    step = 2 if weight.dtype == torch.bfloat16 else 1
    n, k = weight.shape
    padded = F.pad(weight, (0, 0, 0, -n % LANES))
    return padded.view(-1, LANES, k // step, step).permute(0, 2, 1, 3).contiguous()


def pack_int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, K] -> the operand of ``int8.h``: [ceil(N / 16), K / 4, 16, 4] uint8 around 128, and each row's scale [N'].

    K must be a multiple of 4.
    """
    padded = F.pad(weight.to(torch.float32), (0, 0, 0, -weight.shape[0] % LANES))
    scale = padded.abs().amax(dim=1).clamp(min=1e-30) / 127.0
    q = ((padded / scale[:, None]).round() + 128.0).to(torch.uint8)
    return q.view(-1, LANES, weight.shape[1] // 4, 4).permute(0, 2, 1, 3).contiguous(), scale
