"""What changes for requests when one policy replaces another: settings and rules compared, not text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from backends.tree import CandidateTree
from policy.spec import PolicySpec, Settings


def differences(before: PolicySpec, after: PolicySpec) -> list[str]:
    """One line per difference, in the order in which a request meets them; empty if they decide alike."""
    return [
        *_rules(before, after),
        *_of_class("defaults", before.settings[None, -1], after.settings[None, -1]),
        *_classes(before, after),
        *_values("prefill.budget", before.prefill.rows or "auto", after.prefill.rows or "auto"),
        *_values("prefill.factor", before.prefill.factor, after.prefill.factor),
        *_named("alerts", {each.name: each for each in before.alerts}, {each.name: each for each in after.alerts}),
        *_named("receivers", before.receivers, after.receivers),
    ]


def _classes(before: PolicySpec, after: PolicySpec) -> Iterator[str]:
    for name in sorted(before.classes | after.classes):
        # A class without a block of its own has the defaults; what changes there is told once, above.
        if name not in before.classes or name not in after.classes:
            yield f"classes.{name}: {'added' if name in after.classes else 'removed'}"
        if before.of_class(name) != before.of_class("") or after.of_class(name) != after.of_class(""):
            yield from _of_class(f"classes.{name}", before.of_class(name), after.of_class(name))


def _rules(before: PolicySpec, after: PolicySpec) -> Iterator[str]:
    old = {rule.name: index for index, rule in enumerate(before.rules)}
    new = {rule.name: index for index, rule in enumerate(after.rules)}
    for name in old.keys() - new.keys():
        yield f"rules.{name}: removed"
    common = before.classes & after.classes
    # One class stands for all that have the same settings in both.
    alike = {(id(before.of_class(name)), id(after.of_class(name))): name for name in common}
    for name, index in new.items():
        if name not in old:
            yield f"rules.{name}: added in place {index + 1}"
            continue
        was, now = before.rules[old[name]], after.rules[index]
        yield from _values(f"rules.{name}.when", was.when, now.when)
        seen: set[str] = set()
        wanted = [rule.when.classes for rule in (was, now) if rule.when.classes is not None]
        names = alike.values() if not wanted else common.intersection(*wanted)
        for class_name in [None, *sorted(names)]:
            pair = before.settings.get((class_name, old[name])), after.settings.get((class_name, index))
            if pair[0] is None or pair[1] is None or pair[0] == pair[1]:
                continue
            lines = set(_of_class(f"rules.{name}.use", pair[0], pair[1]))
            # What the defaults or the class already changed is not the rule's doing.
            inherited = before.settings[class_name, -1], after.settings[class_name, -1]
            lines -= set(_of_class(f"rules.{name}.use", *inherited))
            yield from sorted(lines - seen)
            seen |= lines
    kept = [name for name in new if name in old]
    if kept != sorted(kept, key=lambda name: old[name]):
        yield f"rules: the order is now {', '.join(new)}"


def _named(path: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted(old.keys() | new.keys()):
        if name not in new or name not in old:
            yield f"{path}.{name}: {'added' if name in new else 'removed'}"
        else:
            yield from _values(f"{path}.{name}", old[name], new[name])


def _of_class(path: str, before: Settings, after: Settings) -> Iterator[str]:
    yield from _values(path, before, after)


def _values(path: str, before: Any, after: Any) -> Iterator[str]:
    if before == after:
        return
    if is_dataclass(before) and type(before) is type(after) and not isinstance(before, CandidateTree):
        for field in fields(before):
            yield from _values(f"{path}.{field.name}", getattr(before, field.name), getattr(after, field.name))
    else:
        yield f"{path}: {_shown(before)} -> {_shown(after)}"


def _shown(value: Any) -> str:
    if isinstance(value, CandidateTree):
        return f"a tree of {len(value)} nodes, {value.depth} deep"
    if isinstance(value, (frozenset, tuple)):
        return ", ".join(sorted(map(str, value))) or "none"
    if isinstance(value, float):
        return f"{value:g}"
    if is_dataclass(value) and not isinstance(value, type):
        return ", ".join(f"{field.name} {_shown(getattr(value, field.name))}" for field in fields(value))
    return "not set" if value is None else str(value)
