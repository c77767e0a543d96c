"""Every keyword of JSON Schema: what is honoured lets no invalid document through, what is not is refused by name."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from backends.grammar.schema import ANNOTATIONS, HONOURED, REFUSED, as_markdown
from backends.grammar.spec import GrammarRefused, GrammarSpec
from tests.support.grammars import accepts, tiny_grammars
from tests.support.paths import ROOT

STR, INT = {"type": "string"}, {"type": "integer"}


def closed(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False}


# (keyword, schema, documents that are valid and may be written, invalid ones that may not)
HONOURED_CASES: list[tuple[str, dict[str, Any], list[Any], list[Any]]] = [
    ("type", STR, ["", "a", "é\n"], [1, None, True, [], {}]),
    ("type", INT, [0, -3, 12345], ["1", 1.5, None]),
    ("type", {"type": "number"}, [0, -3, 1.5, 2e20], ["1", True]),
    ("type", {"type": "boolean"}, [True, False], [0, "true", None]),
    ("type", {"type": "null"}, [None], [0, False, ""]),
    ("type", {"type": "array"}, [[], [1, "a"]], [{}, "a"]),
    ("type", {"type": "object"}, [{}, {"a": 1}], [[], 1]),
    ("type", {"type": ["string", "null"]}, ["a", None], [1, []]),
    ("enum", {"enum": [1, "a", None]}, [1, "a", None], [2, "b", True]),
    ("enum", {"enum": [{"a": [1]}, []]}, [{"a": [1]}, []], [{}, [1]]),
    ("enum", {"type": "integer", "enum": [1, "a"]}, [1], ["a", 2]),
    ("const", {"const": "x"}, ["x"], ["y", "xx"]),
    ("const", {"const": {"a": [True, None]}}, [{"a": [True, None]}], [{"a": [True]}, {}]),
    ("const", {"const": 0}, [0], [1, False]),
    ("properties", closed(a=INT, b=STR), [{}, {"a": 1}, {"a": 1, "b": "x"}], [{"a": "x"}, {"b": 1}]),
    ("properties", {"properties": {"a": INT}}, [{"a": 1}, {"z": "x"}, 5], [{"a": "x"}]),
    ("required", {**closed(a=INT, b=INT), "required": ["b"]}, [{"b": 1}, {"a": 1, "b": 2}], [{}, {"a": 1}]),
    ("required", {"type": "object", "required": ["z"]}, [{"z": 1}], [{}, {"a": 1}]),
    ("additionalProperties", closed(a=INT), [{}, {"a": 1}], [{"b": 1}, {"a": 1, "b": 1}]),
    ("additionalProperties", {"type": "object", "additionalProperties": INT}, [{}, {"x": 1}], [{"x": "a"}]),
    (
        "patternProperties",
        {"type": "object", "patternProperties": {"^a": INT}, "additionalProperties": False},
        [{}, {"ab": 1}],
        [{"ab": "x"}, {"b": 1}],
    ),
    ("minProperties", {"type": "object", "minProperties": 1}, [{"a": 1}], [{}]),
    ("minProperties", {**closed(a=INT, b=INT), "required": ["a", "b"], "minProperties": 2}, [{"a": 1, "b": 2}], [{}]),
    ("maxProperties", {"type": "object", "maxProperties": 1}, [{}, {"a": 1}], [{"a": 1, "b": 2}]),
    ("items", {"type": "array", "items": INT}, [[], [1, 2]], [["a"], [1, "a"]]),
    ("items", {"type": "array", "items": False}, [[]], [[1]]),
    ("items", {"items": INT}, [[1], "x", {}], [["a"]]),
    ("prefixItems", {"type": "array", "prefixItems": [INT, STR], "items": False}, [[1, "a"], [1], []], [["a"], [1, 2]]),
    ("prefixItems", {"type": "array", "prefixItems": [INT], "items": STR}, [[1, "a", "b"]], [[1, 2]]),
    ("minItems", {"type": "array", "items": INT, "minItems": 2}, [[1, 2], [1, 2, 3]], [[], [1]]),
    ("maxItems", {"type": "array", "items": INT, "maxItems": 2}, [[], [1, 2]], [[1, 2, 3]]),
    ("maxItems", {"type": "array", "maxItems": 0}, [[]], [[1]]),
    ("minLength", {"type": "string", "minLength": 2}, ["ab", "éé", "a\n"], ["", "a"]),
    ("minLength", {"minLength": 2}, ["ab", 1], ["a"]),
    ("maxLength", {"type": "string", "maxLength": 2}, ["", "ab", "日本"], ["abc"]),
    ("maxLength", {"type": "string", "maxLength": 0}, [""], ["a"]),
    ("pattern", {"type": "string", "pattern": "^[a-c]+$"}, ["a", "abc"], ["", "abd", "xa"]),
    ("pattern", {"type": "string", "pattern": "b"}, ["b", "abc"], ["", "ac"]),
    ("pattern", {"type": "string", "pattern": "^[a-z]*$", "maxLength": 3}, ["", "abc"], ["abcd", "A"]),
    ("format", {"type": "string", "format": "date"}, ["2024-02-28"], ["2024-13-01", "today"]),
    ("format", {"type": "string", "format": "time"}, ["10:00:00Z"], ["25:00:00Z", "ten"]),
    ("format", {"type": "string", "format": "date-time"}, ["2024-02-28T10:00:00Z"], ["2024-02-28", "now"]),
    ("format", {"type": "string", "format": "duration"}, ["P3D", "PT1H"], ["3 days"]),
    ("format", {"type": "string", "format": "email"}, ["a@b.org"], ["a", "@"]),
    ("format", {"type": "string", "format": "hostname"}, ["example.org"], ["-a-", "a b"]),
    ("format", {"type": "string", "format": "ipv4"}, ["127.0.0.1"], ["256.0.0.1", "1.2.3"]),
    ("format", {"type": "string", "format": "ipv6"}, ["::1"], ["1.2.3.4", "g::1"]),
    ("format", {"type": "string", "format": "uri"}, ["http://a.org/b"], ["a b"]),
    (
        "format",
        {"type": "string", "format": "uuid"},
        ["123e4567-e89b-12d3-a456-426614174000"],
        ["123e4567-e89b-12d3-a456-42661417400", "x"],
    ),
    ("minimum", {"type": "integer", "minimum": 3}, [3, 400], [2, -5]),
    ("minimum", {"type": "number", "minimum": 0.5}, [0.5, 3], [0.4, 0, -1]),
    ("minimum", {"minimum": 3}, [3, "a"], [2]),
    ("maximum", {"type": "integer", "maximum": 12}, [12, -400], [13, 100]),
    ("maximum", {"type": "number", "maximum": 2.5}, [2.5, -3], [2.6, 10]),
    ("exclusiveMinimum", {"type": "integer", "exclusiveMinimum": 3}, [4, 10], [3, 0]),
    ("exclusiveMinimum", {"type": "number", "exclusiveMinimum": 0}, [0.1, 7], [-1, -0.5]),
    ("exclusiveMaximum", {"type": "integer", "exclusiveMaximum": 3}, [2, -10], [3, 30]),
    ("exclusiveMaximum", {"type": "number", "exclusiveMaximum": 1, "minimum": 0}, [0.9, 0], [1, 1.1, 2]),
    ("multipleOf", {"type": "integer", "multipleOf": 3}, [0, 3, 12], [1, 10]),
    ("multipleOf", {"type": "integer", "multipleOf": 3, "minimum": 4, "maximum": 20}, [6, 18], [3, 7, 21]),
    ("anyOf", {"anyOf": [INT, {"type": "string", "maxLength": 1}]}, [1, "a"], ["ab", None]),
    ("anyOf", {"anyOf": [closed(a=INT), closed(b=STR)]}, [{"a": 1}, {"b": "x"}, {}], [{"a": "x"}, {"c": 1}]),
    ("anyOf", {"type": "string", "anyOf": [{"maxLength": 1}, {"minLength": 3}]}, ["a", "abc"], ["ab", 1]),
    ("oneOf", {"oneOf": [INT, STR]}, [1, "a"], [None, 1.5]),
    (
        "oneOf",
        {"oneOf": [{**closed(k={"const": c}), "required": ["k"]} for c in "ab"]},
        [{"k": "a"}, {"k": "b"}],
        [{"k": "c"}, {}],
    ),
    ("allOf", {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]}, [3, 5], [2, 6, "a"]),
    (
        "allOf",
        {"type": "object", "allOf": [{"properties": {"a": INT}, "required": ["a"]}, {"properties": {"b": STR}}]},
        [{"a": 1}, {"a": 1, "b": "x"}],
        [{}, {"b": "x"}, {"a": 1, "b": 2}],
    ),
    ("$ref", {"$ref": "#/$defs/n", "$defs": {"n": INT}}, [1], ["a"]),
    ("$ref", {"$ref": "#/$defs/n", "$defs": {"n": STR}, "maxLength": 2}, ["ab"], ["abc", 1]),
    ("$ref", {**closed(c={"$ref": "#"})}, [{}, {"c": {}}, {"c": {"c": {}}}], [{"c": 1}, {"d": {}}]),
    (
        "$ref",
        {"properties": {"a/b": INT, "c": {"$ref": "#/properties/a~1b"}}, "type": "object"},
        [{"c": 1}],
        [{"c": ""}],
    ),
    (
        "$defs",
        {
            "$ref": "#/$defs/tree",
            "$defs": {
                "tree": {
                    **closed(left={"$ref": "#/$defs/tree"}, value=INT),
                    "required": ["value"],
                }
            },
        },
        [{"value": 1}, {"left": {"value": 2}, "value": 1}],
        [{}, {"left": {}, "value": 1}],
    ),
    ("definitions", {"$ref": "#/definitions/n", "definitions": {"n": INT}}, [1], ["a"]),
    ("$anchor", {"$ref": "#n", "$defs": {"x": {"$anchor": "n", **INT}}}, [1], ["a"]),
    ("additionalItems", {"type": "array", "items": [INT], "additionalItems": False}, [[1], []], [["a"], [1, 2]]),
]
ANNOTATION_CASES: list[tuple[str, Any]] = [
    ("title", "A title"),
    ("description", "what it is"),
    ("default", "a"),
    ("examples", ["a", {"requierd": 1}]),
    ("example", "a"),
    ("deprecated", True),
    ("readOnly", True),
    ("writeOnly", False),
    ("$comment", "no comment"),
    ("$schema", "https://json-schema.org/draft/2020-12/schema"),
    ("$schema", "http://json-schema.org/draft-07/schema#"),
    ("$id", "https://example.org/s"),
    ("$vocabulary", {}),
    ("$dynamicAnchor", "a"),
    ("contentEncoding", "base64"),
    ("contentMediaType", "application/json"),
    ("contentSchema", {"type": "integer"}),
    ("discriminator", {"propertyName": "a"}),
]
REFUSED_CASES: list[tuple[str, dict[str, Any]]] = [
    ("not", {"not": STR}),
    ("not", {"type": "object", "properties": {"a": {"not": {}}}}),
    ("if", {"if": STR}),
    ("then", {"then": STR}),
    ("else", {"else": STR}),
    ("dependentRequired", {"type": "object", "dependentRequired": {"a": ["b"]}}),
    ("dependentSchemas", {"type": "object", "dependentSchemas": {"a": {}}}),
    ("dependencies", {"type": "object", "dependencies": {"a": ["b"]}}),
    ("contains", {"type": "array", "contains": INT}),
    ("minContains", {"type": "array", "minContains": 1}),
    ("maxContains", {"type": "array", "maxContains": 1}),
    ("uniqueItems", {"type": "array", "uniqueItems": True}),
    ("uniqueItems", {"anyOf": [INT, {"type": "array", "uniqueItems": True}]}),
    ("propertyNames", {"type": "object", "propertyNames": {"maxLength": 3}}),
    ("unevaluatedProperties", {"type": "object", "unevaluatedProperties": False}),
    ("unevaluatedItems", {"type": "array", "unevaluatedItems": False}),
    ("$dynamicRef", {"$dynamicRef": "#a"}),
    ("$recursiveRef", {"$recursiveRef": "#"}),
    ("$recursiveAnchor", {"$recursiveAnchor": True}),
    ("nullable", {"type": "string", "nullable": True}),
    # Of keywords that are honoured, what can't be.
    ("oneOf", {"oneOf": [STR, {"type": "string", "minLength": 2}]}),
    ("minProperties", {"type": "object", "minProperties": 2}),
    ("format", {"type": "string", "format": "regex"}),
    ("format", {"type": "string", "format": "idn-email"}),
    ("pattern", {"type": "string", "pattern": "^(?=a)b$"}),
    ("pattern", {"type": "string", "pattern": r"(a)\1"}),
    ("$ref", {"$ref": "https://example.org/other"}),
    ("$ref", {"$ref": "#/default", "default": {"type": "integer", "requierd": 1}}),
    ("$id", {"properties": {"a": {"$id": "https://example.org/a"}}}),
    # Nobody's keywords.
    ("requierd", {"type": "object", "requierd": ["a"]}),
    ("colour", {"items": {"colour": 1}}),
]


def test_there_is_a_case_for_every_keyword() -> None:
    assert {case[0] for case in HONOURED_CASES} == HONOURED
    assert {case[0] for case in ANNOTATION_CASES} == ANNOTATIONS
    assert {case[0] for case in REFUSED_CASES} >= set(REFUSED)
    assert len(HONOURED_CASES) + len(ANNOTATION_CASES) + len(REFUSED_CASES) >= 120


def written(document: Any) -> str:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"))


def spec_of(schema: dict[str, Any]) -> GrammarSpec:
    return GrammarSpec("json", json.dumps(schema))


@pytest.mark.parametrize(("keyword", "schema", "valid", "invalid"), HONOURED_CASES)
def test_honoured(keyword: str, schema: dict[str, Any], valid: list[Any], invalid: list[Any]) -> None:
    draft = jsonschema.Draft7Validator if keyword == "additionalItems" else jsonschema.Draft202012Validator
    validator = draft(schema, format_checker=draft.FORMAT_CHECKER)
    for document in valid:
        assert accepts(tiny_grammars().open(spec_of(schema)), written(document)), document
    for document in invalid:
        assert not accepts(tiny_grammars().open(spec_of(schema)), written(document)), document
    # The second opinion. Some formats it can check only with other packages, which it then lets pass.
    assert all(validator.is_valid(document) for document in valid)
    if keyword != "format":
        assert not any(validator.is_valid(document) for document in invalid)


@pytest.mark.parametrize(("keyword", "value"), ANNOTATION_CASES)
def test_annotations_change_nothing(keyword: str, value: Any) -> None:
    schema = {"type": "string", "maxLength": 2, keyword: value}
    assert accepts(tiny_grammars().open(spec_of(schema)), '"ab"')
    for text in ('"abc"', "1", '"a'):
        assert not accepts(tiny_grammars().open(spec_of(schema)), text)


@pytest.mark.parametrize(("keyword", "schema"), REFUSED_CASES)
def test_refused_by_name(keyword: str, schema: dict[str, Any]) -> None:
    with pytest.raises(GrammarRefused) as refused:
        tiny_grammars().open(spec_of(schema))
    assert refused.value.param.startswith("response_format.")
    assert refused.value.param.endswith(f".{keyword}")
    assert keyword in str(refused.value)


def test_the_documented_table_is_the_one_in_force() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    assert as_markdown() in text, "run python -m backends.grammar.schema and put its table into docs/api.md"
