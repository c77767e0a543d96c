"""What a client asks an answer to look like, before any tokenizer knows of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GrammarKind = Literal["json", "regex", "choice", "lark", "gbnf"]

MAX_BYTES = 128 * 1024
"""Of a schema, pattern, grammar or list of choices, as text in UTF-8."""
MAX_PATTERN_BYTES = 8 * 1024
MAX_CHOICES = 1000
"""Also of all enums of a schema together."""


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """``text`` by kind: a JSON schema as JSON text; a regular expression for the whole answer; a JSON list of strings;
    a grammar in llguidance's dialect of Lark; one in GBNF (llama.cpp's). ``param``: the field that asked for it.

    The arguments of a named function are of kind "json". Free text and then a tagged part is of kind "lark", which
    takes schemas in (``%json {...}``).
    """

    kind: GrammarKind
    text: str
    param: str = "response_format"

    @property
    def is_document(self) -> bool:
        """JSON: stop strings inside it are data."""
        return self.kind == "json"


ANY_OBJECT = '{"type": "object"}'
"""The schema of JSON mode."""


class GrammarRefused(ValueError):
    """It can't be carried out, and why, in words for whoever sent it. ``param``: which field; ``code`` as of the API's
    errors."""

    def __init__(self, message: str, param: str, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.param, self.code = param, code
