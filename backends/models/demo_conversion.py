"""The demo model's GGUF file as a folder that transformers loads.

transformers reads such files itself, but parses the whole file three times for it; here it is read once. Which values
come out is compared with the file in ``tests/backends/models/test_demo_model.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from backends.import_noise import silence

# The names of GGUF's Llama (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) and transformers' for them.
_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_A_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SETTINGS = {
    "vocab_size": "llama.vocab_size",
    "max_position_embeddings": "llama.context_length",
    "hidden_size": "llama.embedding_length",
    "intermediate_size": "llama.feed_forward_length",
    "num_hidden_layers": "llama.block_count",
    "num_attention_heads": "llama.attention.head_count",
    "num_key_value_heads": "llama.attention.head_count_kv",
    "rms_norm_eps": "llama.attention.layer_norm_rms_epsilon",
    "rope_theta": "llama.rope.freq_base",
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
    "unk_token_id": "tokenizer.ggml.unknown_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
}


def convert(gguf: Path, folder: Path) -> None:
    """Write weights, config and tokenizer into ``folder``. Weights are bfloat16 where that loses nothing, else float32.

    Raises ValueError for a file that is no Llama, or without a chat template; KeyError for one that lacks a setting.
    """
    silence()
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    reader = _reader(gguf)
    architecture = reader.fields["general.architecture"].contents()
    if architecture != "llama":
        raise ValueError(f"{gguf.name} holds a model of architecture {architecture!r}; llama is expected")
    settings = {name: reader.fields[key].contents() for name, key in _SETTINGS.items()}
    weights = _weights(reader, settings["num_attention_heads"], settings["num_key_value_heads"])
    config = LlamaConfig(**settings, tie_word_embeddings="lm_head.weight" not in weights)
    exact = all(torch.equal(each, each.to(torch.bfloat16).float()) for each in weights.values())
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config)
    missing, unknown = model.load_state_dict(weights, strict=False, assign=True)
    if unknown or set(missing) - {"lm_head.weight"}:
        raise ValueError(f"{gguf.name} does not hold a whole Llama: missing {missing}, unknown {unknown}")
    model.tie_weights()
    model.generation_config = GenerationConfig.from_model_config(config)
    (model.to(torch.bfloat16) if exact else model).save_pretrained(folder)
    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if not tokenizer.chat_template:
        raise ValueError(f"{gguf.name} holds no chat template")
    tokenizer.save_pretrained(folder)


def _reader(gguf: Path) -> Any:
    from gguf import GGUFReader

    class Reader(GGUFReader):
        """Looks at the file through a plain array: slices of a ``memmap`` take most of the time of reading."""

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, np.asarray(value) if name == "data" else value)

    return Reader(gguf)


def _weights(reader: Any, heads: int, kv_heads: int) -> dict[str, torch.Tensor]:
    """By transformers' names, in float32."""
    from gguf import dequantize

    weights: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        parts = tensor.name.split(".")
        name = f"model.layers.{parts[1]}.{_IN_A_LAYER[parts[2]]}" if parts[0] == "blk" else _OUTSIDE[parts[0]]
        value = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if parts[0] == "blk" and parts[2] in ("attn_q", "attn_k"):
            value = _halves_apart(value, heads if parts[2] == "attn_q" else kv_heads)
        weights[f"{name}.{parts[-1]}"] = value
    return weights


def _halves_apart(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rotary pairs lie side by side in GGUF; transformers has the first of all pairs of a head, then the second."""
    rows = weight.shape[0] // heads
    return weight.view(heads, rows // 2, 2, -1).transpose(1, 2).reshape(weight.shape).contiguous()
