"""Models that are shaped like Llama: what the runners with kernels of their own can run of them."""

from __future__ import annotations

from typing import Any

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")
SIZE_MULTIPLE = 16


def head_size(config: Any) -> int:
    """Elements of one query or key."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def window_of(config: Any, attention: Any) -> int:
    """Keys that a layer's rows see at most; 0: all."""
    if hasattr(attention, "sliding_window"):
        return attention.sliding_window or 0
    return getattr(config, "sliding_window", None) or 0


def foreign_to_llama(model: Any) -> str | None:
    """What of a transformers model is not as in Llama, Mistral, Qwen 2 or 3; None when nothing is."""
    config = model.config
    if config.model_type not in SUPPORTED:
        return f"model type {config.model_type!r} is not one of {', '.join(SUPPORTED)}"
    size = head_size(config)
    if config.hidden_act != "silu":
        return f"activation {config.hidden_act!r} is not silu"
    if any(each % SIZE_MULTIPLE for each in (size, config.hidden_size, config.intermediate_size)):
        return f"hidden, intermediate and head sizes must be multiples of {SIZE_MULTIPLE}"
    if config.num_attention_heads % config.num_key_value_heads:
        return f"{config.num_attention_heads} query heads are no multiple of {config.num_key_value_heads} key heads"
    if getattr(config, "mlp_bias", False) or model.model.layers[0].self_attn.o_proj.bias is not None:
        return "biases on the output or MLP projections"
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") not in ("default", "linear", "llama3", "yarn"):
        return f"rope type {rope.get('rope_type')!r} changes with the length of the sequence"
    if 2 * model.model.rotary_emb.inv_freq.shape[0] != size:
        return "rotary embedding over a part of each head"
    if getattr(config, "quantization_config", None) is not None:
        return "quantised weights"
    return None
