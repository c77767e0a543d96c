"""Blocks of a policy file as they were given, and complaints that name the line of a field in them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import yaml

from policy.config.fields import Block, Name
from policy.config.problems import did_you_mean
from policy.config.yaml_source import Source, join

LABEL = Name(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}", "a name of letters, digits, '_', '.' and '-'")
PATTERN = Name(r"[^\s|]{1,256}", "a name without spaces or '|'; * stands for anything")


@dataclass(frozen=True, slots=True)
class Part:
    """Fields that were given in one block, and where it stands."""

    given: Mapping[str, Any]
    node: yaml.Node
    path: str

    @property
    def named(self) -> set[str]:
        """The fields that stand there, also those whose value was refused."""
        pairs = (
            cast("list[tuple[yaml.Node, yaml.Node]]", self.node.value)
            if isinstance(self.node, yaml.MappingNode)
            else []
        )
        return {key.value for key, _ in pairs if isinstance(key, yaml.ScalarNode)}

    def refused(self, source: Source) -> bool:
        """Whether something in it was complained about: what seems to be missing may stand there misspelt."""
        return any(each.path.startswith(f"{self.path}.") for each in source.problems)


def read_part(source: Source, block: Block, node: yaml.Node, path: str) -> Part:
    return Part(block.read(source, node, path) or {}, node, path)


def read_parts(source: Source, block: Block, node: yaml.Node | None, path: str, what: str) -> Iterator[Part]:
    if node is not None:
        for at, element in source.elements(node, path, what):
            yield read_part(source, block, element, at)


def read_named(source: Source, block: Block, node: yaml.Node | None, path: str, what: str) -> dict[str, Part]:
    """Blocks under names that the operator chooses."""
    found: dict[str, Part] = {}
    if node is not None:
        for key_node, key, value_node in source.items(node, path, what):
            if LABEL.read(source, key_node, join(path, key)) is not None:
                found[key] = read_part(source, block, value_node, join(path, key))
    return found


def refuse_unknown_classes(source: Source, part: Part, names: tuple[str, ...], known: set[str], field: str) -> None:
    for name in names:
        if name not in known:
            hint = f"{did_you_mean(name, known)} A class of your own needs a block under 'classes', {{}} will do"
            source.complain(value_node(part.node, field.split(".")), join(part.path, field), f"'{name}': {hint}")


def refuse_repeated_name(source: Source, part: Part, before: Collection[str], what: str) -> None:
    name = part.given.get("name")
    if name in before:
        source.complain(
            value_node(part.node, ["name"]), join(part.path, "name"), f"another {what} above is called '{name}' too"
        )


def complain_at(source: Source, part: Part, name: str, message: str) -> None:
    source.complain(value_node(part.node, [name]), join(part.path, name), message)


def value_node(node: yaml.Node, names: list[str]) -> yaml.Node:
    """The node of a nested field, for the sake of its line; where it is not given, that of the block around it."""
    for name in names:
        if isinstance(node, yaml.MappingNode):
            pairs = cast("list[tuple[yaml.Node, yaml.Node]]", node.value)
            node = next((value for key, value in pairs if key.value == name), node)
    return node
