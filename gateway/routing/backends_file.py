"""The backends file: its table of fields, its reader, and its JSON Schema. Strict, like the policy file."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from backends.engine.options import ABOUT, MOST_TOKENS, About, EngineOptions
from gateway.routing.circuit_breaker import BreakerSettings
from gateway.routing.spec import (
    EXTENSIONS,
    FORMAT_VERSION,
    PLAIN,
    BackendSpec,
    BackendsSpec,
    EngineMetrics,
    EngineSpec,
    HealthCheck,
    Placement,
    Timeouts,
    UpstreamSpec,
    Variant,
)
from policy.config.fields import Block, Duration, Flag, Kind, ManyOf, Name, Number, OneOf
from policy.config.problems import did_you_mean
from policy.config.yaml_source import Source, join, read_file

_EXAMPLE = "version: 1, backends: [{name: a, kind: engine}]"
_LABEL = Name(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}", "a name of letters, digits, '_', '.' and '-'")
_MODEL = Name(r"[^\s|]{1,256}", "a model's name, without spaces or '|'")
_PATH = Name(r"[^\x00-\x1f]{1,4096}", "a path or a hub id")
_VARIABLE = Name(r"[A-Za-z_][A-Za-z0-9_]*", "the name of an environment variable")
_ROUTE = Name(r"/[!-~]*", "a path below the url, such as /models")
_COUNT = Number(1, MOST_TOKENS, whole=True)


class _Url:
    """An http or https URL without credentials, query or fragment."""

    expected = "a URL such as http://host:8000/v1"

    def read(self, source: Source, node: yaml.Node, path: str) -> str | None:
        # Not quoted: one with a password in it is what is refused here.
        value = Name(r"\S{1,2048}", self.expected, secret=True).read(source, node, path)
        if value is None:
            return None
        try:
            parts = urlsplit(value)
            host, _ = parts.hostname, parts.port
        except ValueError:
            source.complain(node, path, f"expected {self.expected}; check host and port")
            return None
        if parts.scheme not in ("http", "https") or not host:
            source.complain(node, path, f"expected {self.expected}, with http or https and a host")
        elif parts.username is not None or parts.password is not None:
            source.complain(node, path, "must hold no credentials; use api_key_env or api_key_file")
        elif parts.query or parts.fragment:
            source.complain(node, path, "must end with its path, mostly /v1; remove what follows")
        else:
            return value.rstrip("/")
        return None

    def schema(self) -> dict[str, Any]:
        return {"type": "string", "format": "uri", "pattern": "^https?://"}


def _kind_of(about: About) -> Kind:
    """How the file writes an option of an engine."""
    if about.indexed:
        *plain, last = about.choices
        pattern = "|".join(rf"{each}(?::\d{{1,3}})?" if each == about.indexed else each for each in about.choices)
        of_one = f"{', '.join(plain)}, {last} or {about.indexed}:N; one device, as tensor parallel is not supported"
        return Name(pattern, of_one)
    if about.choices:
        return OneOf(about.choices)
    if about.limits is not None:
        return Number(*about.limits, whole=True)
    return _PATH


_COMMON: dict[str, Kind] = {
    "name": _LABEL,
    "kind": OneOf(("engine", "openai")),
    "serves": _MODEL,
    "priority": Number(0, 100, whole=True),
    "classes": ManyOf(_LABEL),
}
_ENGINE = Block(
    {
        **_COMMON,
        **{name: _kind_of(about) for name, about in ABOUT.items() if about.in_file},
    },
    "an engine",
    required=("name", "kind"),
    about="An engine of this process, with the options of `serve`.",
)
_TIMEOUTS = Block(
    {
        "connect": Duration(0.001, 60),
        "first_byte": Duration(0.001, 3600),
        "between_bytes": Duration(0.001, 3600),
        "total": Duration(0.001, 86_400),
    },
    "timeouts",
)
_BREAKER = Block(
    {"failures": Number(1, 1000, whole=True), "open": Duration(0.001, 3600), "probes": Number(1, 100, whole=True)},
    "the fields of a breaker",
    about="After so many failures in a row the backend is left alone; then so many requests at a time may try it.",
)
_HEALTH = Block(
    {
        "path": _ROUTE,
        "every": Duration(0.01, 3600),
        "timeout": Duration(0.001, 60),
        "failures": Number(1, 1000, whole=True),
    },
    "the fields of a health check",
)
_SPECULATIVE = Block(
    {"method": OneOf(("ngram", "eagle", "medusa", "draft", "mtp")), "tokens": Number(1, 256, whole=True)},
    "how it drafts",
    required=("method",),
    about="tokens: drafts of a step, as the server was started.",
)
_VARIANT_FIELDS = Block(
    {"name": _LABEL, "speculative": _SPECULATIVE},
    "a variant",
    required=("name",),
    about="How the server decodes; upstreams of one model with different variants are arms (docs/upstreams.md).",
)


class _VariantKind:
    """``plain``, or a block with a name."""

    def read(self, source: Source, node: yaml.Node, path: str) -> Variant | None:
        if isinstance(node, yaml.ScalarNode):
            return PLAIN if OneOf(("plain",)).read(source, node, path) else None
        before = len(source.problems)
        given = _VARIANT_FIELDS.read(source, node, path)
        if given is None or len(source.problems) > before:
            return None
        drafts = given.get("speculative", {})
        if given["name"] == PLAIN.name and drafts:
            source.complain(node, path, "'plain' is the name of a variant that drafts nothing; choose another")
            return None
        return Variant(given["name"], drafts.get("method"), drafts.get("tokens"))

    def schema(self) -> dict[str, Any]:
        return {"anyOf": [{"const": "plain"}, _VARIANT_FIELDS.schema()]}


_METRICS = Block({"path": _ROUTE, "every": Duration(0.5, 3600)}, "where an upstream shows its figures")
_UPSTREAM = Block(
    {
        **_COMMON,
        "url": _Url(),
        "upstream_model": _MODEL,
        "dialect": OneOf(tuple(EXTENSIONS)),
        "api_key_env": _VARIABLE,
        "api_key_file": _PATH,
        "ca_file": _PATH,
        "max_running": _COUNT,
        "max_in_flight": _COUNT,
        "timeouts": _TIMEOUTS,
        "breaker": _BREAKER,
        "health": _HEALTH,
        "variant": _VariantKind(),
        "per_hour": Number(0.000001, 1_000_000),
        "metrics": _METRICS,
    },
    "an upstream",
    required=("name", "kind", "serves", "url"),
    about="A server elsewhere that speaks OpenAI's API.",
)
_KINDS = {"engine": _ENGINE, "openai": _UPSTREAM}
_MODEL_FIELDS = Block({"required": Flag()}, "the fields of a model")
_TOP: dict[str, dict[str, Any]] = {
    "version": {"const": FORMAT_VERSION},
    "retries": Number(0, 10, whole=True).schema(),
    "models": {"type": "object", "additionalProperties": _MODEL_FIELDS.schema()},
    "backends": {"type": "array", "minItems": 1, "items": {"anyOf": [each.schema() for each in _KINDS.values()]}},
}


def parse_backends(content: bytes, file: str) -> BackendsSpec:
    """Read a backends file; relative paths in it start at its folder.

    Raises :class:`ConfigError` with every problem that was found, each with line, path and fix.
    """
    folder = Path(file).parent
    return read_file(
        content, file, lambda source, root: _read(source, root, folder), what="backends file", shortest=_EXAMPLE
    )


def json_schema() -> dict[str, Any]:
    """The form of the file, for editors. Rules that span fields are checked by the gateway only."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "medusa-gateway backends",
        "type": "object",
        "additionalProperties": False,
        "required": ["version", "backends"],
        "properties": _TOP,
    }


