"""The chart's values: what is refused and how, that nothing in them is idle, and what is derived of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helm_python
import jsonschema_rs
import pytest

from tests.support.chart import (
    cases,
    default_values,
    derived_files,
    nested,
    overlaid,
    render,
    render_files,
    settings,
    values_schema,
)

CASES = cases()


@pytest.mark.parametrize("path", derived_files(), ids=lambda path: path.name)
def test_derived_files_are_up_to_date(path: Path) -> None:
    assert path.read_text() == derived_files()[path], "run: python -m tests.support.chart"


# What is refused.

REFUSED = [
    ("replicas", 2, "'replicas' not allowed"),
    ("image.repo", "x", "at '/image': additional properties 'repo' not allowed"),
    ("redis.external.password", "s3cret", "at '/redis/external': additional properties 'password' not allowed"),
    ("redis.external.tls.caSecret.path", "x", "'path' not allowed"),
    ("tolerations", [{"key": "a", "effekt": "NoSchedule"}], "at '/tolerations/0': additional properties 'effekt'"),
    ("affinity.nodeAfinity", {}, "at '/affinity': additional properties 'nodeAfinity'"),
    ("resources.limit", {}, "at '/resources': additional properties 'limit'"),
    ("topologySpreadConstraints", [{"maxSkew": 1}], "missing properties 'topologyKey', 'whenUnsatisfiable'"),
    ("httpRoute.parentRefs", [{"namespace": "a"}], "missing property 'name'"),
    ("extraVolumes", [{"name": "v", "gitRepo": {}}], "'gitRepo' not allowed"),
    ("replicaCount", "2", "at '/replicaCount': got string, want integer"),
    ("replicaCount", -1, "at '/replicaCount': minimum"),
    ("replicaCount", 1.5, "want integer"),
    ("image.tag", 1.1, "at '/image/tag': got number, want string"),
    ("image.tag", "a b", "does not match pattern"),
    ("image.digest", "latest", "does not match pattern"),
    ("image.pullPolicy", "Sometimes", "value must be one of 'Always', 'IfNotPresent', 'Never'"),
    ("model.dtype", "int8", "value must be one of 'auto', 'bfloat16', 'float32'"),
    ("redis.mode", "redis", "value must be one of 'embedded', 'bundled', 'external', 'memory'"),
    ("redis.external.hosts", ["redis://h"], "at '/redis/external/hosts/0'"),
    ("redis.namespace", "a b", "does not match pattern"),
    ("cache.size", "10 GB", "at '/cache/size'"),
    ("gpu.count", 0, "at '/gpu/count': minimum"),
    ("gpu.enabled", "yes", "want boolean"),
    ("podSecurityContext.runAsUser", 0, "at '/podSecurityContext/runAsUser': minimum"),
    ("drain.timeoutSeconds", 0, "at '/drain/timeoutSeconds'"),
    ("limits.maxRunning", 0, "at '/limits/maxRunning'"),
    ("service.port", 70000, "at '/service/port': maximum"),
    ("ingress.hosts", ["https://a"], "at '/ingress/hosts/0'"),
    ("ingress.paths", [], "at '/ingress/paths'"),
    ("networkPolicy.allowFrom", [], "at '/networkPolicy/allowFrom'"),
    ("extraArgs", ["serve"], "at '/extraArgs/0'"),
    ("podLabels", {"a": 1}, "at '/podLabels/a': got number, want string"),
    ("autoscaling.kvUsePercent", 120, "at '/autoscaling/kvUsePercent': maximum"),
    ("serviceMonitor.interval", "often", "at '/serviceMonitor/interval'"),
]


@pytest.mark.parametrize(("path", "value", "told"), REFUSED, ids=lambda each: str(each)[:40])
def test_values_outside_the_schema(path: str, value: Any, told: str) -> None:
    with pytest.raises(helm_python.HelmValuesError) as caught:
        render(nested(path, value))
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"replicaCount": 2}, "set redis.mode to bundled or external"),
        ({"autoscaling": {"enabled": True}}, "there may be 6 pods"),
        ({"autoscaling": {"enabled": True, "minReplicas": 9}, "redis": {"mode": "bundled"}}, "minReplicas (9) is over"),
        ({"auth": {"mode": "secret"}}, "set auth.secret.name"),
        ({"auth": {"secret": {"name": "a"}}}, "auth.secret.name is set, but auth.mode is generated"),
        ({"rollout": {"maxSurge": 0, "maxUnavailable": 0}}, "no pod could ever be replaced"),
        ({"rollout": {"maxSurge": "0%", "maxUnavailable": 0}}, "no pod could ever be replaced"),
        ({"fullnameOverride": "2024"}, "must start with a letter: set fullnameOverride"),
        ({"policy": {"content": "version: 1", "existingConfigMap": "x"}}, "give the policy in one place"),
        ({"backends": {"content": "version: 1", "existingConfigMap": "x"}}, "give the backends in one place"),
        ({"backends": {"content": "version: 1"}, "model": {"name": "a"}}, "model.name describes one engine"),
        ({"backends": {"existingConfigMap": "x"}, "model": {"dtype": "float32"}}, "model.dtype describes one engine"),
        ({"backends": {"content": "version: 1"}, "limits": {"kvTokens": 9}}, "limits.kvTokens describes one engine"),
        ({"redis": {"mode": "external"}}, "set redis.external.hosts, or redis.external.urlSecret.name"),
        ({"redis": {"mode": "external", "external": {"hosts": ["a", "b"]}}}, "standalone, which is one host"),
        (
            {"redis": {"mode": "external", "external": {"kind": "sentinel", "hosts": ["a"]}}},
            "set redis.external.service",
        ),
        (
            {"redis": {"mode": "external", "external": {"kind": "cluster", "hosts": ["a"], "database": 1}}},
            "which has no databases",
        ),
        (
            {"redis": {"mode": "external", "external": {"hosts": ["a"], "urlSecret": {"name": "x"}}}},
            "holds the whole URL",
        ),
        (
            {"redis": {"mode": "external", "external": {"hosts": ["a"], "tls": {"caSecret": {"name": "x"}}}}},
            "set redis.external.tls.enabled to true",
        ),
        ({"model": {"volume": {"existingClaim": "a", "hostPath": "/b"}}}, "lies in one of them"),
        ({"cache": {"type": "hostPath"}}, "set cache.hostPath"),
        ({"httpRoute": {"enabled": True}}, "needs httpRoute.parentRefs"),
    ],
)
def test_values_that_contradict_each_other(values: dict[str, Any], told: str) -> None:
    with pytest.raises(helm_python.HelmRenderError) as caught:
        render(values)
    assert told in str(caught.value)


def objects(schema: Any, at: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(schema, list):
        for index, each in enumerate(schema):
            yield from objects(each, f"{at}/{index}")
    elif isinstance(schema, dict):
        kinds = schema.get("type", [])
        if "object" in ([kinds] if isinstance(kinds, str) else kinds):
            yield at, schema
        for key, each in schema.items():
            yield from objects(each, f"{at}/{key}")


def test_the_schema_is_closed_at_every_level() -> None:
    schema = values_schema()
    jsonschema_rs.meta.validate(schema)
    found = dict(objects(schema))
    assert len(found) > 60
    # A parent chart may hand its globals down, whatever they are.
    assert found.pop("/properties/global")["description"]
    open_ones = [at for at, each in found.items() if each.get("additionalProperties", True) is True]
    assert open_ones == []
    # Maps take any key, but not any value.
    maps = [each["additionalProperties"] for each in found.values() if each["additionalProperties"] is not False]
    assert all(set(each) <= {"type", "$ref", "oneOf"} and each for each in maps)


def test_the_schema_and_the_values_name_the_same_things() -> None:
    def names(schema: Any, values: Any, at: str = "") -> None:
        assert set(schema["properties"]) - {"global"} == set(values), at or "top level"
        for name, each in schema["properties"].items():
            if "properties" in each:
                names(each, values[name], f"{at}/{name}")

    names(values_schema(), default_values())
    for path, schema, _ in settings(values_schema(), default_values()):
        assert schema.get("description"), path


# That nothing is idle.

# Another valid value where none of the guesses below is one.
OTHER = {
    "affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
    "httpRoute.parentRefs": [{"name": "other"}],
    "ingress.tls": [{"secretName": "other"}],
    "extraEnv": [{"name": "OTHER", "value": "1"}],
    "extraVolumes": [{"name": "other", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "other", "mountPath": "/other"}],
    "networkPolicy.allowFrom": [{"ipBlock": {"cidr": "10.0.0.0/8"}}],
    "networkPolicy.adminFrom": [{"ipBlock": {"cidr": "10.0.0.0/8"}}],
    "networkPolicy.extraEgress": [{"ports": [{"port": 4318}]}],
    "resources": {"limits": {"memory": "9Gi"}},
    "redis.bundled.resources": {"limits": {"memory": "9Gi"}},
    "tolerations": [{"key": "other", "operator": "Exists"}],
    "topologySpreadConstraints": [{"maxSkew": 2, "topologyKey": "t", "whenUnsatisfiable": "DoNotSchedule"}],
    "gpu.resource": "other.com/gpu",
    "image.digest": f"sha256:{'0' * 64}",
    "redis.bundled.image.digest": f"sha256:{'0' * 64}",
}
GUESSES = (
    ["https://other"],
    "http://other",
    "other",
    "/other",
    "9Gi",
    "9mb",
    "9s",
    ["other"],
    ["/other"],
    ["--other"],
    {"other": "x"},
    9,
    2,
    0.25,
    "50%",
)


def others(path: str, schema: dict[str, Any], value: Any) -> list[Any]:
    """Values that the schema takes, most of them beside ``value``."""
    if path in OTHER:
        return [OTHER[path]]
    if schema.get("type") == "boolean":
        return [not value, value]
    if "enum" in schema:
        return schema["enum"]
    allowed = jsonschema_rs.validator_for({**schema, "$defs": values_schema()["$defs"]})
    return [each for each in GUESSES if each != value and allowed.is_valid(each)]


# Redis' password and the API key are drawn anew by every rendering.
DRAWN = re.compile(r"^  (password|api-key|keys\.yaml): \S+$", re.MULTILINE)


def outcome(values: dict[str, Any]) -> str:
    try:
        return DRAWN.sub("", "".join(text for _, text in sorted(render_files(values).items())))
    except helm_python.HelmRenderError as error:
        return str(error)


def test_every_value_makes_a_difference() -> None:
    # The presets and test cases lie ready with every switch on in one of them.
    contexts = sorted(CASES.values(), key=len, reverse=True)
    before = [outcome(values) for values in contexts]
    idle = []
    for path, schema, value in settings(values_schema(), default_values()):
        candidates = others(path, dict(schema), value)
        assert candidates, f"no other value is known for {path}: extend OTHER"
        if not any(
            outcome(overlaid(values, nested(path, other))) != known
            for values, known in zip(contexts, before, strict=True)
            for other in candidates
        ):
            idle.append(path)
    assert idle == []
