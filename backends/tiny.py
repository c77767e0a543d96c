"""A random model of two layers with its tokenizer and heads: everything real but the text. For proofs and tests."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from backends.heads import MedusaHeads
from backends.tokenizer import HfTokenizer

TINY_MODEL_NAME = "tiny-random"

_SPECIALS = ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tiny_tokenizer() -> HfTokenizer:
    """Bytes and four special tokens; vocabulary 260, of which id 0 ends an answer."""
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: i for i, piece in enumerate([*_SPECIALS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_SPECIALS))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=_SPECIALS[0], additional_special_tokens=list(_SPECIALS[1:])
    )
    fast.chat_template = _TEMPLATE
    return HfTokenizer(fast)


def tiny_model(*, seed: int = 0, dtype: torch.dtype = torch.float32, layers: int = 2, hidden: int = 64) -> Any:
    """A random Llama whose logits are spread enough for answers to differ; context 256."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=260,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_id=0,
        bos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: Any = LlamaForCausalLM(config)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.2)
    return model.to(dtype).eval()


def tiny_heads(hidden: int = 64, *, num_heads: int = 4, seed: int = 0) -> MedusaHeads:
    """Untrained heads: they guess what ``lm_head`` says about the present position."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return MedusaHeads(hidden, num_heads, 2 * hidden).eval().requires_grad_(False)
