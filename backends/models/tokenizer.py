"""The served model's tokenizer: prompts and chats to tokens, tokens to text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from backends.models.chat_template import ChatTemplate, RenderedTooLong, TemplateRefusal
from backends.models.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer, byte_rules
from backends.models.powerless import PowerlessTokenizer
from backends.models.token_bounds import TokenBound
from backends.models.traced_text import TracedText, own_of
from backends.types import NoChatTemplate, PromptTooLong


class HfTokenizer:
    """See :class:`backends.types.ChatTokenizer`. Wraps a fast tokenizer of transformers."""

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError("the model's tokenizer has no fast (tokenizers) version")
        self._hf = tokenizer
        self._fast: Tokenizer = tokenizer.backend_tokenizer
        self._fast.no_truncation()
        self._fast.no_padding()
        spec = json.loads(self._fast.to_str())
        self._rules = byte_rules(spec["decoder"])
        self._bound = TokenBound(spec)
        self._special = frozenset(token["id"] for token in spec["added_tokens"] if token["special"])
        # What a token adds, by (id, whether it is the first); filled as tokens come up.
        self._bytes: dict[tuple[int, bool], bytes | None] = {}
        self._powerless = PowerlessTokenizer(spec)
        self._template: tuple[str, ChatTemplate] | None = None
        self._adds_bos = self._fast.encode("").ids[:1] == [self._hf.bos_token_id]

    @classmethod
    def from_pretrained(cls, model: str | Path) -> HfTokenizer:
        from transformers import AutoTokenizer

        return cls(AutoTokenizer.from_pretrained(model))

    def save_pretrained(self, folder: Path) -> None:
        self._hf.save_pretrained(folder)

    def __len__(self) -> int:
        """How many token ids there are."""
        return len(self._hf)

    @property
    def eos_token_id(self) -> int | None:
        return self._hf.eos_token_id

    @property
    def chat_template(self) -> str | None:
        return self._hf.get_chat_template() if self.has_chat_template else None

    @property
    def template_variables(self) -> frozenset[str]:
        """The names that the chat template reads."""
        return self._chat_template().variables if self.has_chat_template else frozenset()

    def id_of(self, token: str) -> int | None:
        """The id of the one token that ``token`` is, if there is one."""
        return self._fast.token_to_id(token)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._hf.chat_template)

    def to_json(self) -> str:
        """Its ``tokenizer.json``."""
        return self._fast.to_str()

    def encode(self, text: str, most_tokens: int | None = None) -> list[int]:
        """Token ids of a raw prompt, with the special tokens that the model wants at its start.

        A raw prompt is the client's own from its first token to its last, so special tokens in it are what they say.
        One that begins with the BOS token gets no second one.
        """
        if most_tokens is not None:
            self._refuse_early(self._bound.least_tokens(self._bound.size(text)), most_tokens)
        # Of encode and encode_batch, only the second gives other threads their turn.
        encoding = self._fast.encode_batch_fast([text], add_special_tokens=True)[0]
        # Perhaps one less; the caller counts anyway. Here it is about not making a list of millions.
        self._refuse_early(len(encoding) - self._adds_bos, most_tokens)
        ids = encoding.ids
        return ids[1:] if self._adds_bos and ids[:2] == [self._hf.bos_token_id] * 2 else ids

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        most_tokens: int | None = None,
        variables: Mapping[str, Any] | None = None,
        *,
        continues: bool = False,
    ) -> list[int]:
        """See the protocol. Raises ValueError when the model has no template or its template refuses the messages.

        No text in ``messages`` or ``variables`` can forge a turn: an added token inside it is tokenised as ordinary
        text, whatever the template does with it, see :mod:`backends.models.powerless`.
        """
        if not self.has_chat_template:
            raise NoChatTemplate("the model has no chat template")
        most_bytes = self._bound.most_bytes(most_tokens)
        try:
            given = {**(variables or {}), **({"add_generation_prompt": False} if continues else {})}
            text = self._chat_template().render(messages, given, self._bound.size, most_bytes)
        except RenderedTooLong as error:
            raise PromptTooLong(self._bound.least_tokens(error.size)) from None
        if continues:
            text = _up_to(text, str(messages[-1]["content"]))
        encoding = self._powerless.encode(text)
        self._refuse_early(len(encoding), most_tokens)
        return self._powerless.ids(encoding)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ``token_ids``, special tokens left out."""
        detokenizer = self.detokenizer()
        return "".join([*map(detokenizer.push, token_ids), detokenizer.flush()])

    def decode_by_library(self, token_ids: Sequence[int]) -> str:
        """The same by the tokenizers library, to compare with."""
        return self._fast.decode(token_ids, skip_special_tokens=True)

    def detokenizer(self) -> Detokenizer:
        """Of a text of its own, as a chat's answer is."""
        return self.detokenizer_after(())

    def detokenizer_after(self, prompt_ids: Sequence[int]) -> Detokenizer:
        """Of a text that goes on from ``prompt_ids``: a space at its beginning belongs to it."""
        if self._rules is not None:
            return ByteDetokenizer(self._rules, self._bytes_of, prompt_ids)
        return WindowDetokenizer(self._fast.decode, lambda token_id: token_id not in self._special, prompt_ids)

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to a text, in its midst. Nothing for a special token: it is not shown."""
        if self._rules is None:
            return self.detokenizer().next_bytes(token_id)
        return self._bytes_of(token_id, False) or b""

    def token_name(self, token_id: int) -> str | None:
        """The name of a special token; None of any other."""
        return self._fast.id_to_token(token_id) if token_id in self._special else None

    def token_text(self, detokenizer: Detokenizer, token_id: int) -> tuple[str, bytes]:
        """What a token would add to the text so far, as text (special tokens by their names) and as bytes."""
        raw = detokenizer.next_bytes(token_id)
        name = self.token_name(token_id)
        return raw.decode("utf-8", "replace") if name is None else name, raw

    def texts(self, token_ids: Sequence[int], others: Sequence[Sequence[int]]) -> list[list[tuple[str, bytes]]]:
        detokenizer, found = self.detokenizer(), []
        for token_id, instead in zip(token_ids, others, strict=True):
            found.append([self.token_text(detokenizer, each) for each in (token_id, *instead)])
            detokenizer.push(token_id)
        return found

    def _bytes_of(self, token_id: int, first: bool) -> bytes | None:
        try:
            return self._bytes[token_id, first]
        except KeyError:
            pass
        piece = None if token_id in self._special else self._fast.id_to_token(token_id)
        found = None if piece is None or self._rules is None else self._rules.bytes_of(piece, first=first)
        self._bytes[token_id, first] = found
        return found

    def _chat_template(self) -> ChatTemplate:
        source = self._hf.get_chat_template()
        if self._template is None or self._template[0] != source:
            self._template = source, ChatTemplate(source, self._hf.special_tokens_map)
        return self._template[1]

    @staticmethod
    def _refuse_early(tokens: int, most_tokens: int | None) -> None:
        if most_tokens is not None and tokens > most_tokens:
            raise PromptTooLong(tokens)


def _up_to(text: TracedText, last: str) -> TracedText:
    """``text`` without what the template wrote after ``last``, the last message.

    Raises :class:`TemplateRefusal` where the template has made another text of it.
    """
    end = len(text)
    for start, stop in reversed(own_of(text)):
        if stop < end:
            break
        end = start
    if not text[:end].rstrip().endswith(last.strip()):
        raise TemplateRefusal("the last message can't be continued: the template changes its text")
    return text[:end]
