"""The Helm chart as tests see it: rendered through Helm's own library, with what is derived of it.

``python -m tests.support.chart`` writes the derived parts anew: Kubernetes' types in ``values.schema.json``, the
comments of ``values.yaml``, the table of values in the README, and the copies of the gateway's own files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache
from importlib import resources
from io import StringIO
from pathlib import Path
from textwrap import wrap
from typing import Any

import yaml
from helm_python import Chart

from gateway import cli
from tests.support.paths import ROOT

CHART = ROOT / "helm"
OLDEST, NEWEST = "1.29", "1.37"
"""Kubernetes versions that the manifests are checked against; the chart's kubeVersion names the first."""
RELEASE, NAMESPACE = "demo", "llm"
TYPES = "io.k8s."
TABLE = re.compile(r"(?<=<!-- values -->\n).*(?=<!-- /values -->)", re.DOTALL)

Document = dict[str, Any]
Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Rendered:
    """``documents``: by template file; most templates make one or none. ``notes``: what an installation prints."""

    documents: tuple[tuple[str, Document], ...]
    notes: str

    def all(self, kind: str) -> list[Document]:
        return [document for _, document in self.documents if document["kind"] == kind]

    def one(self, kind: str, suffix: str = "") -> Document:
        """The document of ``kind`` with the release's full name and ``suffix``."""
        (deployment,) = self.all("Deployment")
        name = deployment["metadata"]["name"] + suffix
        (found,) = [document for document in self.all(kind) if document["metadata"]["name"] == name]
        return found

    @property
    def gateway(self) -> Document:
        """The gateway's container."""
        (container,) = self.one("Deployment")["spec"]["template"]["spec"]["containers"]
        return container


@cache
def loaded_chart() -> Chart:
    return Chart.load(CHART)


def render_files(values: Values, *, name: str = RELEASE, namespace: str = NAMESPACE) -> dict[str, str]:
    """Text by template. Raises ``helm_python.HelmError`` for values that the schema or a template refuses."""
    return loaded_chart().render(dict(values), name=name, namespace=namespace)


def render(values: Values | None = None, *, name: str = RELEASE, namespace: str = NAMESPACE) -> Rendered:
    """Raises as :func:`render_files` does, and ``yaml.YAMLError``."""
    files = render_files(values or {}, name=name, namespace=namespace)
    documents, notes = [], ""
    for file, text in sorted(files.items()):
        if file.endswith("NOTES.txt"):
            notes = text
            continue
        documents += [(Path(file).name, each) for each in yaml.load_all(text, Loader=_Strict) if each is not None]
    return Rendered(tuple(documents), notes)


class _Strict(yaml.CSafeLoader):
    """A repeated key is an error, not a silent loss."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        repeated = {key for key in keys if keys.count(key) > 1}
        if repeated:
            raise yaml.constructor.ConstructorError(None, None, f"repeated keys {repeated}", node.start_mark)
        return super().construct_mapping(node, deep)


def default_values() -> dict[str, Any]:
    return yaml.safe_load((CHART / "values.yaml").read_text())


def values_schema() -> dict[str, Any]:
    return json.loads((CHART / "values.schema.json").read_text())


def presets() -> dict[str, dict[str, Any]]:
    """By name; "default" is what the chart does by itself."""
    files = sorted((CHART / "presets").glob("*.yaml"))
    return {"default": {}} | {file.stem: yaml.safe_load(file.read_text()) for file in files}


def overlaid(below: Values, above: Values) -> dict[str, Any]:
    """``above`` over ``below``, map by map, as Helm lays values files over each other."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = overlaid(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def cases() -> dict[str, dict[str, Any]]:
    """The presets, and values files of the tests that reach what no preset does."""
    files = sorted((ROOT / "tests" / "data" / "chart").glob("*.yaml"))
    return presets() | {file.stem: yaml.safe_load(file.read_text()) for file in files}


def nested(path: str, value: Any) -> dict[str, Any]:
    """``nested("a.b", 1)`` is ``{"a": {"b": 1}}``."""
    for key in reversed(path.split(".")):
        value = {key: value}
    return value


def settings(schema: Mapping[str, Any], values: Values, at: str = "") -> Iterator[tuple[str, Mapping[str, Any], Any]]:
    """Path, schema and default of everything that a user can set: what the schema names, down to maps and lists."""
    for name, each in schema["properties"].items():
        path = f"{at}{name}"
        if path == "global":
            continue
        if "properties" in each:
            yield from settings(each, values[name], f"{path}.")
        else:
            yield path, each, values[name]