def _read(source: Source, root: yaml.Node, folder: Path) -> BackendsSpec:
    nodes = source.known_items(root, "a backends file", _TOP)
    source.check_version(root, nodes, FORMAT_VERSION)
    retries = Number(0, 10, whole=True).read(source, nodes["retries"], "retries") if "retries" in nodes else None
    backends: list[BackendSpec] = []
    if "backends" in nodes:
        for at, node in source.elements(nodes["backends"], "backends", "backends"):
            backend = _backend(source, node, at, folder)
            if backend is None:
                continue
            if backend.name in [each.name for each in backends]:
                source.complain(node, join(at, "name"), f"another backend above is called '{backend.name}' too")
            backends.append(backend)
        if not backends and not source.problems:
            source.complain(nodes["backends"], "backends", "is empty; name at least one backend")
    elif not source.problems:
        source.complain(root, "backends", "is missing; list the backends under it")
    if source.problems:
        # What follows asks about the whole file, and would only repeat what is missing in it.
        return BackendsSpec(source.file, (), frozenset())
    _refuse_uncovered_models(source, nodes["backends"], backends)
    _refuse_mixed_variants(source, nodes["backends"], backends)
    required = _required(source, nodes.get("models"), backends)
    return BackendsSpec(source.file, tuple(backends), required, 2 if retries is None else int(retries))


def _backend(source: Source, node: yaml.Node, at: str, folder: Path) -> BackendSpec | None:
    kind = None
    for _, key, value in source.items(node, at, "a backend"):
        if key == "kind":
            kind = OneOf(tuple(_KINDS)).read(source, value, join(at, "kind"))
            break
    else:
        if isinstance(node, yaml.MappingNode):
            source.complain(node, join(at, "kind"), f"is missing; one of {', '.join(_KINDS)}")
    if kind is None:
        return None
    before = len(source.problems)
    given = _KINDS[kind].read(source, node, at)
    if given is None or len(source.problems) > before:
        return None
    if kind == "engine":
        return _engine(given, folder)
    if "api_key_env" in given and "api_key_file" in given:
        source.complain(node, at, "give either api_key_env or api_key_file, not both")
    limits = given.get("max_running", 32), given.get("max_in_flight")
    if limits[1] is not None and limits[0] > limits[1]:
        source.complain(node, at, f"max_running ({limits[0]}) is over max_in_flight ({limits[1]}); lower the one")
    return _upstream(given, folder)


