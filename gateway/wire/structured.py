"""What clients of OpenAI, vLLM, SGLang and llama.cpp send to say what an answer must look like. Pure."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from backends.grammar.spec import ANY_OBJECT, GrammarKind, GrammarSpec
from gateway.wire.errors import InvalidRequest
from gateway.wire.no_op import RequestStruct, no_op
from gateway.wire.other_servers import OtherServersFields

Schema = dict[str, Any]
SchemaOrText = dict[str, Any] | str
"""A JSON schema, or one as JSON text."""
_FreeText = Annotated[str, Meta(min_length=1)]


class JsonSchemaFormat(RequestStruct):
    """OpenAI's. The schema is enforced whether it is ``strict`` or not. ``name`` and ``description`` change nothing."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    schema: Schema | None = None
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(RequestStruct):
    """``schema``: as llama.cpp takes it, beside either JSON type."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    schema: Schema | None = None


class StructuredOutputs(RequestStruct):
    """vLLM's. Exactly one of the first five. Documents are written without white space between their parts."""

    json: SchemaOrText | None = None
    json_object: bool | None = None
    regex: _FreeText | None = None
    choice: Annotated[list[str], Meta(min_length=1)] | None = None
    grammar: _FreeText | None = None
    disable_any_whitespace: Annotated[Any, no_op(True, False, why="there is none")] = None
    disable_fallback: Annotated[Any, no_op(True, False, why="there is none")] = None
    disable_additional_properties: Annotated[Any, no_op(False, instead="say so in the schema")] = None
    whitespace_pattern: Annotated[Any, no_op()] = None
    structural_tag: Annotated[Any, no_op(instead="use grammar")] = None


class StructuredFields(OtherServersFields, kw_only=True):
    """At most one of them may say something."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaOrText | None = None
    guided_regex: _FreeText | None = None
    guided_choice: Annotated[list[str], Meta(min_length=1)] | None = None
    guided_grammar: _FreeText | None = None
    # SGLang's, and llama.cpp's grammar, whose clients send an empty one for none.
    regex: _FreeText | None = None
    ebnf: _FreeText | None = None
    json_schema: SchemaOrText | None = None
    grammar: str | None = None


def asked_formats(body: StructuredFields) -> list[GrammarSpec]:
    """All that ``body`` says of the answer's form. Raises :class:`InvalidRequest` for what contradicts itself."""
    found = []
    if body.response_format is not None and (spec := _of_response_format(body.response_format)) is not None:
        found.append(spec)
    if body.structured_outputs is not None:
        found.append(_of_structured_outputs(body.structured_outputs))
    for name, schema in (("guided_json", body.guided_json), ("json_schema", body.json_schema)):
        if schema is not None:
            found.append(_of_schema(schema, name))
    for name, pattern in (("guided_regex", body.guided_regex), ("regex", body.regex)):
        if pattern is not None:
            found.append(GrammarSpec("regex", pattern, name))
    if body.guided_choice is not None:
        found.append(_of_choices(body.guided_choice, "guided_choice"))
    for name, grammar in (("guided_grammar", body.guided_grammar), ("ebnf", body.ebnf), ("grammar", body.grammar)):
        if grammar:
            found.append(_of_grammar(grammar, name))
    return found


def asked_format(body: StructuredFields, *, ignore_eos: bool) -> GrammarSpec | None:
    """What the answer must look like; None: free text. Raises :class:`InvalidRequest`."""
    found = asked_formats(body)
    if len(found) > 1:
        names = " and ".join(f"'{each.param}'" for each in found[:2])
        raise InvalidRequest(
            f"{names} both say what the answer must look like; send one of them.", param=found[1].param
        )
    if found and ignore_eos:
        raise InvalidRequest(
            f"'ignore_eos' would write on after what '{found[0].param}' asks for is complete; leave it out.",
            param="ignore_eos",
        )
    return found[0] if found else None


def _of_response_format(asked: ResponseFormat) -> GrammarSpec | None:
    name = "response_format"
    if asked.json_schema is not None and asked.type != "json_schema":
        raise InvalidRequest(
            f"'{name}.json_schema' goes with type json_schema, not {asked.type}.", param=f"{name}.json_schema"
        )
    if asked.schema is not None and asked.type == "text":
        raise InvalidRequest(f"'{name}.schema' goes with type json_schema, not text.", param=f"{name}.schema")
    if asked.schema is not None and asked.json_schema is not None:
        raise InvalidRequest(
            f"'{name}.schema' and '{name}.json_schema' are two schemas; send one of them.", param=f"{name}.schema"
        )
    if asked.type == "text":
        return None
    if asked.schema is not None:
        return _of_schema(asked.schema, f"{name}.schema")
    if asked.type == "json_object":
        return GrammarSpec("json", ANY_OBJECT, name)
    if asked.json_schema is None:
        raise InvalidRequest(
            f"'{name}.json_schema' is required with type json_schema.",
            param=f"{name}.json_schema",
            code="missing_required_parameter",
        )
    # OpenAI's default: anything that is JSON.
    return _of_schema(asked.json_schema.schema or {}, f"{name}.json_schema.schema")


def _of_structured_outputs(asked: StructuredOutputs) -> GrammarSpec:
    name = "structured_outputs"
    given = [each for each in ("json", "json_object", "regex", "choice", "grammar") if getattr(asked, each)]
    if asked.json == {}:
        given.insert(0, "json")
    if len(given) != 1:
        said = "says nothing" if not given else f"has {' and '.join(given)}"
        raise InvalidRequest(
            f"'{name}' {said}; send exactly one of json, json_object, regex, choice and grammar.",
            param=name if not given else f"{name}.{given[1]}",
        )
    param = f"{name}.{given[0]}"
    if given[0] == "json":
        return _of_schema(asked.json or {}, param)
    if given[0] == "json_object":
        return GrammarSpec("json", ANY_OBJECT, param)
    if given[0] == "regex":
        return GrammarSpec("regex", asked.regex or "", param)
    if given[0] == "choice":
        return _of_choices(asked.choice or [], param)
    return _of_grammar(asked.grammar or "", param)


def _of_schema(schema: SchemaOrText, param: str) -> GrammarSpec:
    return GrammarSpec("json", schema if isinstance(schema, str) else msgspec.json.encode(schema).decode(), param)


def _of_choices(choices: list[str], param: str) -> GrammarSpec:
    return GrammarSpec("choice", json.dumps(choices, ensure_ascii=False), param)


def _of_grammar(text: str, param: str) -> GrammarSpec:
    """GBNF has ``::=``, Lark has not: vLLM tells them apart so too."""
    kind: GrammarKind = "gbnf" if "::=" in text else "lark"
    return GrammarSpec(kind, text, param)
