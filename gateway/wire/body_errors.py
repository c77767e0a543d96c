"""What msgspec says of a body that it refuses, in OpenAI's error form: which field, and how to mend it. Pure.

Bounded in time whatever the body: names are cut, and only the path that the error names is looked at.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, get_args, get_type_hints

import msgspec
from msgspec import inspect

from gateway.wire.body_levels import alternatives
from gateway.wire.errors import InvalidRequest
from gateway.wire.no_op import no_op_fields
from gateway.wire.spelling import misspelt

_PATH = re.compile(r"^(?:key` in `)?(\$[^`]*)`$")
_UNKNOWN_FIELD = re.compile(r"^Object contains unknown field `(?P<name>.*)`$", re.DOTALL)
_MISSING_FIELD = re.compile(r"^Object missing required field `(?P<name>.*)`$")
_IN_FIELD = re.compile(r"^In `(?P<name>\w+)`: ")
_WRONG_TYPE = re.compile(r"^Expected `(?P<expected>[^`]*)`, got `(?P<got>[^`]*)`$")
_OUT_OF_RANGE = re.compile(r"^Expected `(?P<type>\w+)` (?P<limit>(?:of length )?[<>=]+ .*)$")
_BAD_NAME = re.compile(r"^Expected `str` matching regex ")
_BAD_CHOICE = re.compile(r"^Invalid enum value (?P<got>.*)$", re.DOTALL)
_STEP = re.compile(r"([^.\[\]]+)|\[(\d+|\.\.\.)\]")

_JSON_NAMES = {"str": "a string", "int": "an integer", "float": "a number", "bool": "true or false"}
_JSON_NAMES |= {"array": "an array", "object": "an object", "null": "null"}

# Parts of multimodal content, and of tools' messages, that clients send in place of text: refused as unsupported.
_UNSUPPORTED_NAMES = frozenset({"image_url", "input_audio", "file", "tool_call_id"})
_MOST_SHOWN = 100
"""Characters of a client's own word that an error repeats."""


class BodyErrors:
    """``elsewhere``: other routes and the types that they take."""

    def __init__(self, struct: type[msgspec.Struct], elsewhere: Mapping[str, type[msgspec.Struct]]) -> None:
        self._struct = struct
        self._elsewhere = {
            route: frozenset(field.encode_name for field in msgspec.structs.fields(each))
            for route, each in elsewhere.items()
        }

    def of(self, message: str, body: bytes) -> InvalidRequest:
        """``message``: what msgspec says of ``body``."""
        what, path = _split(message)
        if match := _IN_FIELD.match(what):
            what, path = what[match.end() :], f"{path}.{match['name']}"
        param = path.removeprefix("$").removeprefix(".")
        if param.endswith("[...]"):
            param = self._with_key(param.removesuffix("[...]"), body)
        label = f"'{param}'" if param else "The body"
        if match := _UNKNOWN_FIELD.match(what):
            return self._unknown_field(match["name"][:_MOST_SHOWN], path, param)
        if match := _MISSING_FIELD.match(what):
            name = f"{param}.{match['name']}" if param else match["name"]
            return InvalidRequest(f"'{name}' is required.", param=name, code="missing_required_parameter")
        if match := _WRONG_TYPE.match(what):
            wanted = " or ".join(_JSON_NAMES.get(each, each) for each in match["expected"].split(" | "))
            got = _JSON_NAMES.get(match["got"], match["got"])
            return InvalidRequest(f"{label} must be {wanted}, not {got}.", param=param or None, code="invalid_type")
        if match := _OUT_OF_RANGE.match(what):
            unit = {"str": "a string ", "array": "an array "}.get(match["type"], "")
            return InvalidRequest(f"{label} must be {unit}{match['limit']}.", param=param or None)
        if _BAD_NAME.match(what):
            return InvalidRequest(f"{label} may hold letters, digits, '_', '-' and '.' only.", param=param or None)
        if match := _BAD_CHOICE.match(what):
            allowed = ", ".join(sorted(self._choices(path)))
            got = match["got"][:_MOST_SHOWN]
            return InvalidRequest(f"{label} must be one of: {allowed}; got {got}.", param=param or None)
        return InvalidRequest(f"{label} is invalid: {what[: 2 * _MOST_SHOWN]}.", param=param or None)

    def _unknown_field(self, name: str, path: str, param: str) -> InvalidRequest:
        full = f"{param}.{name}" if param else name
        if name in _UNSUPPORTED_NAMES:
            message = f"'{full}' is not supported by this gateway; only text is. Leave it out."
            return InvalidRequest(message, param=full, code="unsupported_parameter")
        if not param:
            for route, names in self._elsewhere.items():
                if name in names:
                    message = f"'{name}' is a field of {route}, not of this route. Ask there, or leave it out."
                    return InvalidRequest(message, param=name, code="unknown_parameter")
        meant = misspelt(name, [honoured for each in self._types_at(path) for honoured in _honoured(each)])
        hint = f" Did you mean '{meant}'?" if meant else " Leave it out."
        return InvalidRequest(f"'{full}' is not a known field.{hint}", param=full, code="unknown_parameter")

    def _with_key(self, name: str, body: bytes) -> str:
        """The path of the first wrong value of the map ``name``: msgspec tells the map, but not the key."""
        with suppress(msgspec.DecodeError, KeyError, StopIteration):
            value = next(_map_values(get_type_hints(self._struct, include_extras=True)[name]))
            fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
            decoder = msgspec.json.Decoder(value)
            for key, each in msgspec.json.decode(fields[name], type=dict[str, msgspec.Raw]).items():
                try:
                    decoder.decode(each)
                except msgspec.ValidationError:
                    return f"{name}.{key[:_MOST_SHOWN]}"
        return name

    def _choices(self, path: str) -> set[str]:
        return {
            str(value)
            for each in self._types_at(path)
            if isinstance(each, inspect.LiteralType)
            for value in each.values
            if value is not None
        }

    def _types_at(self, path: str) -> list[inspect.Type]:
        """The declared types at a msgspec path such as ``$.messages[0].role``. Slow, and only used to word an error."""
        types = list(alternatives(inspect.type_info(self._struct)))
        for name, index in _STEP.findall(path.removeprefix("$")):
            below: list[inspect.Type] = []
            for each in types:
                if name:
                    below += [field.type for field in _fields(each) if field.encode_name == name]
                elif index == "..." and isinstance(each, inspect.DictType):
                    below.append(each.value_type)
                elif isinstance(each, inspect.ListType):
                    below.append(each.item_type)
            types = [flat for each in below for flat in alternatives(each)]
        return types


def _split(message: str) -> tuple[str, str]:
    """What is wrong, and the path where; "$" is the body itself."""
    what, found, where = message.rpartition(" - at `")
    # A client's own words may look like a path, but they come before the last one.
    match = _PATH.match(where) if found else None
    return (what, match[1]) if match else (message, "$")


def _fields(kind: inspect.Type) -> tuple[inspect.Field, ...]:
    return kind.fields if isinstance(kind, inspect.StructType) else ()


def _honoured(kind: inspect.Type) -> list[str]:
    """The fields worth a hint: what is refused all the same is none."""
    refused = {each.name for each in no_op_fields(kind.cls)} if isinstance(kind, inspect.StructType) else set()
    return [field.encode_name for field in _fields(kind) if field.encode_name not in refused]


def _map_values(hint: Any) -> Iterator[Any]:
    """The value types of the maps that a declared type may be."""
    if getattr(hint, "__origin__", None) is dict:
        yield get_args(hint)[1]
        return
    for each in get_args(hint):
        yield from _map_values(each)
