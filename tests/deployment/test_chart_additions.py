"""What operators add to the chart's own: nothing comes twice, and what can't be laid together is refused by name."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from typing import Any

import helm_python
import pytest

from tests.support.chart import Document, Rendered, cases, nested, overlaid, render

CASES = cases()
WITH_LABELS = ("commonLabels", "podLabels", "serviceMonitor.labels", "prometheusRule.labels", "dashboard.labels")
WATCHED = {"serviceMonitor": {"enabled": True}, "prometheusRule": {"enabled": True}, "dashboard": {"enabled": True}}


def pod_of(rendered: Rendered) -> Document:
    return rendered.one("Deployment")["spec"]["template"]["spec"]


def containers(rendered: Rendered) -> list[Document]:
    pod = pod_of(rendered)
    return [*pod.get("initContainers", []), *pod["containers"]]


def environment(container: Document) -> dict[str, str | None]:
    return {each["name"]: each.get("value") for each in container["env"]}


def repeated(rendered: Rendered) -> list[str]:
    """Names that stand twice where Kubernetes wants them once; repeated keys are seen by
    :func:`tests.support.chart.render`."""
    lists: list[Iterable[str]] = [[each["name"] for each in pod_of(rendered)["volumes"]]]
    for container in containers(rendered):
        lists.append(each["name"] for each in container["env"])
        lists.append(each["mountPath"].rstrip("/") for each in container["volumeMounts"])
        lists.append(each.partition("=")[0] for each in container["args"] if not each.startswith("--cors-origin="))
    return [name for names in lists for name, count in Counter(names).items() if count > 1]


def refused(values: dict[str, Any]) -> str:
    with pytest.raises(helm_python.HelmRenderError) as caught:
        render(values)
    return str(caught.value)


@pytest.mark.parametrize("case", CASES)
def test_the_operators_variables_count_over_the_charts(case: str) -> None:
    before = render(CASES[case])
    names = {name for container in containers(before) for name in environment(container)} - {"OTEL_RESOURCE_ATTRIBUTES"}
    own = CASES[case].get("extraEnv", [])
    extra = [*own, *({"name": name, "value": "mine"} for name in names - {each["name"] for each in own})]
    rendered = render(overlaid(CASES[case], {"extraEnv": extra}))
    assert repeated(before) == repeated(rendered) == []
    for container in containers(rendered):
        given = environment(container)
        assert {given[each["name"]] for each in extra if "value" in each} <= {"mine", "1"}


def test_resource_attributes_are_joined() -> None:
    def attributes(*extra: Document, endpoint: str = "http://collector.obs:4318") -> Document:
        rendered = render({"telemetry": {"otlpEndpoint": endpoint}, "extraEnv": list(extra)})
        names = [each["name"] for each in rendered.gateway["env"]]
        assert names.count("OTEL_RESOURCE_ATTRIBUTES") == 1
        # $(POD_NAME) is put in only where POD_NAME stands before it.
        assert "POD_NAME" not in names or names.index("POD_NAME") < names.index("OTEL_RESOURCE_ATTRIBUTES")
        return next(each for each in rendered.gateway["env"] if each["name"] == "OTEL_RESOURCE_ATTRIBUTES")

    own = "k8s.namespace.name=llm,k8s.pod.name=$(POD_NAME)"
    added = {"name": "OTEL_RESOURCE_ATTRIBUTES", "value": "deployment.environment=prod"}
    assert attributes()["value"] == own
    assert attributes({"name": "A", "value": "b"}, added)["value"] == f"{own},deployment.environment=prod"
    assert attributes(added, {"name": "POD_NAME", "value": "p"})["value"] == f"{own},deployment.environment=prod"
    assert attributes(added, endpoint="") == added
    referred = {"name": "OTEL_RESOURCE_ATTRIBUTES", "valueFrom": {"configMapKeyRef": {"name": "a", "key": "b"}}}
    assert attributes(referred) == referred


def test_what_is_added_reaches_the_container_that_downloads() -> None:
    proxy = {"name": "HTTPS_PROXY", "value": "http://proxy.corp:3128"}
    mount = {"name": "ca", "mountPath": "/etc/ssl/corp", "readOnly": True}
    volumes = [{"name": "ca", "configMap": {"name": "corp-ca"}}]
    rendered = render({"extraEnv": [proxy], "extraVolumes": volumes, "extraVolumeMounts": [mount]})
    assert [each["name"] for each in containers(rendered)] == ["fetch-model", "gateway"]
    for container in containers(rendered):
        assert proxy in container["env"]
        assert mount in container["volumeMounts"]


@pytest.mark.parametrize("case", CASES)
def test_volumes_and_mounts_of_the_charts_own_are_refused_by_name(case: str) -> None:
    rendered = render(CASES[case])
    added = {each["name"] for each in CASES[case].get("extraVolumes", [])}
    for volume in pod_of(rendered)["volumes"]:
        if volume["name"] not in added:
            told = refused(overlaid(CASES[case], {"extraVolumes": [{"name": volume["name"], "emptyDir": {}}]}))
            assert f"extraVolumes: the chart has a volume {volume['name']} of its own" in told
    for mount in rendered.gateway["volumeMounts"]:
        if mount["name"] not in added:
            extra = {"name": "cache", "mountPath": mount["mountPath"] + "/"}
            told = refused(overlaid(CASES[case], {"extraVolumeMounts": [extra]}))
            assert f"extraVolumeMounts: the chart has a mount at {mount['mountPath']} of its own" in told


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"extraEnv": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]}, "extraEnv: there are two"),
        (
            {"extraVolumes": [{"name": "a", "emptyDir": {}}, {"name": "a", "configMap": {"name": "b"}}]},
            "extraVolumes: there are two with the name a",
        ),
        (
            {"extraVolumeMounts": [{"name": "cache", "mountPath": "/a"}, {"name": "tmp", "mountPath": "/a/"}]},
            "extraVolumeMounts: there are two with the mountPath /a",
        ),
        ({"extraVolumeMounts": [{"name": "a", "mountPath": "/a"}]}, "there is no volume a to mount at /a"),
        (
            {"podAnnotations": {"checksum/backends": "x"}, "backends": {"content": "version: 1"}},
            "podAnnotations: checksum/backends",
        ),
        ({"extraArgs": ["--insecure-no-auth"]}, "extraArgs: --insecure-no-auth follows from a value"),
        ({"auth": {"mode": "none"}, "extraArgs": ["--api-keys=/k"]}, "extraArgs: --api-keys follows from a value"),
    ],
)
def test_what_comes_twice_is_refused(values: dict[str, Any], told: str) -> None:
    assert told in refused(values)


def test_the_charts_flags_are_refused_among_further_ones() -> None:
    for each in render().gateway["args"][1:]:
        flag = each.partition("=")[0]
        assert f"extraArgs: {flag} follows from a value" in refused({"extraArgs": [f"{flag}=1"]})
    assert render({"extraArgs": ["--cors-origin=https://a"], "auth": {"corsOrigins": ["https://b"]}})


@pytest.mark.parametrize("value", WITH_LABELS)
def test_labels(value: str) -> None:
    own = render().one("Deployment")["metadata"]["labels"]
    assert len(own) >= 6
    for key in own:
        told = refused(overlaid(WATCHED, nested(value, {key: "x"})))
        assert f"{value}: {key} is a label of the chart's own" in told
    # The same label for all and for one kind: the nearer one counts.
    rendered = render(overlaid(overlaid(WATCHED, nested(value, {"team": ""})), {"commonLabels": {"team": "all"}}))
    labels = {
        "podLabels": rendered.one("Deployment")["spec"]["template"]["metadata"]["labels"],
        "serviceMonitor.labels": rendered.one("ServiceMonitor")["metadata"]["labels"],
        "prometheusRule.labels": rendered.one("PrometheusRule")["metadata"]["labels"],
        "dashboard.labels": rendered.one("ConfigMap", "-dashboard")["metadata"]["labels"],
        "commonLabels": rendered.one("Service")["metadata"]["labels"],
    }
    assert {kind: each["team"] for kind, each in labels.items() if kind != value} == dict.fromkeys(
        labels.keys() - {value}, "all"
    )
    assert value == "commonLabels" or labels[value]["team"] == ""


def test_any_additions_are_laid_together_or_refused() -> None:
    """Drawn from the chart's own names and a few others, so that most of them meet something."""
    drawn = random.Random(33)
    rendered = render(CASES["sentinel"])
    env = [*environment(rendered.gateway), "A", "B"]
    volumes = [*(each["name"] for each in pod_of(rendered)["volumes"]), "a", "b", "c"]
    paths = [*(each["mountPath"] for each in rendered.gateway["volumeMounts"]), "/a", "/b", "/c"]
    labels = [*rendered.one("Deployment")["metadata"]["labels"], "a", "b", "c"]
    outcomes = Counter[bool]()
    for _ in range(80):

        def some(names: list[str], most: int = 2) -> list[str]:
            return drawn.choices(names, k=drawn.randint(0, most), weights=[1] * (len(names) - 3) + [9] * 3)

        values = {
            "extraEnv": [{"name": name, "value": "x"} for name in some(env, 3)],
            "extraVolumes": [{"name": name, "emptyDir": {}} for name in some(volumes)],
            "podAnnotations": dict.fromkeys(some(labels), "x"),
        }
        names = [each["name"] for each in values["extraVolumes"]] or ["cache"]
        values["extraVolumeMounts"] = [{"name": drawn.choice(names), "mountPath": path} for path in some(paths)]
        for value in drawn.sample(WITH_LABELS, 2):
            values = overlaid(values, nested(value, dict.fromkeys(some(labels, 1), "x")))
        try:
            laid = render(overlaid(CASES["sentinel"], values))
        except helm_python.HelmRenderError as error:
            assert any(f"{value}: " in str(error) for value in ("extraEnv", *WITH_LABELS, *values)), error
            outcomes[False] += 1
        else:
            assert repeated(laid) == []
            outcomes[True] += 1
    assert min(outcomes[True], outcomes[False]) >= 12
