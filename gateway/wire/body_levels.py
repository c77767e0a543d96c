"""The structs of a request as a tree of levels, and what asks for nothing on each of them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import msgspec
from msgspec import Raw, inspect

from gateway.wire.no_op import NoOpField, no_op_fields
from gateway.wire.requests import GIVEN_OUT, THOUGHTS, ChatMessage, TextPart

_NULL = Raw(b"null")
_ASSISTANT = Raw(b'"assistant"')
_fields = msgspec.json.Decoder(dict[str, Raw])
_items = msgspec.json.Decoder(list[Raw])


@dataclass(frozen=True)
class Level:
    """One struct. ``inner``: the fields that hold structs, or lists of them."""

    struct: type[msgspec.Struct]
    known: frozenset[str]
    no_ops: tuple[NoOpField, ...]
    inner: Mapping[str, Level] = field(default_factory=dict)

    @classmethod
    def of(cls, struct: type[msgspec.Struct]) -> Level:
        info = inspect.type_info(struct)
        assert isinstance(info, inspect.StructType)
        inner: dict[str, Level] = {}
        for each in info.fields:
            for kind in alternatives(each.type):
                items = alternatives(kind.item_type) if isinstance(kind, inspect.ListType) else [kind]
                for item in items:
                    if isinstance(item, inspect.StructType):
                        inner[each.encode_name] = cls.of(item.cls)
        return cls(struct, frozenset(each.encode_name for each in info.fields), no_op_fields(struct), inner)

    def unsupported(self, value: msgspec.Struct, at: str = "") -> Iterator[tuple[str, NoOpField]]:
        """Paths of the fields of ``value``, and of what is in it, that ask for something that is not honoured."""
        for no_op in self.no_ops:
            given = getattr(value, no_op.name)
            if given is not None and not no_op.asks_for_nothing(given):
                yield f"{at}{no_op.name}", no_op
        for name, level in self.inner.items():
            if not (level.no_ops or level.inner):
                continue
            below = getattr(value, name)
            if isinstance(below, level.struct):
                yield from level.unsupported(below, f"{at}{name}.")
            elif isinstance(below, list):
                for index, each in enumerate(below):
                    yield from level.unsupported(each, f"{at}{name}[{index}].")


def pruned(body: bytes, level: Level) -> bytes:
    """The same body without what asks for nothing: unknown fields that are null, and what servers add to the messages
    that they give out. What is not of the form of ``level`` stays, for the strict decoder to tell of."""
    return bytes(_pruned(Raw(body), level, answer=False))


def _pruned(raw: Raw, level: Level, *, answer: bool) -> Raw:
    """``answer``: it is an assistant's message, or part of one."""
    try:
        fields = _fields.decode(raw)
    except msgspec.ValidationError:
        return raw
    answer = answer or (level.struct is ChatMessage and fields.get("role") == _ASSISTANT)
    # Without content, a field that nobody knows may be a misspelt "content".
    spare_all = answer and (level.struct is TextPart or "content" in fields)
    kept = {}
    for name, value in fields.items():
        if name not in level.known:
            if value == _NULL or spare_all or (answer and name in GIVEN_OUT):
                continue
        elif name in level.inner:
            value = _pruned_inside(value, level.inner[name], answer=answer)
        kept[name] = value
    return Raw(msgspec.json.encode(kept))


def _pruned_inside(value: Raw, level: Level, *, answer: bool) -> Raw:
    try:
        items = _items.decode(value)
    except msgspec.ValidationError:
        return _pruned(value, level, answer=answer)
    if level.struct is TextPart and answer:
        items = [each for each in items if _type_of(each) not in THOUGHTS]
    return Raw(msgspec.json.encode([_pruned(each, level, answer=answer) for each in items]))


class _Typed(msgspec.Struct):
    type: str = ""


_typed = msgspec.json.Decoder(_Typed)


def _type_of(part: Raw) -> str:
    try:
        return _typed.decode(part).type
    except msgspec.ValidationError:
        return ""


def alternatives(kind: inspect.Type) -> Iterator[inspect.Type]:
    """The types that a declared type may be, without what it says of them."""
    if isinstance(kind, inspect.Metadata):
        yield from alternatives(kind.type)
    elif isinstance(kind, inspect.UnionType):
        for each in kind.types:
            yield from alternatives(each)
    else:
        yield kind
