"""Small tokenizers of the shapes that served models have, with templates that do different things with contents."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from backends.models.tiny import TINY_TOKENIZERS
from backends.models.tokenizer import HfTokenizer

CORPUS = ["the quick brown fox jumps over the lazy dog. system user assistant", "été naïve 日本語 <tag> a = [1]\n\n  x"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
MERGES = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "a"), ("▁", "▁"), ("\n", "\n"), ("<", "b"), ("<b", ">")]
LETTERS = [*"abcdefghijklmnopqrstuvwxyz.,<>/|[]_INST=", "é", "日", "▁", "\n"]

PLAIN = "{{ bos_token }}{% for m in messages %}START{{ m.content }}END{% endfor %}"
TRIMMED = "{{ bos_token }}{% for m in messages %}{{ 'START' + m.content | trim + 'END' }}{% endfor %}"
REASONED = (
    "{% for m in messages %}START{% if m.role == 'assistant' and '</think>' in m.content %}"
    "{{ m.content.split('</think>')[-1].lstrip('\\n') }}{% else %}{{ m.content }}{% endif %}END{% endfor %}"
)
LOOKING = (
    "{% macro turn(m) %}START{{ m.content.replace('a', 'b')[1:] }}END{% endmacro %}{% for m in messages %}{{ turn(m) }}"
    "{{ m.content[0] if m.content else 'none' }}{{ m.content | length if '<' in m.content }}"
    "{{ m.content | upper | tojson }}{{ ['START', m.content, 'END'] | join('|') }}{% endfor %}"
)
TEMPLATES = {"plain": PLAIN, "trimmed": TRIMMED, "reasoned": REASONED, "looking": LOOKING}


def chatml() -> Any:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    turns = ["<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, special_tokens=turns)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("</think>", special=False), AddedToken("<think>", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")


def sparse() -> Any:
    """By bytes, but not all: like SmolLM's, the vocabulary lacks some control characters, which are then left out."""
    pieces = [letter for letter in sorted(pre_tokenizers.ByteLevel.alphabet()) if letter not in "ĄďĐđĒēĔĕ"]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|start|>", "<|end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def sentencepiece(
    specials: list[str], pre_tokenizer: Any, normalizer: Any, decoder: Any, added: tuple[AddedToken, ...] = ()
) -> Any:
    """Byte fallback; the added tokens are in the model's own vocabulary, as converted files have them."""
    names = [*specials, *(token.content for token in added)]
    pieces = list(dict.fromkeys([*names, *BYTES, *LETTERS, *(left + right for left, right in MERGES)]))
    tokenizer = Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, MERGES, unk_token="<unk>", byte_fallback=True)
    )
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoder
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", specials.index("<s>"))]
    )
    tokenizer.add_special_tokens(specials)
    tokenizer.add_tokens(list(added))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def fused(*more: Any) -> Any:
    return decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *more])


def mistral() -> Any:
    return sentencepiece(
        ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"],
        pre_tokenizers.Metaspace(prepend_scheme="first", split=False),
        None,
        fused(decoders.Strip(" ", 1, 0)),
    )


def metaspace() -> Any:
    return sentencepiece(
        ["<unk>", "<s>", "</s>"], pre_tokenizers.Metaspace(prepend_scheme="always"), None, decoders.Metaspace()
    )


def gemma() -> Any:
    runs = tuple(AddedToken(text, special=False, normalized=False) for text in ("\n\n", "▁▁", "<b>", "</think>"))
    return sentencepiece(
        ["<unk>", "<s>", "</s>", "<start_of_turn>", "<end_of_turn>"],
        pre_tokenizers.Split(" ", "merged_with_previous"),
        normalizers.Replace(" ", "▁"),
        fused(),
        runs,
    )


def phi3() -> Any:
    names = ("<|user|>", "<|end|>", "<|assistant|>")
    turns = tuple(AddedToken(name, special=True, rstrip=True, normalized=False) for name in names)
    return sentencepiece(
        ["<unk>", "<s>", "</s>"],
        None,
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        fused(decoders.Strip(" ", 1, 0)),
        turns,
    )


def unigram() -> Any:
    """The model itself would make ``<s>`` of its letters: it is an entry of the vocabulary like any other."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("<turn>", 0.0)]
    pieces += [(piece, -10.0) for piece in BYTES] + [(piece, -3.0) for piece in LETTERS] + [("▁the", -4.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    tokenizer.decoder = fused()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>", "<turn>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def wordpiece() -> Any:
    """Its decoder looks at punctuation: not to be said in bytes."""
    pieces = ["[UNK]", "[SEP]", "the", "fox", "##es", "##x", ".", ",", "a", "b", "é", "don", "'", "t"]
    tokenizer = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[UNK]", "[SEP]"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="[SEP]")


def split_words() -> Any:
    """A regular expression in the decoder, and none of the known steps."""
    pieces = ["[UNK]", "[END]", *"abcé", "_x", "_yy"]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="[UNK]"))
    tokenizer.decoder = decoders.Sequence([decoders.Replace(Regex("_+"), " "), decoders.Fuse()])
    tokenizer.add_special_tokens(["[UNK]", "[END]"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="[END]")


def word_ends() -> Any:
    """A piece that ends a word has a suffix, which is a space if more comes."""
    pieces = ["[UNK]", "[END]", *"abcé", *(letter + "</w>" for letter in "abcé")]
    tokenizer = Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="[UNK]", end_of_word_suffix="</w>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.BPEDecoder()
    tokenizer.add_special_tokens(["[UNK]", "[END]"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="[END]")


def bare() -> Any:
    """Without a decoder: pieces are words."""
    pieces = ["[UNK]", "[END]", "the", "fox", "é"]
    tokenizer = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["[UNK]", "[END]"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="[END]")


FAMILIES = {
    **TINY_TOKENIZERS,
    "chatml": chatml,
    "sparse": sparse,
    "mistral": mistral,
    "metaspace": metaspace,
    "gemma": gemma,
    "phi3": phi3,
    "unigram": unigram,
}
OTHERS = {"wordpiece": wordpiece, "regex": split_words, "word ends": word_ends, "bare": bare}
"""Families whose decoders are not understood as bytes."""


@cache
def family(name: str, template: str | None = None) -> HfTokenizer:
    """``template``: of :data:`TEMPLATES`, with the family's own turn tokens in it."""
    fast = {**FAMILIES, **OTHERS}[name]()
    if template is not None:
        start, end = turn_tokens(fast)
        fast.chat_template = TEMPLATES[template].replace("START", start).replace("END", end)
    return HfTokenizer(fast)


def turn_tokens(fast: Any) -> tuple[str, str]:
    """Two added tokens for templates to use."""
    names = [token.content for token in fast.backend_tokenizer.get_added_tokens_decoder().values() if token.special]
    return names[-2], names[-1]


def added(tokenizer: HfTokenizer) -> dict[str, int]:
    """All added tokens but runs of white space."""
    found = tokenizer._fast.get_added_tokens_decoder()
    return {token.content: i for i, token in found.items() if token.content.strip("\n▁ ")}


@cache
def without_added(fast: Any, *names: str) -> Tokenizer:
    """The tokenizer with fewer added tokens: to it, those are letters. Not for names in the model's own vocabulary."""
    spec = json.loads(fast.backend_tokenizer.to_str())
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["content"] not in names]
    return Tokenizer.from_str(json.dumps(spec))
