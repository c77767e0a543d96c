"""Grammars for the tokens of the tiny model, and whether a document fits one, character by character."""

from __future__ import annotations

from functools import cache

import numpy as np

from backends.grammar.compiler import GrammarCompiler
from backends.models.tiny import tiny_tokenizer
from backends.types import TokenGrammar

VOCAB, EOS = 260, 0


@cache
def tiny_grammars() -> GrammarCompiler:
    return GrammarCompiler(tiny_tokenizer().to_json, VOCAB, [EOS])


def allowed(grammar: TokenGrammar) -> set[int]:
    row = np.zeros(VOCAB, np.float32)
    grammar.mask(row)
    return set(np.flatnonzero(row == 0).tolist())


def accepts(grammar: TokenGrammar, text: str) -> bool:
    """Whether a model that wants to write ``text``, and then to end, may. Moves the grammar on."""
    for token in tiny_tokenizer().encode(text):
        if token not in allowed(grammar):
            return False
        grammar.advance(token)
    return EOS in allowed(grammar)
