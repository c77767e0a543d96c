"""A transformers model's weights on the device, as the Triton kernels take them. Free of triton."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from backends.runners.llama_shape import foreign_to_llama, head_size, window_of
from backends.runners.triton.tiling import power_of_two

Progress = Callable[[int, int], object]
"""Told how many layers have been copied, and of how many."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_HEAD_SIZES = (16, 256)


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Query heads, key heads, elements of each, and the keys that a row sees at most (0: all)."""

    heads: int
    kv_heads: int
    size: int
    window: int = 0

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def projected(self) -> int:
        """Columns of queries, keys and values together."""
        return (self.heads + 2 * self.kv_heads) * self.size


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """``qkv`` [(heads + 2 kv_heads) size, H], ``o`` [H, heads size], ``gate_up`` [2 inner, H]: gates, then ups,
    ``down`` [H, inner]; norms [H]; ``qkv_bias`` or None; ``head_norms``: of queries and keys [size] each, or None."""

    qkv: torch.Tensor
    o: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    attention_norm: torch.Tensor
    mlp_norm: torch.Tensor
    qkv_bias: torch.Tensor | None
    head_norms: tuple[torch.Tensor, torch.Tensor] | None
    shape: HeadShape


@dataclass(frozen=True, slots=True)
class DeviceWeights:
    """``embeddings``, ``lm_head`` [V, H]: one tensor where the model ties them. ``rotation``: cos and sin [context,
    size / 2] float32. ``shape``: of every layer, its window aside. ``scale``: of attention's scores."""

    layers: list[LayerWeights]
    embeddings: torch.Tensor
    lm_head: torch.Tensor
    final_norm: torch.Tensor
    rotation: tuple[torch.Tensor, torch.Tensor]
    shape: HeadShape
    inner: int
    scale: float
    eps: float


def unsupported_reason(model: Any) -> str | None:
    """Why the Triton kernels can't run this transformers model; None when they can."""
    if reason := foreign_to_llama(model):
        return reason
    size = head_size(model.config)
    if size != power_of_two(size) or not _HEAD_SIZES[0] <= size <= _HEAD_SIZES[1]:
        return f"head size {size} is not a power of two from {_HEAD_SIZES[0]} to {_HEAD_SIZES[1]}"
    if model.dtype not in DTYPES:
        return f"dtype {model.dtype}"
    return None


def load_weights(model: Any, device: torch.device, max_context: int, progress: Progress | None = None) -> DeviceWeights:
    """Copies layer by layer: the device holds the weights and one layer's parts at most. The model stays as it is."""
    config, layers = model.config, model.model.layers
    pinned = device.type == "cuda"

    def put(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach().contiguous()
        if pinned and tensor.device.type == "cpu":
            tensor = tensor.pin_memory()
        return tensor.to(device, non_blocking=pinned, copy=True)

    def joined(*parts: torch.Tensor) -> torch.Tensor:
        """One behind the other, on the device, so that host memory holds no second copy."""
        return torch.cat([put(part) for part in parts])

    shape = HeadShape(config.num_attention_heads, config.num_key_value_heads, head_size(config))
    made = []
    for number, layer in enumerate(layers, start=1):
        attention, mlp = layer.self_attn, layer.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        normed = hasattr(attention, "q_norm")
        made.append(
            LayerWeights(
                qkv=joined(*(projection.weight for projection in projections)),
                o=put(attention.o_proj.weight),
                gate_up=joined(mlp.gate_proj.weight, mlp.up_proj.weight),
                down=put(mlp.down_proj.weight),
                attention_norm=put(layer.input_layernorm.weight),
                mlp_norm=put(layer.post_attention_layernorm.weight),
                qkv_bias=None if projections[0].bias is None else joined(*(each.bias for each in projections)),
                head_norms=(put(attention.q_norm.weight), put(attention.k_norm.weight)) if normed else None,
                shape=HeadShape(shape.heads, shape.kv_heads, shape.size, window_of(config, attention)),
            )
        )
        if progress is not None:
            progress(number, len(layers))
    where = model.model.rotary_emb.inv_freq.device
    positions = torch.arange(max_context, device=where)[None]
    cos, sin = model.model.rotary_emb(torch.zeros(1, 1, 1, device=where), positions)
    embeddings = put(model.model.embed_tokens.weight)
    tied = model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    return DeviceWeights(
        layers=made,
        embeddings=embeddings,
        lm_head=embeddings if tied else put(model.lm_head.weight),
        final_norm=put(model.model.norm.weight),
        rotation=(put(cos[0, :, : shape.size // 2].float()), put(sin[0, :, : shape.size // 2].float())),
        shape=shape,
        inner=config.intermediate_size,
        scale=layers[0].self_attn.scaling,
        eps=config.rms_norm_eps,
    )
