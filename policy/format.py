"""The policy file: its table of fields, its reader, and its JSON Schema."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any, cast

import yaml

from backends.tree import MAX_DEPTH, MAX_NODES, CandidateTree
from policy.fields import Block, Choice, Duration, Flag, Kind, ManyOf, Name, Number, Share, Tree
from policy.problems import PolicyError, did_you_mean
from policy.spec import (
    BUILT_IN_CLASSES,
    FORMAT_VERSION,
    AlertRule,
    Bounds,
    Conditions,
    FallbackSettings,
    Names,
    PolicySpec,
    Range,
    Rule,
    Settings,
    TemperatureLimits,
)
from policy.yaml_source import Source, compose, join, reading_stops

METRICS = (
    "speculative_acceptance_rate",
    "speculative_speedup_factor",
    "speculative_fallback_count",
    "medusa_head_accuracy",
)
_LABEL = Name(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}", "a name of letters, digits, '_', '.' and '-'")
_PATTERN = Name(r"[^\s|]{1,256}", "a name without spaces or '|'; * stands for anything")


def _range(low: float, high: float, *, whole: bool = False) -> Block:
    number = Number(low, high, whole)
    return Block({"min": number, "max": number}, "a range with min, max or both", ordered=[("min", "max")])


def _bounds(low: int, high: int, about: str) -> Block:
    number = Number(low, high, whole=True)
    fields = {"min": number, "max": number}
    return Block(fields, "a number, or min and max", ordered=[("min", "max")], shorthand="max", about=about)


_FALLBACK = Block(
    {
        "min_speedup": Number(0.1, 10),
        "window": Duration(1, 300),
        "hold": Duration(1, 3600),
        "probe": Share(0.5),
    },
    "the fields of a fallback",
    about="When speculation of a class is given up, and how it comes back.",
)
_TEMPERATURE = Block(
    {"default": Number(0, 2), "min": Number(0, 2), "max": Number(0, 2)},
    "the fields of a temperature",
    ordered=[("min", "max"), ("min", "default"), ("default", "max")],
    about="Clamping changes answers: it is done only where this is set, and shown in every decision.",
)
_RULE_FIELDS: dict[str, Kind] = {
    "method": Choice(("auto", "medusa", "vanilla")),
    "heads": _bounds(1, MAX_DEPTH, "How many Medusa heads may be used."),
    "nodes": _bounds(0, MAX_NODES, "Candidate nodes per step and sequence."),
    "depth": Number(1, MAX_DEPTH, whole=True),
    "tree": Tree(),
    "acceptance": Choice(("exact", "typical")),
    "temperature": _TEMPERATURE,
    "deadline": Duration(0.001, 86_400),
    "client_override": Flag(),
}
# Measuring is by class, so what steers it can't depend on the rule that one request happened to match.
_CLASS_FIELDS: dict[str, Kind] = {**_RULE_FIELDS, "control": Share(0.5), "fallback": _FALLBACK}
_SETTINGS = Block(_CLASS_FIELDS, "settings", about="How requests are decoded.")
_WHEN = Block(
    {
        "class": ManyOf(_LABEL),
        "model": ManyOf(_PATTERN),
        "tenant": ManyOf(_PATTERN),
        "turn": Choice(("first", "later")),
        "prompt_tokens": _range(0, 2**31, whole=True),
        "temperature": _range(0, 2),
        "load": _range(0, 1000),
    },
    "the conditions of a rule",
    about="All conditions must hold. load: sequences running and waiting over those that can run at once.",
)
_RULE = Block(
    {"name": _LABEL, "when": _WHEN, "use": Block(_RULE_FIELDS, "settings")}, "a rule", required=("name", "use")
)
_ALERT = Block(
    {
        "name": _LABEL,
        "metric": Choice(METRICS),
        "below": Number(0, 1e9),
        "above": Number(0, 1e9),
        "for": Duration(0, 86_400),
        "severity": Choice(("info", "warning", "critical")),
        "class": ManyOf(_LABEL),
        "model": ManyOf(_PATTERN),
        "notify": ManyOf(_LABEL),
    },
    "an alert",
    required=("name", "metric"),
)
_TOP = ("version", "defaults", "classes", "rules", "alerts")


@dataclass(frozen=True, slots=True)
class _Part:
    """Fields that were given in one block, and where it stands."""

    given: Mapping[str, Any]
    node: yaml.Node
    path: str


@dataclass(frozen=True, slots=True)
class _Document:
    defaults: _Part
    classes: Mapping[str, _Part]
    rules: tuple[_Part, ...]
    alerts: tuple[_Part, ...]


def parse_policy(content: bytes, file: str) -> PolicySpec:
    """Read a policy. Raises :class:`PolicyError` with every problem that was found."""
    root = compose(content, file)
    source = Source(file)
    try:
        document = _read(source, root)
        spec = _assemble(source, document, _version_of(content))
    except reading_stops():
        spec = None
    except RecursionError:
        source.complain(root, "", "is nested too deeply, or an alias holds itself")
        spec = None
    if source.problems or spec is None:
        raise PolicyError(file, dict.fromkeys(source.problems))
    return spec


def default_policy() -> bytes:
    """The policy that is used when the operator gives none."""
    return resources.files("policy").joinpath("assets/default.yaml").read_bytes()


def json_schema() -> dict[str, Any]:
    """The form of a policy file, for editors. Rules that span fields are checked by the gateway only."""
    named = {"type": "object", "additionalProperties": _SETTINGS.schema(), "propertyNames": _LABEL.schema()}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "medusa-gateway policy",
        "type": "object",
        "additionalProperties": False,
        "required": ["version"],
        "properties": {
            "version": {"const": FORMAT_VERSION},
            "defaults": _SETTINGS.schema(),
            "classes": named,
            "rules": {"type": "array", "items": _RULE.schema()},
            "alerts": {"type": "array", "items": _ALERT.schema()},
        },
    }


def _version_of(content: bytes) -> str:
    return f"{FORMAT_VERSION}-{hashlib.sha256(content).hexdigest()[:12]}"


def _read(source: Source, root: yaml.Node) -> _Document:
    nodes: dict[str, yaml.Node] = {}
    for key_node, key, value_node in source.items(root, "", "a policy"):
        if key in _TOP:
            nodes[key] = value_node
        else:
            source.complain(key_node, key, f"unknown field; {did_you_mean(key, _TOP)}")
    if "version" in nodes:
        version = source.scalar(nodes["version"], "version", f"{FORMAT_VERSION}")
        if version is not None and (version != FORMAT_VERSION or isinstance(version, (bool, float))):
            source.complain(
                nodes["version"], "version", f"this gateway reads version {FORMAT_VERSION}, not {version!r}"
            )
    elif isinstance(root, yaml.MappingNode):
        source.complain(root, "version", f"is missing; start the file with 'version: {FORMAT_VERSION}'")
    empty = _Part({}, root, "defaults")
    classes = {}
    if "classes" in nodes:
        for key_node, key, node in source.items(nodes["classes"], "classes", "classes by name"):
            if _LABEL.read(source, key_node, join("classes", key)) is not None:
                classes[key] = _part(source, _SETTINGS, node, join("classes", key))
    return _Document(
        defaults=_part(source, _SETTINGS, nodes["defaults"], "defaults") if "defaults" in nodes else empty,
        classes=classes,
        rules=tuple(_parts(source, _RULE, nodes.get("rules"), "rules", "rules")),
        alerts=tuple(_parts(source, _ALERT, nodes.get("alerts"), "alerts", "alerts")),
    )


def _part(source: Source, block: Block, node: yaml.Node, path: str) -> _Part:
    return _Part(block.read(source, node, path) or {}, node, path)


def _parts(source: Source, block: Block, node: yaml.Node | None, path: str, what: str) -> Iterator[_Part]:
    if node is not None:
        for at, element in source.elements(node, path, what):
            yield _part(source, block, element, at)


def _assemble(source: Source, document: _Document, version: str) -> PolicySpec:
    known = {*BUILT_IN_CLASSES, *document.classes}
    rules: list[Rule] = []
    for part in document.rules:
        _refuse_unknown_classes(source, part, part.given.get("when", {}).get("class", ()), known, "when.class")
        _refuse_repeated_name(source, part, [rule.name for rule in rules], "rule")
        if rules and rules[-1].when.always and "when" not in document.rules[len(rules) - 1].given:
            source.complain(part.node, part.path, f"can't be reached: rule '{rules[-1].name}' above has no conditions")
        rules.append(Rule(part.given.get("name", part.path), _conditions(part.given.get("when", {}))))
    alerts: list[AlertRule] = []
    for part in document.alerts:
        _refuse_unknown_classes(source, part, part.given.get("class", ()), known, "class")
        _refuse_repeated_name(source, part, [alert.name for alert in alerts], "alert")
        if ("below" in part.given) == ("above" in part.given):
            source.complain(part.node, part.path, "give either below or above: the limit that the metric crosses")
        alerts.append(_alert(part.given))
    settings: dict[tuple[str | None, int], Settings] = {}
    for class_name, class_part in [(None, None), *document.classes.items()]:
        below = [document.defaults] if class_part is None else [document.defaults, class_part]
        settings[class_name, -1] = _merged(source, below)
        for index, part in enumerate(document.rules):
            use = _Part(part.given.get("use", {}), _value_node(part.node, ["use"]), join(part.path, "use"))
            wanted = rules[index].when.classes
            if class_name is None or wanted is None or class_name in wanted:
                settings[class_name, index] = _merged(source, [*below, use])
    return PolicySpec(version, source.file, tuple(rules), tuple(alerts), settings, frozenset(document.classes))


def _merged(source: Source, parts: list[_Part]) -> Settings:
    """Later parts win field by field. What doesn't fit together is told at the last one, which made it so."""
    fields: dict[str, Any] = {}
    for part in parts:
        for name, value in part.given.items():
            fields[name] = {**fields.get(name, {}), **value} if isinstance(value, dict) else value
        if part.given.get("method") == "vanilla" and "tree" not in part.given:
            fields.pop("tree", None)
    last, own = parts[-1], Settings()
    heads = _as_bounds(source, last, "heads", fields, own.heads)
    nodes = _as_bounds(source, last, "nodes", fields, own.nodes)
    temperature = fields.get("temperature", {})
    values = [temperature.get(name) for name in ("min", "default", "max")]
    given = [value for value in values if value is not None]
    if given != sorted(given) and temperature != last.given.get("temperature") and "temperature" in last.given:
        _complain_at(source, last, "temperature", "min, default and max are out of order once merged with those above")
    fallback = fields.get("fallback", {})
    settings = Settings(
        method=fields.get("method", own.method),
        heads=heads,
        nodes=nodes,
        depth=fields.get("depth", own.depth),
        tree=fields.get("tree", own.tree),
        acceptance=fields.get("acceptance", own.acceptance),
        temperature=TemperatureLimits(temperature.get("default"), temperature.get("min"), temperature.get("max")),
        deadline_s=fields.get("deadline"),
        client_override=fields.get("client_override", own.client_override),
        control=fields.get("control", own.control),
        fallback=FallbackSettings(
            min_speedup=fallback.get("min_speedup", own.fallback.min_speedup),
            window_s=fallback.get("window", own.fallback.window_s),
            hold_s=fallback.get("hold", own.fallback.hold_s),
            probe=fallback.get("probe", own.fallback.probe),
        ),
    )
    _refuse_contradictions(source, last, settings)
    return settings


