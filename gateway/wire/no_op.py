"""How fields are declared that are known here, but not honoured."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
from msgspec import Meta, Struct, inspect

NO_OP_KEY = "x-accepted-values"
_INSTEAD_KEY = "x-instead"


class RequestStruct(Struct, forbid_unknown_fields=True, gc=False):
    """Base of everything that a client sends. JSON has no cycles, so Python's collector need not look at it: a request
    of 100,000 small objects would have it look at everything that the process holds."""


class NoOpField(NamedTuple):
    name: str
    accepted: tuple[Any, ...]
    """Beside null, which always means left out."""
    why: str
    instead: str

    def asks_for_nothing(self, given: Any) -> bool:
        return given is None or any(_same(given, each) for each in self.accepted)

    @property
    def refusal(self) -> str:
        """What follows the field's name in the message to who asked for more."""
        only = " or ".join(msgspec.json.encode(each).decode() for each in self.accepted)
        allowed = f" (only {only} is accepted)" if only else ""
        return f"is not supported by this gateway{allowed}; {self.instead or 'leave it out'}."


def no_op(*values: Any, why: str = "", instead: str = "") -> Meta:
    """Marks a field that is not honoured: only null and ``values``, which ask for nothing, are accepted.

    ``why``: that they ask for nothing; ``instead``: what to do rather than send others.
    """
    # As text too: typing keeps one of several equal annotations, and to Python [0] equals [False].
    schema = {"enum": [None, *values], NO_OP_KEY: msgspec.json.encode(values).decode()}
    return Meta(description=why or None, extra_json_schema=schema | ({_INSTEAD_KEY: instead} if instead else {}))


def no_op_fields(struct: type[Struct]) -> tuple[NoOpField, ...]:
    """The fields of ``struct`` that were declared with :func:`no_op`."""
    info = inspect.type_info(struct)
    assert isinstance(info, inspect.StructType)
    found = []
    for field in info.fields:
        schema = field.type.extra_json_schema if isinstance(field.type, inspect.Metadata) else None
        if schema and NO_OP_KEY in schema:
            accepted = tuple(schema["enum"][1:])
            why = schema.get("description", "")
            found.append(NoOpField(field.encode_name, accepted, why, schema.get(_INSTEAD_KEY, "")))
    return tuple(found)


def _same(given: Any, accepted: Any) -> bool:
    # `True == 1` in Python, so the kind has to agree too; in JSON 1 and 1.0 are one number.
    if isinstance(given, bool) or isinstance(accepted, bool):
        return given is accepted
    numbers = isinstance(given, int | float) and isinstance(accepted, int | float)
    return given == accepted and (numbers or type(given) is type(accepted))