# What is derived.


def with_kubernetes_types(schema: dict[str, Any]) -> dict[str, Any]:
    """``schema`` with the definition of each Kubernetes type that it refers to: closed, as of :data:`OLDEST`."""
    folder = resources.files("kubernetes_validate") / "kubernetes-json-schema" / f"v{OLDEST}.0-local-strict"
    known = json.loads((folder / "_definitions.json").read_text())["$defs"]
    own = {name: each for name, each in schema["$defs"].items() if not name.startswith(TYPES)}
    needed: dict[str, Any] = {}
    todo = _references({**schema, "$defs": own})
    while todo:
        name = todo.pop()
        if name not in needed and name.startswith(TYPES):
            needed[name] = _plain(known[name])
            todo |= _references(needed[name])
    return {**schema, "$defs": own | dict(sorted(needed.items()))}


def _references(value: Any) -> set[str]:
    return set(re.findall(r'"#/\$defs/([^"]+)"', json.dumps(value)))


def _plain(value: Any) -> Any:
    """Without descriptions, and with references that stay inside the document."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if not isinstance(value, dict):
        return value
    plain = {}
    for key, each in value.items():
        if key == "$ref":
            plain[key] = "#/$defs/" + each.rpartition("/")[2]
        elif key == "properties":
            plain[key] = {name: _plain(inner) for name, inner in each.items()}
        elif key not in ("description", "default") and not key.startswith("x-"):
            plain[key] = _plain(each)
    return plain


def values_table() -> str:
    lines = ["| value | default | meaning |", "| --- | --- | --- |"]
    for path, schema, value in settings(values_schema(), default_values()):
        choice = f" ({', '.join(map(str, schema['enum']))})" if "enum" in schema else ""
        meaning = f"{schema['description']}{choice}".replace("|", "\\|")
        shown = "" if value in ("", None, [], {}) else f"`{json.dumps(value) if not isinstance(value, str) else value}`"
        lines.append(f"| `{path}` | {shown} | {meaning} |")
    return "\n".join(lines) + "\n"


VALUES_HEADER = """\
# Every value with its default. The comments are the descriptions of values.schema.json, as is the table in README.md:
# after editing either file run `python -m tests.support.chart`.
# yaml-language-server: $schema=values.schema.json
"""


def commented_values() -> str:
    """``values.yaml`` with what the schema says of each value above it."""
    lines = []
    for name, value in default_values().items():
        lines += ["", *_commented(name, value, values_schema()["properties"][name], "")]
    return VALUES_HEADER + "\n".join(lines) + "\n"


def _commented(name: str, value: Any, schema: Mapping[str, Any], indent: str) -> Iterator[str]:
    if "properties" in schema:
        yield f"{indent}{name}:"
        for inner, each in value.items():
            yield from _commented(inner, each, schema["properties"][inner], f"{indent}  ")
        return
    choice = f" ({', '.join(map(str, schema['enum']))})" if "enum" in schema else ""
    comment = f"{indent}# "
    yield from wrap(f"{schema['description']}{choice}", 100, initial_indent=comment, subsequent_indent=comment)
    yield f"{indent}{name}: {_inline(value)}"


def _inline(value: Any) -> str:
    """YAML on one line, with no more quotes than it needs."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_inline(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_inline, value)) + "]"
    plain = isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9/][A-Za-z0-9./_-]*", value)
    return value if plain and yaml.safe_load(value) == value else json.dumps(value)


def derived_files() -> dict[Path, str]:
    """Each file of the chart that must follow from something else, and what it must hold."""
    readme = CHART / "README.md"
    rules = StringIO()
    with redirect_stdout(rules):
        assert cli.main(["alerts", "rules", "--format", "rules"]) == 0
    return {
        CHART / "values.yaml": commented_values(),
        CHART / "values.schema.json": json.dumps(with_kubernetes_types(values_schema()), indent=2) + "\n",
        readme: TABLE.sub(lambda _: values_table(), readme.read_text()),
        CHART / "files" / "alert-rules.yaml": rules.getvalue(),
        CHART / "files" / "dashboard.json": (ROOT / "telemetry" / "assets" / "grafana-dashboard.json").read_text(),
        CHART / "files" / "policy.yaml": (ROOT / "policy" / "assets" / "default.yaml").read_text(),
    }


if __name__ == "__main__":
    for file, content in derived_files().items():
        file.write_text(content)
