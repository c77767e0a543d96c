"""JSON schemas as clients send them: each keyword is honoured, says nothing of validity, or is refused by name. Pure.

llguidance enforces what it knows and names much of what it doesn't; but a keyword that nobody has heard of it passes
over in silence, and ``x-guidance`` it obeys. So a schema is read here first, and handed on without either.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from backends.grammar.spec import MAX_BYTES, MAX_CHOICES, GrammarRefused

MAX_DEPTH = 64
MAX_PROPERTIES = 1000

HONOURED = frozenset(
    (
        "type",
        "enum",
        "const",
        "properties",
        "required",
        "additionalProperties",
        "patternProperties",
        "minProperties",
        "maxProperties",
        "items",
        "prefixItems",
        "additionalItems",
        "minItems",
        "maxItems",
        "minLength",
        "maxLength",
        "pattern",
        "format",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
        "anyOf",
        "oneOf",
        "allOf",
        "$ref",
        "$defs",
        "definitions",
        "$anchor",
    )
)
ANNOTATIONS = frozenset(
    (
        "title",
        "description",
        "default",
        "examples",
        "example",
        "deprecated",
        "readOnly",
        "writeOnly",
        "$comment",
        "$schema",
        "$id",
        "$vocabulary",
        "$dynamicAnchor",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
        "discriminator",
    )
)
"""They say nothing of which documents are valid (``discriminator`` is OpenAPI's; its branches are told by oneOf)."""
REFUSED = {
    "not": "say what is allowed instead",
    "if": "write the cases as anyOf",
    "then": "write the cases as anyOf",
    "else": "write the cases as anyOf",
    "dependentRequired": "write the cases as anyOf",
    "dependentSchemas": "write the cases as anyOf",
    "dependencies": "write the cases as anyOf",
    "contains": "use items or prefixItems",
    "minContains": "use items or prefixItems",
    "maxContains": "use items or prefixItems",
    "uniqueItems": "leave it out, and drop what comes twice",
    "propertyNames": "use patternProperties with additionalProperties: false",
    "unevaluatedProperties": "use additionalProperties",
    "unevaluatedItems": "use items: false after prefixItems",
    "$dynamicRef": "use $ref",
    "$recursiveRef": "use $ref",
    "$recursiveAnchor": "use $ref",
    "nullable": 'add "null" to type',
}
"""Keywords of JSON Schema (``nullable`` is OpenAPI's) that are known and refused, and what to do instead."""
FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid", "unknown")
)

_MAPS = frozenset(("properties", "patternProperties", "$defs", "definitions"))
_LISTS = frozenset(("prefixItems", "anyOf", "oneOf", "allOf"))
_SINGLE = frozenset(("additionalProperties", "additionalItems", "items"))
_MOST_SHOWN = 100


def checked_schema(text: str, param: str) -> str:
    """The schema ``text`` as it is enforced: without what says nothing. Raises :class:`GrammarRefused`, naming the
    place by its path below ``param``."""
    if len(text) > MAX_BYTES:
        raise GrammarRefused(f"'{param}' is too large: at most {MAX_BYTES} bytes of JSON are taken.", param)
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarRefused(f"'{param}' is not valid JSON: {_words(error)}.", param, "invalid_json") from None
    if not isinstance(schema, dict):
        raise GrammarRefused(f"'{param}' must be a JSON schema, an object.", param, "invalid_type")
    found = json.dumps(_Reader(schema, param).read(), ensure_ascii=False)
    if not _is_text(found):
        raise GrammarRefused(f"'{param}' holds half a surrogate pair, which no text can.", param)
    return found