def _refuse_contradictions(source: Source, part: _Part, settings: Settings) -> None:
    given = part.given
    if settings.method == "vanilla" and "tree" in given:
        _complain_at(source, part, "tree", "has no effect with method vanilla; remove one of them")
    tree = settings.tree
    if not isinstance(tree, CandidateTree) or settings.method == "vanilla":
        return
    if tree.depth > settings.max_heads and given.keys() & {"tree", "heads", "depth"}:
        _complain_at(
            source,
            part,
            "tree",
            f"is {tree.depth} levels deep, but heads and depth allow {settings.max_heads}; cut it or raise them",
        )
    if len(tree) > settings.nodes.high and given.keys() & {"tree", "nodes"}:
        _complain_at(
            source,
            part,
            "tree",
            f"has {len(tree)} nodes, but nodes allows {settings.nodes.high}; cut the tree or raise nodes",
        )


def _as_bounds(source: Source, last: _Part, name: str, fields: Mapping[str, Any], own: Bounds) -> Bounds:
    given = fields.get(name, {})
    bounds = Bounds(given.get("min", own.low), given.get("max", own.high))
    if bounds.low > bounds.high:
        if "min" in given and "max" not in given:
            return Bounds(bounds.low, bounds.low)
        mine = last.given.get(name, {})
        if mine and not ("min" in mine and "max" in mine):  # else its own block has complained already
            _complain_at(
                source,
                last,
                name,
                f"min ({bounds.low}) is over max ({bounds.high}) once merged with the settings above; give both",
            )
    return bounds


