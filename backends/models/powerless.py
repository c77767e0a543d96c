"""A tokenizer in which no text becomes an added token, and the way in for those that a template wrote.

Added tokens (``<|im_start|>``, ``</think>``, special or not) open turns, end answers, call tools: in a client's text
they must be letters only. So a copy of the tokenizer is made that knows each of them under another spelling, with a
secret in it that is drawn at load: nobody's text holds that. Where a template wrote an added token, the secret
spelling is put in its place, and the whole text is tokenised at once, by the same normaliser, pre-tokeniser and model
as ever.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

from tokenizers import Encoding, Tokenizer

from backends.models.traced_text import TracedText, own_of

_SECRET_CHARACTERS = 16
_BLANK = re.compile(r"[\s▁]+")


class PowerlessTokenizer:
    """``spec``: a tokenizer.json. It is changed."""

    def __init__(self, spec: dict[str, Any]) -> None:
        added = spec["added_tokens"]
        # Runs of white space are added tokens in some families (Gemma, Phi): they are text, and have no power.
        told = [token for token in added if not _BLANK.fullmatch(token["content"])]
        # Private-use characters, 12 bits each.
        secret = "".join(chr(0xE000 + secrets.randbelow(4096)) for _ in range(_SECRET_CHARACTERS))
        self._secret_of = {token["content"]: f"{secret}{chr(0xF0000 + i)}" for i, token in enumerate(told)}
        self._patterns = [
            pattern
            for normalized in (False, True)
            if (pattern := _pattern([token for token in told if token["normalized"] is normalized])) is not None
        ]
        for token in told:
            token |= {"content": self._secret_of[token["content"]], "normalized": False, "single_word": False}
        _rename(spec["model"], self._secret_of)
        spec |= {"post_processor": None, "truncation": None, "padding": None}
        wanted = {token["content"]: token["id"] for token in told}
        self._tokenizer = Tokenizer.from_str(json.dumps(spec))
        # Templates write the same few texts again and again, and some tokenizers have thousands of added tokens.
        self._spelled = lru_cache(1024)(self._spell)
        # Ids that are new to the model are given out anew, and come out the same unless the original's had gaps.
        given = {name: self._tokenizer.token_to_id(name) for name in wanted}
        self._id_of = {given[name]: wanted[name] for name in wanted if given[name] != wanted[name]}

    def encode(self, text: str) -> Encoding:
        """Tokens of ``text``; ids still want :meth:`ids`. Gives other threads their turn meanwhile."""
        return self._tokenizer.encode_batch_fast([self._with_secrets(text)], add_special_tokens=False)[0]

    def ids(self, encoding: Encoding) -> list[int]:
        ids = encoding.ids
        return [self._id_of.get(token_id, token_id) for token_id in ids] if self._id_of else ids

    def _with_secrets(self, text: str) -> str:
        plain = str.__str__(text) if not isinstance(text, TracedText) else str.__getitem__(text, slice(None))
        parts: list[str] = []
        at = 0
        for start, end in own_of(text):
            parts += [plain[at:start], self._spelled(plain[start:end])]
            at = end
        return "".join([*parts, plain[at:]])

    def _spell(self, text: str) -> str:
        """A template's own text with its added tokens in their secret spelling."""
        return _replaced(text, self._patterns, lambda match: self._secret_of[match.group()])


def _replaced(text: str, patterns: list[re.Pattern[str]], spell: Callable[[re.Match[str]], str]) -> str:
    """All matches of the first pattern first, as tokenizers look for their tokens; then of the others between them."""
    if not patterns:
        return text
    parts: list[str] = []
    at = 0
    for match in patterns[0].finditer(text):
        parts += [_replaced(text[at : match.start()], patterns[1:], spell), spell(match)]
        at = match.end()
    return "".join([*parts, _replaced(text[at:], patterns[1:], spell)])


def _pattern(tokens: Iterable[dict[str, Any]]) -> re.Pattern[str] | None:
    """Matches the longest of ``tokens`` that stand at a place."""
    contents = sorted(tokens, key=lambda token: -len(token["content"]))
    if not contents:
        return None
    return re.compile(
        "|".join(
            rf"(?<!\w){re.escape(token['content'])}(?!\w)" if token["single_word"] else re.escape(token["content"])
            for token in contents
        )
    )


def _rename(model: dict[str, Any], names: dict[str, str]) -> None:
    """Give vocabulary entries their new names (the ids stay), so that the model can't make them of letters either."""
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(piece, piece): token_id for piece, token_id in vocab.items()}
    else:
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
    if (unknown := model.get("unk_token")) is not None:
        model["unk_token"] = names.get(unknown, unknown)
    if "merges" in model:
        model["merges"] = [merge for merge in model["merges"] if not _makes(merge, names)]


def _makes(merge: str | list[str], names: dict[str, str]) -> bool:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left + right in names or left in names or right in names
