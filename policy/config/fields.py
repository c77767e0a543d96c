"""Kinds of values in a policy file. Each reads itself from a YAML node and describes itself as JSON Schema.

One table of fields (``policy.file.format``) thus makes both the reader and the schema, and they can't drift apart.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import yaml

from backends.tree import CandidateTree, TreeError
from policy.config.problems import did_you_mean
from policy.config.yaml_source import Source, join, template_hint

_DURATION = re.compile(r"(\d+(?:\.\d+)?) ?(ms|s|m|h)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_SEVERAL = re.compile(rf"({_DURATION.pattern} ?){{2,}}")
_PERCENT = re.compile(r"(\d+(?:\.\d+)?) ?%")


class Kind(Protocol):
    """``read`` gives the value, or None after it has complained to the source."""

    def read(self, source: Source, node: yaml.Node, path: str) -> Any: ...

    def schema(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Number:
    low: float
    high: float
    whole: bool = False

    def read(self, source: Source, node: yaml.Node, path: str) -> float | int | None:
        expected = f"{'a whole number' if self.whole else 'a number'} from {self.low:g} to {self.high:g}"
        value = source.scalar(node, path, expected)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int if self.whole else (int, float)):
            source.wrong_kind(node, path, value, expected)
            return None
        if not math.isfinite(value) or not self.low <= value <= self.high:
            source.complain(node, path, f"expected {expected}, not {value}")
            return None
        return value

    def schema(self) -> dict[str, Any]:
        return {"type": "integer" if self.whole else "number", "minimum": self.low, "maximum": self.high}


@dataclass(frozen=True, slots=True)
class Flag:
    def read(self, source: Source, node: yaml.Node, path: str) -> bool | None:
        value = source.scalar(node, path, "true or false")
        if value is not None and not isinstance(value, bool):
            source.wrong_kind(node, path, value, "true or false")
            return None
        return value

    def schema(self) -> dict[str, Any]:
        return {"type": "boolean"}


@dataclass(frozen=True, slots=True)
class OneOf:
    values: tuple[str, ...]

    def read(self, source: Source, node: yaml.Node, path: str) -> str | None:
        expected = f"one of {', '.join(self.values)}"
        value = source.scalar(node, path, expected)
        if value is None or value in self.values:
            return value
        if not isinstance(value, str):
            source.wrong_kind(node, path, value, expected)
        else:
            hint = template_hint(value) or did_you_mean(value, self.values)
            source.complain(node, path, f"'{value[:40]}' is not known; {hint}")
        return None

    def schema(self) -> dict[str, Any]:
        return {"enum": list(self.values)}


@dataclass(frozen=True, slots=True)
class AutoOr:
    """The word "auto", or a number."""

    number: Number

    def read(self, source: Source, node: yaml.Node, path: str) -> Any:
        if isinstance(node, yaml.ScalarNode) and node.value == "auto":
            return "auto"
        return self.number.read(source, node, path)

    def schema(self) -> dict[str, Any]:
        return {"anyOf": [{"const": "auto"}, self.number.schema()]}


@dataclass(frozen=True, slots=True)
class Name:
    """Text that fits ``pattern``; ``what`` says it in words. ``secret``: it may hold one, and is not quoted."""

    pattern: str
    what: str
    secret: bool = False

    def read(self, source: Source, node: yaml.Node, path: str) -> str | None:
        value = source.scalar(node, path, self.what)
        if value is None:
            return None
        if not isinstance(value, str):
            source.wrong_kind(node, path, value, self.what)
            return None
        if not re.fullmatch(self.pattern, value):
            quoted = "this" if self.secret else f"'{value[:40]}'"
            hint = template_hint(value)
            source.complain(node, path, f"{quoted} can't be used; {hint or f'expected {self.what}'}")
            return None
        return value

    def schema(self) -> dict[str, Any]:
        return {"type": "string", "pattern": f"^{self.pattern}$"}


@dataclass(frozen=True, slots=True)
class Duration:
    """``500ms``, ``5s``, ``2m``, ``1h``, or bare seconds. Read as seconds."""

    low: float
    high: float

    def read(self, source: Source, node: yaml.Node, path: str) -> float | None:
        expected = "a duration such as 500ms, 5s or 2m"
        value = source.scalar(node, path, expected)
        if value is None:
            return None
        seconds: float
        if isinstance(value, str):
            match = _DURATION.fullmatch(value)
            if match is None:
                source.complain(node, path, f"expected {expected}, not '{value[:40]}'{_duration_hint(value)}")
                return None
            seconds = float(match[1]) * _SECONDS[match[2]]
        elif isinstance(value, bool):
            source.wrong_kind(node, path, value, expected)
            return None
        else:
            seconds = float(value)
        if not self.low <= seconds <= self.high:
            source.complain(node, path, f"expected {self.low:g} to {self.high:g} seconds, not {seconds:g}")
            return None
        return seconds

    def schema(self) -> dict[str, Any]:
        text = {"type": "string", "pattern": f"^{_DURATION.pattern}$"}
        return {"anyOf": [text, {"type": "number", "minimum": self.low, "maximum": self.high}]}


def _duration_hint(text: str) -> str:
    """What to do about text that is no duration."""
    if _SEVERAL.fullmatch(text):
        seconds = sum(float(number) * _SECONDS[unit] for number, unit in _DURATION.findall(text))
        return f"; only one unit goes: write {seconds:g}s"
    hint = template_hint(text)
    return f"; {hint}" if hint else f"; the units are {', '.join(_SECONDS)}"


@dataclass(frozen=True, slots=True)
class Share:
    """A part of all requests: ``2%`` or ``0.02``."""

    high: float

    def read(self, source: Source, node: yaml.Node, path: str) -> float | None:
        expected = f"a share from 0% to {self.high:.0%}, such as 2% or 0.02"
        value = source.scalar(node, path, expected)
        if value is None:
            return None
        if isinstance(value, str) and (match := _PERCENT.fullmatch(value)):
            value = float(match[1]) / 100
        if isinstance(value, (str, bool)):
            source.wrong_kind(node, path, value, expected)
            return None
        if not 0 <= value <= self.high:
            source.complain(node, path, f"expected {expected}, not {value:g}")
            return None
        return float(value)

    def schema(self) -> dict[str, Any]:
        text = {"type": "string", "pattern": f"^{_PERCENT.pattern}$"}
        return {"anyOf": [text, {"type": "number", "minimum": 0, "maximum": self.high}]}


@dataclass(frozen=True, slots=True)
class ManyOf:
    """One value or a list of them. Read as a tuple."""

    each: Kind

    def read(self, source: Source, node: yaml.Node, path: str) -> tuple[Any, ...] | None:
        if isinstance(node, yaml.ScalarNode):
            value = self.each.read(source, node, path)
            return None if value is None else (value,)
        values = [
            self.each.read(source, element, at) for at, element in source.elements(node, path, "one value or a list")
        ]
        if isinstance(node, yaml.SequenceNode) and not values:
            source.complain(node, path, "an empty list matches nothing; name a value or remove the line")
        return tuple(value for value in values if value is not None) or None

    def schema(self) -> dict[str, Any]:
        return {"anyOf": [self.each.schema(), {"type": "array", "items": self.each.schema(), "minItems": 1}]}


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts under names that the operator chooses. Read as a tuple of pairs, in the order of the names."""

    name: Name
    text: Name
    what: str

    def read(self, source: Source, node: yaml.Node, path: str) -> tuple[tuple[str, str], ...] | None:
        found: dict[str, str] = {}
        for key_node, key, value_node in source.items(node, path, self.what):
            name = self.name.read(source, key_node, join(path, key))
            text = self.text.read(source, value_node, join(path, key))
            if name is not None and text is not None:
                found[name] = text
        return tuple(sorted(found.items()))

    def schema(self) -> dict[str, Any]:
        named = {"type": "object", "propertyNames": self.name.schema()}
        return {**named, "additionalProperties": self.text.schema()}


