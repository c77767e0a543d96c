"""From request bytes to a typed request, with errors that name the field and how to mend it.

msgspec finds the first thing wrong and says it in one sentence; this module turns that sentence into OpenAI's error
form. It also checks the fields that are declared with ``no_op``: OpenAI's, but not honoured here.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
from litestar import Request
from msgspec import inspect

from gateway.errors import InvalidRequest, UnsupportedMediaType
from gateway.openai_types import NO_OP_KEY

T = TypeVar("T", bound=msgspec.Struct)

_WHERE = re.compile(r"^(?P<what>.*?)(?: - at `(?:key` in `)?(?P<path>\$[^`]*)`)?$", re.DOTALL)
_UNKNOWN_FIELD = re.compile(r"^Object contains unknown field `(?P<name>.*)`$", re.DOTALL)
_MISSING_FIELD = re.compile(r"^Object missing required field `(?P<name>.*)`$")
_WRONG_TYPE = re.compile(r"^Expected `(?P<expected>[^`]*)`, got `(?P<got>[^`]*)`$")
_OUT_OF_RANGE = re.compile(r"^Expected `(?P<type>\w+)` (?P<limit>(?:of length )?[<>=]+ .*)$")
_BAD_CHOICE = re.compile(r"^Invalid enum value (?P<got>.*)$", re.DOTALL)
_BYTE_ORDER_MARKS = (b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")
_STEP = re.compile(r"([^.\[\]]+)|\[(\d+|\.\.\.)\]")

_JSON_NAMES = {"str": "a string", "int": "an integer", "float": "a number", "bool": "true or false"}
_JSON_NAMES |= {"array": "an array", "object": "an object", "null": "null"}

# Parts of multimodal content that clients send in place of text: refused as unsupported rather than as unknown.
_UNSUPPORTED_NAMES = frozenset({"image_url", "input_audio", "file", "tool_call_id", "reasoning", "response_schema"})


class NoOpField(NamedTuple):
    name: str
    accepted: tuple[Any, ...]


def no_op_fields(struct: type[msgspec.Struct]) -> tuple[NoOpField, ...]:
    """The fields of ``struct`` that were declared with ``no_op``, and the values that ask for nothing."""
    info = inspect.type_info(struct)
    assert isinstance(info, inspect.StructType)
    found = []
    for field in info.fields:
        schema = field.type.extra_json_schema if isinstance(field.type, inspect.Metadata) else None
        if schema and schema.get(NO_OP_KEY):
            found.append(NoOpField(field.encode_name, tuple(schema["enum"])))
    return tuple(found)


class BodyDecoder(Generic[T]):
    """Decodes and checks bodies of one request type. Stateless after construction, so one is shared by all requests."""

    def __init__(self, struct: type[T]) -> None:
        self._struct = struct
        self._json = msgspec.json.Decoder(struct)
        self._no_ops: dict[type, tuple[NoOpField, ...]] = {}

    def decode(self, body: bytes) -> T:
        """Raises :class:`InvalidRequest`."""
        try:
            return self._json.decode(body)
        except msgspec.ValidationError as error:
            raise self._explain(str(error)) from None
        except RecursionError:
            raise InvalidRequest("The JSON body is nested too deeply.", code="invalid_json") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            hint = "" if body else " An empty body is not a request."
            if body.startswith(_BYTE_ORDER_MARKS):
                hint = " It begins with a byte order mark; send UTF-8 without one."
            if b"NaN" in body or b"Infinity" in body:
                hint = " NaN and Infinity are not JSON."
            raise InvalidRequest(f"The body is not valid JSON: {error}.{hint}", code="invalid_json") from None

    def refuse_unsupported(self, value: msgspec.Struct, at: str = "") -> None:
        """Refuse, by name, any field of ``value`` that asks for something this gateway doesn't do."""
        kind = type(value)
        if kind not in self._no_ops:
            self._no_ops[kind] = no_op_fields(kind)
        for name, accepted in self._no_ops[kind]:
            given = getattr(value, name)
            # `True == 1` in Python, so the type has to agree too.
            if given is None or any(given == each and type(given) is type(each) for each in accepted):
                continue
            param = f"{at}{name}"
            also = [msgspec.json.encode(each).decode() for each in accepted if each is not None]
            allowed = f" (only {' or '.join(also)} is accepted)" if also else ""
            raise InvalidRequest(
                f"'{param}' is not supported by this gateway{allowed}; leave it out.",
                param=param,
                code="unsupported_parameter",
            )

    def _explain(self, message: str) -> InvalidRequest:
        parts = _WHERE.match(message)
        what, path = (parts["what"], parts["path"] or "$") if parts else (message, "$")
        param = path.removeprefix("$").removeprefix(".").replace("[...]", "")
        label = f"'{param}'" if param else "The body"
        if match := _UNKNOWN_FIELD.match(what):
            return self._unknown_field(match["name"], path, param)
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
        if match := _BAD_CHOICE.match(what):
            allowed = ", ".join(sorted(self._choices(path)))
            return InvalidRequest(f"{label} must be one of: {allowed}; got {match['got'][:100]}.", param=param or None)
        return InvalidRequest(f"{label} is invalid: {what}.", param=param or None)

    def _unknown_field(self, name: str, path: str, param: str) -> InvalidRequest:
        name = name[:100]
        full = f"{param}.{name}" if param else name
        if name in _UNSUPPORTED_NAMES:
            message = f"'{full}' is not supported by this gateway; only text is. Leave it out."
            return InvalidRequest(message, param=full, code="unsupported_parameter")
        known = [field.encode_name for each in self._types_at(path) for field in _fields(each)]
        close = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean '{close[0]}'?" if close else " Leave it out."
        return InvalidRequest(f"'{full}' is not a known field.{hint}", param=full, code="unknown_parameter")

    def _choices(self, path: str) -> set[str]:
        return {
            str(value)
            for each in self._types_at(path)
            if isinstance(each, inspect.LiteralType)
            for value in each.values
        }

    def _types_at(self, path: str) -> list[inspect.Type]:
        """The declared types at a msgspec path such as ``$.messages[0].role``. Slow, and only used to word an error."""
        types = list(_alternatives(inspect.type_info(self._struct)))
        for name, index in _STEP.findall(path.removeprefix("$")):
            below: list[inspect.Type] = []
            for each in types:
                if name:
                    below += [field.type for field in _fields(each) if field.encode_name == name]
                elif index == "..." and isinstance(each, inspect.DictType):
                    below.append(each.value_type)
                elif isinstance(each, inspect.ListType):
                    below.append(each.item_type)
            types = [flat for each in below for flat in _alternatives(each)]
        return types


def _alternatives(kind: inspect.Type) -> Iterator[inspect.Type]:
    if isinstance(kind, inspect.Metadata):
        yield from _alternatives(kind.type)
    elif isinstance(kind, inspect.UnionType):
        for each in kind.types:
            yield from _alternatives(each)
    else:
        yield kind


def _fields(kind: inspect.Type) -> tuple[inspect.Field, ...]:
    return kind.fields if isinstance(kind, inspect.StructType) else ()


async def read_json(request: Request[Any, Any, Any]) -> bytes:
    """The body, if it says it is JSON.

    Insisting on the content type is also what keeps web pages from posting here: a browser sends a cross-origin
    ``application/json`` only after a CORS preflight, which this gateway doesn't answer.
    """
    content_type = request.headers.get("content-type", "")
    if content_type.partition(";")[0].strip().lower() != "application/json":
        shown = f"not '{content_type[:100]}'" if content_type else "but there is none"
        raise UnsupportedMediaType(f"Content-Type must be application/json, {shown}.", param=None)
    if (encoding := request.headers.get("content-encoding", "identity").lower()) != "identity":
        raise UnsupportedMediaType(f"Content-Encoding '{encoding[:100]}' is not supported; send the body as it is.")
    return await request.body()
