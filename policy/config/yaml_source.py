"""YAML as a tree of nodes that know their lines. Nothing is constructed but plain scalars; no tag runs any code."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import yaml

from policy.config.problems import ConfigError, Problem, did_you_mean

T = TypeVar("T")

MAX_BYTES = 1024 * 1024
# Aliases make a small file mean a huge tree, or an endless one; no policy comes near these.
MAX_VISITS = 20_000
MAX_SCALARS = 200_000
MAX_DEPTH = 24
MAX_WHOLE = 2**63
"""Larger ones are in no field's range, and too much for arithmetic with floats."""
MAX_PROBLEMS = 200
"""What more there is is told once these are mended: a run that finds thousands helps nobody."""

# YAML 1.1 reads 010 as 8, 1:30 as 90, 0x10 as 16 and 1_0 as 10, which few who write them mean.
_DECIMAL = re.compile(
    r"[-+]?(0|[1-9][0-9]*)|[-+]?([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)

_SCALAR_TAGS = frozenset(f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null"))
_KINDS: dict[type, str] = {
    str: "text",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    type(None): "nothing",
}


class _Stop(Exception):
    """Ends reading at once: going on would only repeat itself."""


@dataclass(slots=True)
class Source:
    """One file that is being read, and the problems found so far."""

    file: str
    problems: list[Problem] = field(default_factory=list)
    _visits: int = 0
    _scalars_read: int = 0
    _scalars: yaml.SafeLoader = field(default_factory=lambda: yaml.SafeLoader(""))

    def complain(self, node: yaml.Node, path: str, message: str) -> None:
        """Note a problem and go on: one run should find them all."""
        self.problems.append(Problem(node.start_mark.line + 1, path, message))
        if len(self.problems) >= MAX_PROBLEMS:
            raise _Stop

    def scalar(self, node: yaml.Node, path: str, expected: str) -> Any:
        """The value of a plain scalar, or None after a complaint. (No field of a policy takes null.)"""
        self._scalars_read += 1
        if self._scalars_read > MAX_SCALARS:
            self._unfolds(node, path)
        if not isinstance(node, yaml.ScalarNode):
            if isinstance(node, yaml.MappingNode) and any(_is_block(key) for key, _ in node.value):
                self.complain(node, path, f"expected {expected}; {_TEMPLATE}")
                return None
            shape = "a list" if isinstance(node, yaml.SequenceNode) else "a block of fields"
            self.complain(node, path, f"expected {expected}, not {shape}")
            return None
        if node.tag not in _SCALAR_TAGS:
            tag = node.tag.removeprefix("tag:yaml.org,2002:")
            hint = "put it in quotes" if tag == "timestamp" else "tags have no use here; remove it"
            self.complain(node, path, f"expected {expected}, not a value of type '{tag}'; {hint}")
            return None
        try:
            value = self._scalars.construct_object(node)
        except (yaml.YAMLError, ValueError) as error:
            self.complain(node, path, f"expected {expected}; YAML can't read {node.value[:40]!r} as it is: {error}")
            return None
        if value is None:
            self.complain(node, path, f"expected {expected}, but there is nothing; fill it in or remove the line")
        if isinstance(value, int) and abs(value) > MAX_WHOLE:
            self.complain(node, path, f"expected {expected}, not {node.value[:40]}: no number here is as large")
            return None
        if isinstance(value, (int, float)) and not isinstance(value, bool) and not _DECIMAL.fullmatch(node.value):
            told = f"not {node.value[:40]}, which YAML reads as {value:g}"
            self.complain(node, path, f"expected {expected}, {told}; write it in decimal, or in quotes if it is text")
            return None
        return value

    def wrong_kind(self, node: yaml.Node, path: str, value: Any, expected: str) -> None:
        shown = f"{value[:40]!r}" if isinstance(value, str) else str(node.value)
        if isinstance(value, str) and (hint := template_hint(value)):
            self.complain(node, path, f"expected {expected}, not {shown}; {hint}")
            return
        wants_text = expected.startswith(("one of", "a name"))
        hint = "; put it in quotes to mean the word" if wants_text and not isinstance(value, str) else ""
        self.complain(node, path, f"expected {expected}, not {shown} ({_KINDS[type(value)]}){hint}")

    def items(self, node: yaml.Node, path: str, what: str) -> Iterator[tuple[yaml.ScalarNode, str, yaml.Node]]:
        """(key node, key, value node) of a mapping. Refuses duplicates, merge keys and keys that aren't text."""
        self._visit(node, path)
        if not isinstance(node, yaml.MappingNode):
            self.complain(node, path, f"expected {what}: lines of 'name: value', indented alike")
            return
        seen: dict[str, int] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self.complain(key_node, path, _TEMPLATE if _is_block(key_node) else "a name must be plain text")
                continue
            key, line = key_node.value, key_node.start_mark.line + 1
            if key == "<<":
                self.complain(key_node, path, "merge keys (<<) are not supported; write the fields out")
            elif key in seen:
                self.complain(
                    key_node, join(path, key), f"is given twice, first in line {seen[key]}; remove one of them"
                )
            else:
                seen[key] = line
                yield key_node, key, value_node

    def known_items(self, node: yaml.Node, what: str, known: Collection[str]) -> dict[str, yaml.Node]:
        """The fields at the top of a file, after a complaint about each that is not ``known``."""
        found: dict[str, yaml.Node] = {}
        for key_node, key, value_node in self.items(node, "", what):
            if key in known:
                found[key] = value_node
            else:
                self.complain(key_node, key, f"unknown field; {did_you_mean(key, known)}")
        return found

    def check_version(self, root: yaml.Node, fields: Mapping[str, yaml.Node], version: int) -> None:
        """Every file says which version of its format it has. ``fields``: what :meth:`known_items` found."""
        if "version" not in fields:
            if isinstance(root, yaml.MappingNode):
                self.complain(root, "version", f"is missing; start the file with 'version: {version}'")
            return
        given = self.scalar(fields["version"], "version", f"{version}")
        if given is not None and (given != version or isinstance(given, (bool, float))):
            # A long one may be a secret that got there by mistake: it is not quoted.
            told = f", not {given!r}" if len(str(given)) <= 8 else ""
            self.complain(fields["version"], "version", f"this gateway reads version {version}{told}")

    def elements(self, node: yaml.Node, path: str, what: str) -> Iterator[tuple[str, yaml.Node]]:
        """(path, node) of every element of a list."""
        self._visit(node, path)
        if not isinstance(node, yaml.SequenceNode):
            self.complain(node, path, f"expected {what}: a list, each element on a line that starts with '- '")
            return
        for index, element in enumerate(node.value):
            yield f"{path}[{index}]", element

    def _visit(self, node: yaml.Node, path: str) -> None:
        self._visits += 1
        if self._visits > MAX_VISITS or path.count(".") + path.count("[") > MAX_DEPTH:
            self._unfolds(node, path)

    def _unfolds(self, node: yaml.Node, path: str) -> NoReturn:
        self.complain(node, path, "the aliases of this file unfold without end; write the values out")
        raise _Stop


class _Loader(yaml.SafeLoader):
    """Knows how deep it is while it still scans: what scanning costs grows with the square of that.

    Its marks are by line, one for all that stands there: several times fewer objects to make, and to be looked through
    whenever Python collects garbage, which stops all threads.
    """

    _mark: yaml.Mark | None = None

    def get_mark(self) -> yaml.Mark:
        if self._mark is None or self._mark.line != self.line:  # type: ignore[attr-defined]
            line: int = self.line  # type: ignore[attr-defined]
            self._mark = yaml.Mark(self.name, 0, line, 0, None, 0)  # type: ignore[attr-defined]
        return self._mark

    def fetch_flow_collection_start(self, TokenClass: Any) -> None:
        super().fetch_flow_collection_start(TokenClass)  # type: ignore[misc]
        self._refuse_depth()

    def add_indent(self, column: int) -> bool:
        added = super().add_indent(column)  # type: ignore[misc]
        self._refuse_depth()
        return added

    def _refuse_depth(self) -> None:
        if len(self.indents) + self.flow_level > MAX_DEPTH:  # type: ignore[attr-defined]
            raise _TooDeep(problem_mark=self.get_mark())  # type: ignore[attr-defined]


class _TooDeep(yaml.MarkedYAMLError):
    pass


def template_hint(text: str) -> str:
    """What to say of a value that seems to have been left to a template's program; "" for any other."""
    return _TEMPLATE if "{{" in text or "${" in text else ""


_TEMPLATE = "it looks like a template that was not rendered: fill its values in first"


def _is_block(node: yaml.Node) -> bool:
    """``{{ x }}`` as YAML has it: a block as a name in a block."""
    return isinstance(node, yaml.MappingNode)


def join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def read_file(
    content: bytes,
    file: str,
    read: Callable[[Source, yaml.Node], T],
    *,
    what: str,
    shortest: str,
    error_type: type[ConfigError] = ConfigError,
) -> T:
    """What ``read`` makes of the root node of a file, which messages call ``what``.

    Raises ``error_type`` with every problem that was found.
    """
    root = _compose(content, file, what, shortest, error_type)
    source = Source(file)
    try:
        found = read(source, root)
        if not source.problems:
            return found
    except _Stop:
        pass  # its problem is noted
    except RecursionError:
        told = "is nested too deeply, or an alias holds itself"
        source.problems.append(Problem(root.start_mark.line + 1, "", told))
    raise error_type(file, dict.fromkeys(source.problems))


def _compose(content: bytes, file: str, what: str, shortest: str, error_type: type[ConfigError]) -> yaml.Node:

    def refuse(line: int, message: str) -> ConfigError:
        return error_type(file, [Problem(line, "", message)])

    if len(content) > MAX_BYTES:
        raise refuse(1, f"the file has {len(content)} bytes; a {what} may have {MAX_BYTES}")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise refuse(line, f"is not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    try:
        documents = list(yaml.compose_all(text, Loader=_Loader))
    except _TooDeep as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise refuse(line, f"is nested more than {MAX_DEPTH} deep; no {what} needs that") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = error.problem or error.context or "broken syntax"
        if "character '\\t'" in what:
            what += "; indent with spaces"
        raise refuse(mark.line + 1 if mark else 1, f"is not YAML: {what}") from None
    except yaml.reader.ReaderError as error:
        line = text[: int(error.position)].count("\n") + 1
        raise refuse(line, "has a control character that YAML does not allow; remove it") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise refuse(1, f"is not YAML that a {what} could need: {type(error).__name__}") from None
    documents = [each for each in documents if each is not None]
    if not documents:
        raise refuse(1, f"is empty; the shortest {what} is '{shortest}'")
    if len(documents) > 1:
        line = documents[1].start_mark.line + 1
        raise refuse(line, f"has a second document after '---'; a {what} is one document")
    return documents[0]
