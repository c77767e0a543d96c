"""Random schemas, patterns, choices and grammars for the proof, and a second opinion on answers that follow them."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from backends.grammar.compiler import GrammarCompiler
from backends.grammar.spec import GrammarRefused, GrammarSpec
from backends.types import TokenGrammar

_WORDS = ("name", "age", "city", "tags", "ok", "size", "kind", "note", "été", "a b")
_PATTERNS = (
    r"[a-z]{1,8}(-[a-z]{1,8}){0,3}",
    r"(red|green|blue)( and (red|green|blue)){0,2}",
    r"[0-9]{4}-[01][0-9]-[0-3][0-9]",
    r"(ab|a)*c",
    r"[A-Z][a-z]{0,6}, [0-9]{1,3}\.",
    r"x?y{2,5}(z|é)+",
)
# A grammar that nests, and one that holds a schema.
_ARITHMETIC = 'start: e\ne: t ("+" t){0,3}\nt: /[0-9]{1,3}/ | "(" e ")"'
_TAGGED = """start: /[a-z ]{0,30}/ "<call>" c "</call>"
c: %json {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}"""
_IN_GBNF = 'root ::= "say: " word (", " word)*\nword ::= [a-z]+ | "\\"" [a-z]* "\\""'

Judge = Callable[[str], str | None]


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """One that short answers of any model fulfil: what could go on for ever is bounded."""
    kinds = ["string", "integer", "number", "boolean", "enum", "const", "null", "format", "pattern"]
    if depth < 3:
        kinds += ["object", "object", "array", "anyOf", "tuple", "free"] * (2 if depth == 0 else 1)
    kind = rng.choice(kinds)
    if kind == "string":
        return {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(2, 8)}
    if kind == "integer":
        low = rng.randint(-50, 50)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 500)}
    if kind == "number":
        return {"type": "number", "minimum": 0, "exclusiveMaximum": rng.choice([1, 10, 2.5])}
    if kind == "enum":
        return {"enum": rng.sample(["red", "green", 1, 2.5, None, True, 'a"b', "日本", {"x": [1]}], rng.randint(1, 4))}
    if kind == "const":
        return {"const": rng.choice(["fixed", 7, {"a": [True, None]}, "tab\tend"])}
    if kind == "format":
        return {"type": "string", "format": rng.choice(["date", "ipv4", "uuid"])}
    if kind == "pattern":
        return {"type": "string", "pattern": f"^{rng.choice(_PATTERNS)}$"}
    if kind == "object":
        names = rng.sample(_WORDS, rng.randint(0, 4))
        return {
            "type": "object",
            "properties": {name: random_schema(rng, depth + 1) for name in names},
            "required": [name for name in names if rng.random() < 0.7],
            "additionalProperties": False,
        }
    if kind == "free":
        return {"type": "object", "additionalProperties": random_schema(rng, 3), "maxProperties": 2}
    if kind == "array":
        least = rng.randint(0, 2)
        return {"type": "array", "items": random_schema(rng, depth + 1), "minItems": least, "maxItems": least + 2}
    if kind == "tuple":
        parts = [random_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]
        return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]}
    return {"type": kind}


def random_spec(rng: random.Random) -> tuple[GrammarSpec, Judge]:
    """What an answer must look like, and whether a whole answer does by somebody else's judgement."""
    kind = rng.random()
    if kind < 0.6:
        schema = random_schema(rng)
        return GrammarSpec("json", json.dumps(schema), "schema"), _document_judge(schema)
    if kind < 0.75:
        pattern = rng.choice(_PATTERNS)
        return GrammarSpec("regex", pattern, "regex"), lambda text: _unless(re.fullmatch(pattern, text), text, pattern)
    if kind < 0.9:
        choices = rng.sample(["yes", "no", "yes, but later", "été", 'quo"te', "a\nb", "", "no way"], rng.randint(1, 5))
        spec = GrammarSpec("choice", json.dumps(choices), "choice")
        return spec, lambda text: _unless(text in choices, text, str(choices))
    text, pattern = rng.choice(
        [
            (_ARITHMETIC, r"[0-9+()]+"),
            (_TAGGED, r'[a-z ]{0,30}<call>\{\s*"a"\s*:\s*(true|false).*\}</call>'),
            (_IN_GBNF, r'say: ([a-z]+|"[a-z]*")(, ([a-z]+|"[a-z]*"))*'),
        ]
    )
    kind_of_text = "gbnf" if "::=" in text else "lark"
    return GrammarSpec(kind_of_text, text, "grammar"), lambda answer: _unless(
        re.fullmatch(pattern, answer, re.DOTALL), answer, text
    )


@dataclass(slots=True)
class RandomGrammars:
    """Grammars by the number of a request; about one request in eight goes without."""

    compiler: GrammarCompiler
    seed: int

    def open(self, number: int) -> TokenGrammar | None:
        found = self._spec(number)
        return None if found is None else self.compiler.open(found[0])

    def judge(self, number: int, text: str, whole: bool) -> str | None:
        found = self._spec(number)
        return found[1](text) if whole and found is not None else None

    def _spec(self, number: int) -> tuple[GrammarSpec, Judge] | None:
        rng = random.Random(f"{self.seed}:{number}")
        if rng.random() < 0.125:
            return None
        while True:
            spec, judge = random_spec(rng)
            try:
                self.compiler.open(spec)
            except GrammarRefused:  # a union of what can't be told apart, say
                continue
            return spec, judge


def can_validate() -> bool:
    """Whether documents are validated against their schemas here, or only parsed."""
    try:
        import jsonschema  # noqa: F401
    except ImportError:
        return False
    return True


def _document_judge(schema: dict[str, Any]) -> Judge:
    def judge(text: str) -> str | None:
        try:
            document = json.loads(text)
        except ValueError as error:
            return f"{text!r} is no JSON: {error}"
        if not can_validate():
            return None
        import jsonschema

        checker = jsonschema.FormatChecker(["date", "ipv4", "uuid"])
        for error in jsonschema.Draft202012Validator(schema, format_checker=checker).iter_errors(document):
            return f"{text!r} breaks {json.dumps(schema)}: {error.message}"
        return None

    return judge


def _unless(fits: object, text: str, rule: str) -> str | None:
    return None if fits else f"{text!r} breaks {rule}"
