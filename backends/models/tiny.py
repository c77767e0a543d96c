"""A random model of two layers with its tokenizer and heads: everything real but the text. For proofs and tests."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from backends.heads.module import MedusaHeads
from backends.models.tokenizer import HfTokenizer

TINY_MODEL_NAME = "tiny-random"

_SPECIALS = ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_LLAMA3_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
    "{{ m.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
_LLAMA2_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ ' ' + m.content + ' ' + eos_token }}"
    "{% else %}{{ bos_token + '[INST] ' + m.content + ' [/INST]' }}{% endif %}{% endfor %}"
)
_MERGES = (("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "a"), ("e", "r"), ("i", "n"), ("in", "g"), ("▁", "▁"))


def tiny_tokenizer(kind: str = "byte-level") -> HfTokenizer:
    """A small tokenizer of one of :data:`TINY_TOKENIZERS`; token 0 ends an answer in each."""
    return HfTokenizer(TINY_TOKENIZERS[kind]())


def _byte_level() -> Any:
    """Bytes and four special tokens, all named; vocabulary 260."""
    tokenizer = _of_bytes(_SPECIALS)
    tokenizer.add_special_tokens(list(_SPECIALS))
    return _fast(tokenizer, _TEMPLATE, eos_token=_SPECIALS[0], additional_special_tokens=list(_SPECIALS[1:]))


def _llama3() -> Any:
    """As in Llama 3, the tokens that open turns are special but have no name; ``</think>`` isn't even special."""
    tokenizer = _of_bytes(("<|eot_id|>",))
    tokenizer.add_special_tokens(["<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"])
    tokenizer.add_tokens([AddedToken("</think>", special=False, normalized=False)])
    return _fast(tokenizer, _LLAMA3_TEMPLATE, eos_token="<|eot_id|>", bos_token="<|begin_of_text|>")


def _byte_fallback() -> Any:
    """As in Llama 2: ``▁`` for a space, one in front of every text, bytes for what the vocabulary lacks."""
    pieces = ["</s>", "<s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    pieces += [*"abcdefghijklmnopqrstuvwxyz.,é日�", *(left + right for left, right in _MERGES)]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=list(_MERGES),
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens(["</s>", "<s>", "<unk>"])
    return _fast(tokenizer, _LLAMA2_TEMPLATE, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


TINY_TOKENIZERS = {"byte-level": _byte_level, "byte-fallback": _byte_fallback, "llama3": _llama3}


def _of_bytes(before: tuple[str, ...]) -> Tokenizer:
    pieces = [*before, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _fast(tokenizer: Tokenizer, template: str, **names: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    fast.chat_template = template
    return fast


def tiny_model(
    *, seed: int = 0, dtype: torch.dtype = torch.float32, layers: int = 2, hidden: int = 64, vocab_size: int = 260
) -> Any:
    """A random Llama whose logits are spread enough for answers to differ; context 256."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab_size,
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
