"""Random two- and three-layer models of every architecture that is proven: for ``verify-lossless`` and tests.

Sliding windows are shorter than the prompts, so that they hide something; every norm and bias is random, so that none
can be forgotten.
"""

from __future__ import annotations

from typing import Any

import torch

TINY_ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"num_key_value_heads": 2}),
    "mistral": ("Mistral", {"num_key_value_heads": 1, "head_dim": 16, "sliding_window": None}),
    "mistral-window": ("Mistral", {"num_key_value_heads": 1, "head_dim": 16, "sliding_window": 20}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 2}),
    "qwen3": ("Qwen3", {"num_key_value_heads": 4, "head_dim": 16}),
    "gemma": ("Gemma", {"num_key_value_heads": 2, "head_dim": 16}),
    "gemma2": ("Gemma2", {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 20, "query_pre_attn_scalar": 16}),
    "gemma3": (
        "Gemma3Text",
        {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "sliding_window": 20,
            "query_pre_attn_scalar": 16,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "phi": ("Phi", {"num_key_value_heads": 2, "partial_rotary_factor": 0.5}),
    "phi3": ("Phi3", {"num_key_value_heads": 2, "sliding_window": 20}),
    "gpt-neox": ("GPTNeoX", {}),
    "gpt2": ("GPT2", {}),
    "granite": ("Granite", {"num_key_value_heads": 2, "logits_scaling": 3.0, "embedding_multiplier": 2.0}),
    "cohere": ("Cohere", {"num_key_value_heads": 2}),
}
"""Name -> the prefix of its classes in transformers, and what differs from the common settings."""

_CLASSES = {"Gemma3Text": "Gemma3ForCausalLM", "GPT2": "GPT2LMHeadModel"}
CONTEXT = 192


def tiny_architecture(name: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **settings: Any) -> Any:
    """A random model for the vocabulary of :func:`backends.models.tiny.tiny_tokenizer`. ``settings`` go into its
    config.

    Raises ValueError for a name that is not in :data:`TINY_ARCHITECTURES`.
    """
    import transformers

    if name not in TINY_ARCHITECTURES:
        raise ValueError(f"no tiny architecture {name!r}; there are {', '.join(TINY_ARCHITECTURES)}")
    prefix, own = TINY_ARCHITECTURES[name]
    common = {
        "vocab_size": 260,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": CONTEXT,
        "eos_token_id": 0,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    config = getattr(transformers, f"{prefix}Config")(**{**common, **own, **settings})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, _CLASSES.get(prefix, f"{prefix}ForCausalLM"))(config)
        for parameter in model.parameters():
            mean, std = (0.0, 0.25) if parameter.dim() > 1 else (1.0, 0.3)
            torch.nn.init.normal_(parameter, mean, std)
    return model.to(dtype).eval()