@dataclass(frozen=True, slots=True)
class Tree:
    """``auto``, ``measured``, a branching such as ``4x2x1``, or a list of paths."""

    def read(self, source: Source, node: yaml.Node, path: str) -> str | CandidateTree | None:
        expected = "auto, measured, a branching such as 4x2x1, or a list of paths"
        shape: str | list[list[int]]
        if isinstance(node, yaml.SequenceNode):
            rank = Number(0, 255, whole=True)
            ranks = [
                [rank.read(source, element, below) for below, element in source.elements(each, at, "a path")]
                for at, each in source.elements(node, path, expected)
            ]
            if not ranks:
                source.complain(node, path, "the tree has no paths; for no tree at all use 'method: vanilla'")
                return None
            if any(number is None for each in ranks for number in each):
                return None
            shape = [[number for number in each if isinstance(number, int)] for each in ranks]
        else:
            value = source.scalar(node, path, expected)
            if value is None:
                return None
            if isinstance(value, (bool, float)):
                source.wrong_kind(node, path, value, expected)
                return None
            if value in ("auto", "measured"):
                return str(value)
            shape = str(value)
        try:
            return CandidateTree.parse(shape)
        except TreeError as error:
            source.complain(node, path, str(error))
            return None

    def schema(self) -> dict[str, Any]:
        rank = {"type": "integer", "minimum": 0, "maximum": 255}
        path = {"type": "array", "minItems": 1, "items": rank}
        branching = {"type": "string", "pattern": "^[1-9][0-9]*(x[1-9][0-9]*)*$"}
        return {
            "anyOf": [
                {"enum": ["auto", "measured"]},
                branching,
                {"type": "array", "minItems": 1, "items": path},
                {"type": "integer", "minimum": 1},
            ]
        }


