"""The served model's tokenizer: chat template, and incremental detokenising."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class Detokenizer:
    """Turns one sequence's tokens into text piece by piece. A piece is complete: it never ends inside a character."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)

    def push(self, token_id: int) -> str:
        return self._stream.step(self._tokenizer, token_id) or ""


class HfTokenizer:
    """See :class:`backends.types.ChatTokenizer`. Wraps a fast tokenizer of transformers."""

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError("the model's tokenizer has no fast (tokenizers) version")
        self._hf = tokenizer
        self._fast: Tokenizer = tokenizer.backend_tokenizer
        # A second copy for text in which special tokens have no power; the switch is not one to flip between threads.
        self._plain = Tokenizer.from_str(self._fast.to_str())
        self._plain.encode_special_tokens = True
        self._special = tuple(str(token) for token in tokenizer.all_special_tokens)
        self._bytes_of_unicode = _byte_level_alphabet()

    @classmethod
    def from_pretrained(cls, model: str | Path) -> HfTokenizer:
        from transformers import AutoTokenizer

        return cls(AutoTokenizer.from_pretrained(model))

    def save_pretrained(self, folder: Path) -> None:
        self._hf.save_pretrained(folder)

    @property
    def eos_token_id(self) -> int | None:
        return self._hf.eos_token_id

    @property
    def has_chat_template(self) -> bool:
        return bool(self._hf.chat_template)

    def encode(self, text: str) -> list[int]:
        """Token ids of a raw prompt, with the special tokens that the model wants at its start."""
        return self._fast.encode(text, add_special_tokens=True).ids

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """See the protocol. Raises ValueError when the model has no template or its template refuses the messages.

        Message text can't forge turns: special tokens inside it are tokenised as ordinary text.
        """
        if not self.has_chat_template:
            raise ValueError("the model has no chat template; use /v1/completions")
        try:
            if not any(token in message["content"] for message in messages for token in self._special):
                text = self._render(messages)
                return self._fast.encode(text, add_special_tokens=False).ids
            # Message texts are left out of the template, marked by a private character, and tokenised on their own.
            marked = [{**message, "content": f"\ue0f1{i}\ue0f1"} for i, message in enumerate(messages)]
            pieces = self._render(marked).split("\ue0f1")
        except TemplateError as error:
            raise ValueError(f"the model's chat template refuses these messages: {error}") from error
        ids: list[int] = []
        for i, piece in enumerate(pieces):
            if i % 2:
                ids += self._plain.encode(messages[int(piece)]["content"], add_special_tokens=False).ids
            else:
                ids += self._fast.encode(piece, add_special_tokens=False).ids
        return ids

    def _render(self, messages: list[dict[str, str]]) -> str:
        return self._hf.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)

    def decode(self, token_ids: list[int]) -> str:
        return self._fast.decode(token_ids, skip_special_tokens=True)

    def detokenizer(self) -> Detokenizer:
        return Detokenizer(self._fast)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; of a special token, its name."""
        piece = self._hf.convert_ids_to_tokens(token_id)
        if piece is None:
            return b""
        try:
            return bytes(self._bytes_of_unicode[character] for character in piece)
        except KeyError:
            return self._hf.decode([token_id]).encode()


def _byte_level_alphabet() -> dict[str, int]:
    """The byte-level BPE alphabet of GPT-2 (Radford et al., 2019): printable Latin-1 as is, the rest from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return alphabet
