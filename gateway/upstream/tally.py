"""What an upstream's answer has cost so far: by its own count, or by what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from gateway.upstream.chunk import NULL, Chunk
from gateway.upstream.payload import tokens_of


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    total_tokens: int | None = None

    @property
    def total(self) -> int:
        return max(self.total_tokens or 0, (self.prompt_tokens or 0) + (self.completion_tokens or 0))


_NO_USAGE = _Usage()


@dataclass(slots=True)
class Tally:
    """``estimated_prompt``: tokens of the prompts, as good as they are known here. ``usage``: the largest count that
    the upstream gave, as it came; whatever it sends after that, null or less, takes nothing back."""

    estimated_prompt: int
    usage: msgspec.Raw = field(default_factory=lambda: NULL)
    _counted: _Usage = _NO_USAGE
    _characters: int = 0
    _parts: int = 0
    _more_came: bool = False
    """Something was said that the count can't know of."""

    def take(self, chunk: Chunk) -> None:
        self._characters += chunk.characters
        self._parts += chunk.parts
        self._more_came = self._more_came or chunk.parts > 0
        if chunk.usage == NULL:
            return
        try:
            usage = msgspec.json.decode(chunk.usage, type=_Usage)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return
        if usage.total > 0 and usage.total >= self._counted.total:
            self.usage, self._counted, self._more_came = chunk.usage, usage, False

    @property
    def prompt_tokens(self) -> int:
        return self._counted.prompt_tokens or self.estimated_prompt

    @property
    def answer_tokens(self) -> int:
        """The upstream's count, or what came by length, at least one for each part: of the two the larger when more
        came after the count."""
        counted = self._counted.completion_tokens or max(self._counted.total - self.prompt_tokens, 0)
        if self._counted.total and not self._more_came:
            return counted
        return max(counted, self._parts, tokens_of(self._characters))

    @property
    def tokens(self) -> int:
        """Of prompts and answers together: what is to be paid if nothing more comes."""
        if self._counted.total and not self._more_came:
            return self._counted.total
        return max(self._counted.total, self.estimated_prompt + self.answer_tokens)