@dataclass(frozen=True, slots=True)
class Block:
    """Named fields, all optional but ``required``. Read as a dict of those that were given.

    ``ordered`` pairs must not be the wrong way round, such as (min, max). ``shorthand`` is the field that a bare
    scalar stands for: ``heads: 4`` for ``heads: {max: 4}``.
    """

    fields: Mapping[str, Kind]
    what: str
    required: Sequence[str] = ()
    ordered: Sequence[tuple[str, str]] = ()
    shorthand: str | None = None
    about: str = ""

    def read(self, source: Source, node: yaml.Node, path: str) -> dict[str, Any] | None:
        if self.shorthand is not None and isinstance(node, yaml.ScalarNode):
            value = self.fields[self.shorthand].read(source, node, path)
            return None if value is None else {self.shorthand: value}
        before, given, found = len(source.problems), set(), {}
        for key_node, key, value_node in source.items(node, path, self.what):
            kind = self.fields.get(key)
            if kind is None:
                source.complain(key_node, join(path, key), f"unknown field; {did_you_mean(key, self.fields)}")
                continue
            given.add(key)
            value = kind.read(source, value_node, join(path, key))
            if value is not None:
                found[key] = value
        if not isinstance(node, yaml.MappingNode):
            return None
        for name in self.required:
            # An unknown field may well be this one misspelt; one complaint about it is enough.
            if name not in given and len(source.problems) == before:
                source.complain(node, join(path, name), f"is missing; add '{name}:'")
        for low, high in self.ordered:
            if low in found and high in found and found[low] > found[high]:
                source.complain(
                    node,
                    path,
                    f"{low} ({found[low]:g}) is over {high} ({found[high]:g}); lower the one or raise the other",
                )
        return found

    def schema(self) -> dict[str, Any]:
        block: dict[str, Any] = {
            "type": "object",
            "additionalProperties": False,
            "properties": {name: kind.schema() for name, kind in self.fields.items()},
        }
        if self.about:
            block["description"] = self.about
        if self.required:
            block["required"] = list(self.required)
        return {"anyOf": [block, self.fields[self.shorthand].schema()]} if self.shorthand else block