class _Reader:
    def __init__(self, schema: dict[str, Any], param: str) -> None:
        self._root, self._param = schema, param
        self._seen: set[int] = set()
        self._anchors: set[str] = set()
        self._refs: list[tuple[str, str]] = []
        self._enums = self._properties = 0

    def read(self) -> dict[str, Any]:
        found = self._schema(self._root, self._param, 0)
        for path, ref in self._refs:
            self._check_ref(path, ref)
        return found

    def _schema(self, schema: Any, path: str, depth: int) -> Any:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise GrammarRefused(f"'{path}' must be a schema: an object, true or false.", path, "invalid_type")
        if depth > MAX_DEPTH:
            raise GrammarRefused(
                f"'{self._param}' is nested too deeply: at most {MAX_DEPTH} levels are taken.", self._param
            )
        self._seen.add(id(schema))
        found = {}
        for name, value in schema.items():
            if name in ANNOTATIONS or name.startswith("x-"):
                # References are resolved from here whatever its base is called.
                if name in ("$id", "$dynamicAnchor") and depth:
                    raise _refusal(path, name, "use $defs and $ref with a path such as #/$defs/name")
                continue
            if name == "uniqueItems" and value is False:
                continue
            if name not in HONOURED:
                raise _refusal(path, name, REFUSED.get(name))
            found[name] = self._keyword(name, value, f"{path}.{_cut(name)}", depth)
        self._check_numbers(found, path)
        return found

    def _keyword(self, name: str, value: Any, path: str, depth: int) -> Any:
        if name in _MAPS:
            if not isinstance(value, dict):
                raise GrammarRefused(f"'{path}' must be an object of schemas.", path, "invalid_type")
            if name == "properties":
                self._properties = self._count(self._properties, len(value), MAX_PROPERTIES, path, "properties")
            return {key: self._schema(each, f"{path}.{_cut(key)}", depth + 1) for key, each in value.items()}
        if name in _LISTS or (name == "items" and isinstance(value, list)):
            if not isinstance(value, list):
                raise GrammarRefused(f"'{path}' must be an array of schemas.", path, "invalid_type")
            self._enums = self._count(self._enums, len(value), MAX_CHOICES, path, "alternatives and enum values")
            return [self._schema(each, f"{path}[{index}]", depth + 1) for index, each in enumerate(value)]
        if name in _SINGLE:
            return self._schema(value, path, depth + 1)
        if name == "enum" and isinstance(value, list):
            self._enums = self._count(self._enums, len(value), MAX_CHOICES, path, "alternatives and enum values")
        elif name == "$ref":
            self._refs.append((path, str(value)))
        elif name == "$anchor":
            self._anchors.add(str(value))
        elif name == "format" and value not in FORMATS:
            raise GrammarRefused(
                f"'{path}' is {_shown(value)}, which can't be enforced; use pattern, or one of: "
                f"{', '.join(sorted(FORMATS - {'unknown'}))}.",
                path,
                "unsupported_parameter",
            )
        return value

    def _check_numbers(self, schema: dict[str, Any], path: str) -> None:
        least, named = schema.get("minProperties"), schema.get("required")
        if isinstance(least, int) and least > max(1, len(named) if isinstance(named, list) else 0):
            # Of names that are left open two may be equal, and a reader sees one property then.
            path = f"{path}.minProperties"
            raise GrammarRefused(
                f"'{path}' above 1 is enforced only up to the number of required properties; name them in required.",
                path,
                "unsupported_parameter",
            )

    def _count(self, before: int, more: int, most: int, path: str, what: str) -> int:
        if before + more > most:
            raise GrammarRefused(f"'{path}' makes it more than {most} {what}, the most that are taken.", path)
        return before + more

    def _check_ref(self, path: str, ref: str) -> None:
        target: Any = self._root
        if ref.startswith("#") and ref[1:] in self._anchors:
            return
        if ref == "#" or ref.startswith("#/"):
            for step in ref.split("/")[1:]:
                name = unquote(step).replace("~1", "/").replace("~0", "~")
                if isinstance(target, list) and name.isdecimal() and int(name) < len(target):
                    target = target[int(name)]
                else:
                    target = target.get(name) if isinstance(target, dict) else None
            if isinstance(target, bool) or id(target) in self._seen:
                return
        raise GrammarRefused(
            f"'{path}' is {_shown(ref)}, and no schema of this document is there; use #/$defs/name.", path
        )


def _refusal(path: str, name: str, instead: str | None) -> GrammarRefused:
    full = f"{path}.{_cut(name)}"
    if instead is None:
        return GrammarRefused(
            f"'{full}' is no keyword of JSON Schema that is known here; leave it out.", full, "unsupported_parameter"
        )
    return GrammarRefused(f"'{full}' is a keyword that can't be enforced; {instead}.", full, "unsupported_parameter")


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + "..."


def _shown(value: Any) -> str:
    return _cut(json.dumps(value, ensure_ascii=False))


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _words(error: Exception) -> str:
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)


def keyword_paths(schema: Any, keyword: str, path: str, depth: int = 0) -> Iterator[str]:
    """Where ``keyword`` stands in a schema that was read, for an error that tells only its name."""
    if depth > 2 * MAX_DEPTH:
        return
    if isinstance(schema, dict):
        for name, value in schema.items():
            if name == keyword:
                yield f"{path}.{name}"
            yield from keyword_paths(value, keyword, f"{path}.{_cut(name)}", depth + 1)
    elif isinstance(schema, list):
        for index, each in enumerate(schema):
            yield from keyword_paths(each, keyword, f"{path}[{index}]", depth + 1)
