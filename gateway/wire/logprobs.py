"""Log probabilities in the two forms that OpenAI gives them."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from itertools import chain

from backends.types import ChatTokenizer, PositionLogprobs, PromptScore, TokenLogprob
from gateway.wire.responses import ChatLogprobs, CompletionLogprobs, TokenLogprobOut, TopLogprob

LOWEST = -9999.0
"""OpenAI's stand-in for minus infinity, which JSON can't say."""


def chat_logprobs(positions: Iterable[PositionLogprobs]) -> ChatLogprobs:
    return ChatLogprobs(
        [
            TokenLogprobOut(
                token=position.chosen.token,
                logprob=_finite(position.chosen),
                bytes=list(position.chosen.token_bytes),
                top_logprobs=[TopLogprob(each.token, _finite(each), list(each.token_bytes)) for each in position.top],
            )
            for position in positions
        ]
    )


def prompt_positions(
    tokenizer: ChatTokenizer, token_ids: Sequence[int], scores: Sequence[PromptScore]
) -> list[PositionLogprobs]:
    """A prompt's tokens with their log-probabilities; of the first there is none, and 0 stands for it."""
    scored = [PromptScore(0.0, ()), *scores]
    texts = tokenizer.texts(token_ids, [[other for other, _ in score.top] for score in scored])
    found = []
    for token_id, score, (chosen, *others) in zip(token_ids, scored, texts, strict=True):
        top = (
            TokenLogprob(other, text, value, raw) for (other, value), (text, raw) in zip(score.top, others, strict=True)
        )
        found.append(PositionLogprobs(TokenLogprob(token_id, chosen[0], score.logprob, chosen[1]), tuple(top)))
    return found


class CompletionLogprobsWriter:
    """Formats positions as they come; one per sequence, since text offsets go on from chunk to chunk."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def write(
        self, positions: Iterable[PositionLogprobs], prompt: Sequence[PositionLogprobs] = ()
    ) -> CompletionLogprobs:
        """Two alternatives that read the same (parts of one character) share a key; the likelier one is kept.
        ``prompt``: echoed before ``positions``; its first token has no log-probability."""
        out = CompletionLogprobs([], [], [], [])
        for first in prompt[:1]:
            out.tokens.append(first.chosen.token)
            out.token_logprobs.append(None)
            out.top_logprobs.append(None)
            out.text_offset.append(self._pass(first.chosen.token_bytes))
        for position in chain(prompt[1:], positions):
            out.tokens.append(position.chosen.token)
            out.token_logprobs.append(_finite(position.chosen))
            alternatives: dict[str, float] = {}
            for each in (*position.top, position.chosen):
                alternatives.setdefault(each.token, _finite(each))
            out.top_logprobs.append(alternatives)
            out.text_offset.append(self._pass(position.chosen.token_bytes))
        return out

    def _pass(self, raw: bytes) -> int:
        """Go on by one token; where its own text begins: inside a character, that is where the character begins."""
        begun = bool(self._decoder.getstate()[0])
        shown = self._decoder.decode(raw[:1])
        goes_on = raw and 0x80 <= raw[0] < 0xC0 and len(shown) <= 1
        # Else what was begun is no character, and takes a place of its own in the text.
        start = self._offset + (1 if begun and raw and not goes_on else 0)
        self._offset += len(shown) + len(self._decoder.decode(raw[1:]))
        return start


def _finite(entry: TokenLogprob) -> float:
    # max() with NaN depends on the order of its arguments: this order turns NaN into LOWEST.
    return max(LOWEST, entry.logprob)
