"""Weight matrices in the layouts that the kernels multiply (``linear.h``, ``weights8.h`` and ``int8.h`` say why)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

# Output columns of one packed unit: the floats of a vector register.
LANES = 16
# Elements along K that share a scale, where a backbone's weights are in eight bits: GROUP8 of the kernels.
GROUP = 64


def pack(weight: torch.Tensor) -> torch.Tensor:
    """[N, K] -> the kernels' operand: [ceil(N / 16), K / step, 16, step], zero rows added (step 2 in bfloat16)."""
    step = 2 if weight.dtype == torch.bfloat16 else 1
    n, k = weight.shape
    padded = F.pad(weight, (0, 0, 0, -n % LANES))
    return padded.view(-1, LANES, k // step, step).permute(0, 2, 1, 3).contiguous()


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """What :func:`pack` was given, with the zero rows that it has added: [N', K]."""
    return packed.permute(0, 2, 1, 3).reshape(packed.shape[0] * LANES, -1)


def pack_int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, K] -> the operand of ``int8.h``: [ceil(N / 16), K / 4, 16, 4] uint8 around 128, and each row's scale [N'].

    K must be a multiple of 4.
    """
    padded = F.pad(weight.to(torch.float32), (0, 0, 0, -weight.shape[0] % LANES))
    scale = padded.abs().amax(dim=1).clamp(min=1e-30) / 127.0
    q = ((padded / scale[:, None]).round() + 128.0).to(torch.uint8)
    return q.view(-1, LANES, weight.shape[1] // 4, 4).permute(0, 2, 1, 3).contiguous(), scale


def quantise_groups(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, K] -> q [N, K] int8 from -127 to 127, and the scale of each group of 64 along K [N, ceil(K / 64)] float32."""
    k = weight.shape[1]
    groups = F.pad(weight.to(torch.float32), (0, -k % GROUP)).unflatten(1, (-1, GROUP))
    scale = groups.abs().amax(dim=2) / 127.0
    q = (groups / scale.clamp(min=1e-30)[:, :, None]).round().clamp(-127, 127).to(torch.int8)
    return q.flatten(1)[:, :k], scale


def widen_groups(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """[N, K] float32: the weights that :func:`quantise_groups` has made of others."""
    return q.to(torch.float32) * scale.repeat_interleave(GROUP, dim=1)[:, : q.shape[1]]


def pack_groups(weight: torch.Tensor) -> torch.Tensor:
    """[N, K] -> the operand of ``weights8.h``: [ceil(N / 16), bytes of a unit] uint8, zero rows added.

    Of each group the 16 rows' scales as float32, then [elements, 16] int8. K must be a multiple of 4.
    """
    k = weight.shape[1]
    q, scale = quantise_groups(F.pad(weight, (0, 0, 0, -weight.shape[0] % LANES)))
    columns = q.view(-1, LANES, k).transpose(1, 2).reshape(-1, k * LANES).view(torch.uint8)
    scales = scale.view(-1, LANES, scale.shape[1]).transpose(1, 2).contiguous().view(torch.uint8)
    parts = []
    for i, begin in enumerate(range(0, k, GROUP)):
        parts += [scales[:, i], columns[:, begin * LANES : min(begin + GROUP, k) * LANES]]
    return torch.cat(parts, dim=1)


def unpack_groups(packed: torch.Tensor, k: int) -> torch.Tensor:
    """The weights that :func:`pack_groups` has made of [N, K], with its zero rows: [N', K] float32."""
    parts, at = [], 0
    for begin in range(0, k, GROUP):
        size = min(GROUP, k - begin)
        scales = packed[:, at : at + 4 * LANES].contiguous().view(torch.float32)
        at += 4 * LANES
        q = packed[:, at : at + size * LANES].contiguous().view(torch.int8).view(-1, size, LANES)
        at += size * LANES
        parts.append(q.to(torch.float32) * scales[:, None, :])
    return torch.cat(parts, dim=1).transpose(1, 2).reshape(-1, k)
