"""The policy file: its table of fields, its reader, and its JSON Schema."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any, TypeVar

import yaml

from backends.tree import MAX_DEPTH, MAX_NODES, CandidateTree
from backends.types import PrefillBudget
from policy.config.fields import AutoOr, Block, Duration, Flag, Kind, ManyOf, Name, Number, OneOf, Share, Tree
from policy.config.parts import (
    LABEL,
    PATTERN,
    Part,
    complain_at,
    read_named,
    read_part,
    read_parts,
    refuse_repeated_name,
    refuse_unknown_classes,
    value_node,
)
from policy.config.problems import PolicyError
from policy.config.yaml_source import Source, join, read_file
from policy.file.alert_format import ALERT, LABELS, RECEIVER, RUNBOOKS, assemble_alerts, assemble_receivers
from policy.file.reach import unreachable
from policy.names import Names
from policy.spec import (
    BUILT_IN_CLASSES,
    FORMAT_VERSION,
    Bounds,
    Conditions,
    Cost,
    FallbackSettings,
    PolicySpec,
    Range,
    Rule,
    Settings,
    SettingsTable,
    TemperatureLimits,
)

N = TypeVar("N")


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
    "method": OneOf(("auto", "medusa", "vanilla")),
    "heads": _bounds(1, MAX_DEPTH, "How many Medusa heads may be used."),
    "nodes": _bounds(0, MAX_NODES, "Candidate nodes per step and sequence."),
    "depth": Number(1, MAX_DEPTH, whole=True),
    "tree": Tree(),
    "acceptance": OneOf(("exact", "typical")),
    "temperature": _TEMPERATURE,
    "deadline": Duration(0.001, 86_400),
    "client_override": Flag(),
    "lookup": Flag(),
}
# Measuring is by class, so what steers it can't depend on the rule that one request happened to match.
_CLASS_FIELDS: dict[str, Kind] = {**_RULE_FIELDS, "control": Share(0.5), "fallback": _FALLBACK}
_CLASS_FIELDS["objective"] = OneOf(("latency", "throughput", "cost"))
_SETTINGS = Block(_CLASS_FIELDS, "settings", about="How requests are decoded.")
_WHEN = Block(
    {
        "class": ManyOf(LABEL),
        "model": ManyOf(PATTERN),
        "tenant": ManyOf(PATTERN),
        "turn": OneOf(("first", "later")),
        "prompt_tokens": _range(0, 2**31, whole=True),
        "temperature": _range(0, 2),
        "load": _range(0, 1000),
    },
    "the conditions of a rule",
    about="All conditions must hold. load: sequences running and waiting over those that can run at once.",
)
_RULE = Block(
    {"name": LABEL, "when": _WHEN, "use": Block(_RULE_FIELDS, "settings")}, "a rule", required=("name", "use")
)
MAX_MERGED = 20_000
"""Merging takes its time: as many as there may be blocks and lists in a file."""
_COST = Block(
    {"per_gpu_hour": Number(0, 1_000_000), "currency": Name(r"[A-Za-z]{1,8}", "a currency of letters, such as USD")},
    "a price",
    required=("per_gpu_hour",),
    about="What an hour of an engine's device costs: to tell what speculation saves.",
)
_PREFILL = Block(
    {"budget": AutoOr(Number(1, 65_536, whole=True)), "factor": Number(1.01, 100)},
    "how prompts are read",
    about="Tokens of waiting prompts that engines read in a step beside streams. auto: as many as make the step last "
    "at most factor times as long.",
)
_TOP = ("version", "defaults", "classes", "rules", "alerts", "alert_labels", "runbooks", "receivers", "cost", "prefill")


@dataclass(frozen=True, slots=True)
class _Document:
    defaults: Part
    classes: Mapping[str, Part]
    rules: tuple[Part, ...]
    alerts: tuple[Part, ...]
    receivers: Mapping[str, Part]
    alert_labels: tuple[tuple[str, str], ...]
    runbooks: str | None
    cost: Mapping[str, Any] | None = None
    prefill: Mapping[str, Any] | None = None


def parse_policy(content: bytes, file: str) -> PolicySpec:
    """Read a policy. Raises :class:`PolicyError` with every problem that was found."""

    def read(source: Source, root: yaml.Node) -> PolicySpec:
        return _assemble(source, _read(source, root), _version_of(content))

    return read_file(content, file, read, what="policy", shortest="version: 1", error_type=PolicyError)


def default_policy() -> bytes:
    """The policy that is used when the operator gives none."""
    return resources.files("policy").joinpath("assets/default.yaml").read_bytes()


def json_schema() -> dict[str, Any]:
    """The form of a policy file, for editors. Rules that span fields are checked by the gateway only."""
    named = {"type": "object", "additionalProperties": _SETTINGS.schema(), "propertyNames": LABEL.schema()}
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
            "alerts": {"type": "array", "items": ALERT.schema()},
            "alert_labels": LABELS.schema(),
            "runbooks": RUNBOOKS.schema(),
            "receivers": {**named, "additionalProperties": RECEIVER.schema()},
            "cost": _COST.schema(),
            "prefill": _PREFILL.schema(),
        },
    }


def _version_of(content: bytes) -> str:
    return f"{FORMAT_VERSION}-{hashlib.sha256(content).hexdigest()[:12]}"


def _read(source: Source, root: yaml.Node) -> _Document:
    nodes = source.known_items(root, "a policy", _TOP)
    source.check_version(root, nodes, FORMAT_VERSION)
    empty = Part({}, root, "defaults")
    labels, runbooks = nodes.get("alert_labels"), nodes.get("runbooks")
    return _Document(
        defaults=read_part(source, _SETTINGS, nodes["defaults"], "defaults") if "defaults" in nodes else empty,
        classes=read_named(source, _SETTINGS, nodes.get("classes"), "classes", "classes by name"),
        rules=tuple(read_parts(source, _RULE, nodes.get("rules"), "rules", "rules")),
        alerts=tuple(read_parts(source, ALERT, nodes.get("alerts"), "alerts", "alerts")),
        receivers=read_named(source, RECEIVER, nodes.get("receivers"), "receivers", "receivers by name"),
        alert_labels=() if labels is None else LABELS.read(source, labels, "alert_labels") or (),
        runbooks=None if runbooks is None else RUNBOOKS.read(source, runbooks, "runbooks"),
        cost=_COST.read(source, nodes["cost"], "cost") if "cost" in nodes else None,
        prefill=_PREFILL.read(source, nodes["prefill"], "prefill") if "prefill" in nodes else None,
    )


def _assemble(source: Source, document: _Document, version: str) -> PolicySpec:
    known = {*BUILT_IN_CLASSES, *document.classes}
    rules: dict[str, Rule] = {}
    for part in document.rules:
        refuse_unknown_classes(source, part, part.given.get("when", {}).get("class", ()), known, "when.class")
        refuse_repeated_name(source, part, rules, "rule")
        name = part.given.get("name", part.path)
        rules[name] = Rule(name, _conditions(part.given.get("when", {})))
    receivers = assemble_receivers(source, document.receivers)
    alerts = assemble_alerts(source, document.alerts, known, receivers, document.alert_labels, document.runbooks)
    if not source.problems:  # else a rule may have lost a condition
        _refuse_unreachable(source, document, known)
    if len(rules) < len(document.rules):  # two of one name: refused, and nothing can be laid out by their places
        return PolicySpec(version, source.file)
    return PolicySpec(
        version,
        source.file,
        tuple(rules.values()),
        alerts,
        receivers,
        _settings(source, document, tuple(rules.values())),
        frozenset(document.classes),
        document.runbooks,
        Cost(**document.cost) if document.cost and "per_gpu_hour" in document.cost else None,
        _prefill(document.prefill or {}),
    )


def _prefill(given: Mapping[str, Any]) -> PrefillBudget:
    usual, budget = PrefillBudget(), given.get("budget", "auto")
    return PrefillBudget(None if budget == "auto" else budget, given.get("factor", usual.factor))


def _refuse_unreachable(source: Source, document: _Document, classes: set[str]) -> None:
    rules = document.rules
    for below, above in unreachable([part.given.get("when", {}) for part in rules], classes):
        why = "takes every request that this one would" if "when" in rules[above].given else "has no conditions"
        name = rules[above].given.get("name", rules[above].path)
        source.complain(rules[below].node, rules[below].path, f"can't be reached: rule '{name}' above {why}")


def _settings(source: Source, document: _Document, rules: tuple[Rule, ...]) -> SettingsTable:
    """The settings of every class under every rule that it can meet. Those that are alike are merged once."""
    # What each class has of its own, after the defaults.
    own: dict[str | None, list[Part]] = {None: [], **{name: [part] for name, part in document.classes.items()}}
    uses = [
        Part(part.given.get("use", {}), value_node(part.node, ["use"]), join(part.path, "use"))
        for part in document.rules
    ]
    group_of, groups = _grouped({name: part[0].given if part else {} for name, part in own.items()})
    use_of, rules_by_use = _grouped({index: use.given for index, use in enumerate(uses)})
    wanted: list[Collection[int]] = []
    for same in rules_by_use:
        named = [rules[index].when.classes for index in same]
        # Group 0 has the classes without a block, which any rule may name.
        some = {group_of[name] for each in named if each is not None for name in each if name in group_of}
        wanted.append(range(len(groups)) if None in named else {0, *some})
    count = sum(map(len, wanted))
    if count > MAX_MERGED:
        source.complain(
            document.defaults.node,
            "rules",
            f"classes and rules that differ from each other make {count} combinations of settings; a policy may have "
            f"{MAX_MERGED}: give classes or rules the same settings, or name the classes of a rule",
        )
        return SettingsTable(rules, group_of, list(use_of.values()), {})
    merged: dict[tuple[int, int], Settings] = {}

    def merge(group: int, use: int, among: Iterable[list[Part]]) -> None:
        """By the first of ``among``, which are alike; where that is refused, by each: all have lines of their own."""
        before = len(source.problems)
        for chain in among:
            merged[group, use] = _merged(source, [document.defaults, *chain])
            if len(source.problems) == before:
                break

    for group, names in enumerate(groups):
        merge(group, -1, (own[name] for name in names))
    for use, same in enumerate(rules_by_use):
        for group in sorted(wanted[use]):
            merge(group, use, ([*own[groups[group][0]], uses[index]] for index in same))
    return SettingsTable(rules, group_of, list(use_of.values()), merged)


def _grouped(given: Mapping[N, Mapping[str, Any]]) -> tuple[dict[N, int], list[list[N]]]:
    """Names of blocks with the same content: the group of each, and the groups, in the order of their first ones."""
    numbers: dict[Any, int] = {}
    groups: list[list[N]] = []
    group_of: dict[N, int] = {}
    for name, fields in given.items():
        number = group_of[name] = numbers.setdefault(_frozen(fields), len(groups))
        if number == len(groups):
            groups.append([])
        groups[number].append(name)
    return group_of, groups


def _frozen(value: Any) -> Any:
    if isinstance(value, Mapping):
        return frozenset((name, _frozen(each)) for name, each in value.items())
    return type(value), value


def _merged(source: Source, parts: list[Part]) -> Settings:
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
        complain_at(source, last, "temperature", "min, default and max are out of order once merged with those above")
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
        lookup=fields.get("lookup", own.lookup),
        control=fields.get("control", own.control),
        fallback=FallbackSettings(
            min_speedup=fallback.get("min_speedup", own.fallback.min_speedup),
            window_s=fallback.get("window", own.fallback.window_s),
            hold_s=fallback.get("hold", own.fallback.hold_s),
            probe=fallback.get("probe", own.fallback.probe),
        ),
        objective=fields.get("objective", own.objective),
    )
    _refuse_contradictions(source, last, settings)
    return settings


def _refuse_contradictions(source: Source, part: Part, settings: Settings) -> None:
    given = part.given
    if settings.method == "vanilla" and "tree" in given:
        complain_at(source, part, "tree", "has no effect with method vanilla; remove one of them")
    tree = settings.tree
    if not isinstance(tree, CandidateTree) or settings.method == "vanilla":
        return
    if tree.depth > settings.max_heads and given.keys() & {"tree", "heads", "depth"}:
        complain_at(
            source,
            part,
            "tree",
            f"is {tree.depth} levels deep, but heads and depth allow {settings.max_heads}; cut it or raise them",
        )
    if len(tree) > settings.nodes.high and given.keys() & {"tree", "nodes"}:
        complain_at(
            source,
            part,
            "tree",
            f"has {len(tree)} nodes, but nodes allows {settings.nodes.high}; cut the tree or raise nodes",
        )


def _as_bounds(source: Source, last: Part, name: str, fields: Mapping[str, Any], own: Bounds) -> Bounds:
    given = fields.get(name, {})
    bounds = Bounds(given.get("min", own.low), given.get("max", own.high))
    if bounds.low > bounds.high:
        if "min" in given and "max" not in given:
            return Bounds(bounds.low, bounds.low)
        mine = last.given.get(name, {})
        if mine and not ("min" in mine and "max" in mine):  # else its own block has complained already
            complain_at(
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