def _conditions(when: Mapping[str, Any]) -> Conditions:
    def interval(name: str) -> Range | None:
        return Range(when[name].get("min"), when[name].get("max")) if name in when else None

    return Conditions(
        classes=frozenset(when["class"]) if "class" in when else None,
        models=Names.of(when["model"]) if "model" in when else None,
        tenants=Names.of(when["tenant"]) if "tenant" in when else None,
        turn=when.get("turn"),
        prompt_tokens=interval("prompt_tokens"),
        temperature=interval("temperature"),
        load=interval("load"),
    )


def _alert(given: Mapping[str, Any]) -> AlertRule:
    return AlertRule(
        name=given.get("name", ""),
        metric=given.get("metric", ""),
        below=given.get("below"),
        above=given.get("above"),
        for_s=given.get("for", 0.0),
        severity=given.get("severity", "warning"),
        classes=given.get("class", ()),
        models=given.get("model", ()),
        notify=given.get("notify", ()),
    )


def _refuse_unknown_classes(source: Source, part: _Part, names: tuple[str, ...], known: set[str], field: str) -> None:
    for name in names:
        if name not in known:
            hint = f"{did_you_mean(name, known)} A class of your own needs a block under 'classes', {{}} will do"
            source.complain(_value_node(part.node, field.split(".")), join(part.path, field), f"'{name}': {hint}")


def _refuse_repeated_name(source: Source, part: _Part, before: list[str], what: str) -> None:
    name = part.given.get("name")
    if name in before:
        source.complain(
            _value_node(part.node, ["name"]), join(part.path, "name"), f"another {what} above is called '{name}' too"
        )


def _complain_at(source: Source, part: _Part, name: str, message: str) -> None:
    source.complain(_value_node(part.node, [name]), join(part.path, name), message)


def _value_node(node: yaml.Node, names: list[str]) -> yaml.Node:
    """The node of a nested field, for the sake of its line; where it is not given, that of the block around it."""
    for name in names:
        if isinstance(node, yaml.MappingNode):
            pairs = cast("list[tuple[yaml.Node, yaml.Node]]", node.value)
            node = next((value for key, value in pairs if key.value == name), node)
    return node