def _placement(given: dict[str, Any]) -> Placement:
    classes = given.get("classes")
    return Placement(given.get("priority", 0), None if classes is None else frozenset(classes))


def _engine(given: dict[str, Any], folder: Path) -> EngineSpec:
    model = _local(given.get("model"), folder)
    options = {name: given[name] for name, about in ABOUT.items() if about.in_file and name in given}
    options |= {"model": model, "heads": _local(given.get("heads"), folder)}
    serves = given.get("serves") or (Path(model).name if model else given["name"])
    return EngineSpec(given["name"], serves, _placement(given), EngineOptions(**options))


def _upstream(given: dict[str, Any], folder: Path) -> UpstreamSpec:
    def seconds(block: str, make: Callable[..., Any], plain: tuple[str, ...] = ()) -> Any:
        return make(**{name if name in plain else f"{name}_s": value for name, value in given.get(block, {}).items()})

    plain = ("name", "serves", "url", "dialect", "api_key_env", "max_running", "max_in_flight", "variant", "per_hour")
    running = given.get("max_running", 32)
    return UpstreamSpec(
        placement=_placement(given),
        upstream_model=given.get("upstream_model", given["serves"]),
        api_key_file=_beside(given.get("api_key_file"), folder),
        ca_file=_beside(given.get("ca_file"), folder),
        timeouts=seconds("timeouts", Timeouts),
        breaker=seconds("breaker", BreakerSettings, ("failures", "probes")),
        health=seconds("health", HealthCheck, ("path", "failures")),
        metrics=seconds("metrics", EngineMetrics, ("path",)) if "metrics" in given else None,
        **{"max_in_flight": 4 * running, **{name: given[name] for name in plain if name in given}},
    )


def _beside(path: str | None, folder: Path) -> str | None:
    return None if path is None else str(folder / path)


def _local(name: str | None, folder: Path) -> str | None:
    """A folder beside the file, if there is one; else the name as it is: absolute, or a hub id."""
    if name is None:
        return None
    beside = folder / name
    return str(beside) if re.match(r"\.{1,2}(/|$)", name) or beside.is_dir() else name


def _refuse_uncovered_models(source: Source, node: yaml.Node, backends: list[BackendSpec]) -> None:
    for model in dict.fromkeys(each.serves for each in backends):
        if all(each.placement.classes is not None for each in backends if each.serves == model):
            source.complain(
                node,
                "backends",
                f"no backend of {model} takes every class of prompts; remove 'classes' from one of them",
            )


def _refuse_mixed_variants(source: Source, node: yaml.Node, backends: list[BackendSpec]) -> None:
    """Arms are compared with each other, so what a model's every backend is must be known."""
    for model in dict.fromkeys(each.serves for each in backends):
        served = [each for each in backends if each.serves == model]
        variants = {each.name: each.variant for each in served if isinstance(each, UpstreamSpec)}
        if not any(variants.values()):
            continue
        if unsaid := [name for name, variant in variants.items() if variant is None]:
            source.complain(
                node,
                "backends",
                f"some upstreams of {model} have a 'variant' and {', '.join(unsaid)} none; say variant: plain there",
            )
        if engines := [each.name for each in served if isinstance(each, EngineSpec)]:
            source.complain(
                node,
                "backends",
                f"{', '.join(engines)}: an engine of this process decides by itself how to decode, so it is no arm "
                f"beside the variants of {model}; remove them, or serve it under another name",
            )
        meanings: dict[str, Variant] = {}
        for name, variant in variants.items():
            if variant is not None and meanings.setdefault(variant.name, variant) != variant:
                source.complain(
                    node, "backends", f"{name}: another variant of {model} is called '{variant.name}'; rename one"
                )


def _required(source: Source, node: yaml.Node | None, backends: list[BackendSpec]) -> frozenset[str]:
    """Models with an engine here, unless the file says otherwise. An upstream that is shared by all replicas must not
    take all of them out of a balancer at once."""
    required = {each.serves for each in backends if isinstance(each, EngineSpec)}
    served = {each.serves for each in backends}
    if node is None:
        return frozenset(required)
    for key_node, name, value in source.items(node, "models", "models by name"):
        given = _MODEL_FIELDS.read(source, value, join("models", name)) or {}
        if name not in served:
            source.complain(key_node, join("models", name), f"no backend serves it; {did_you_mean(name, served)}")
        elif given.get("required") is True:
            required.add(name)
        elif given.get("required") is False:
            required.discard(name)
    return frozenset(required)
