"""Names: strings that YAML would take for something else stay strings; no name is longer than Kubernetes allows."""

from __future__ import annotations

import re
from typing import Any

import kubernetes_validate
import pytest

from tests.support.chart import OLDEST, Rendered, cases, render

CASES = cases()
OWN_KINDS = {"ServiceMonitor", "PrometheusRule", "HTTPRoute"}
EVERYTHING = [
    {},
    {
        "auth": {"mode": "secret", "secret": {"name": "$", "key": "$"}},
        "tests": {"apiKeySecret": {"name": "$", "key": "$"}},
        "image": {"pullSecrets": ["$"], "repository": "$", "tag": "$"},
        "priorityClassName": "$",
        "model": {"name": "$", "heads": "$", "servedName": "$", "hubTokenSecret": {"name": "$", "key": "$"}}
        | {"volume": {"existingClaim": "$"}},
        "cache": {"type": "persistentVolumeClaim", "accessMode": "ReadWriteMany", "storageClass": "$"},
        "redis": {
            "mode": "bundled",
            "namespace": "$",
            "bundled": {
                "image": {"repository": "$", "tag": "$"},
                "passwordSecret": {"name": "$", "key": "$"},
                "persistence": {"storageClass": "$"},
            },
        },
        "gpu": {"enabled": True, "runtimeClassName": "$"},
        "serviceAccount": {"name": "$", "annotations": {"a": "$"}},
        "commonLabels": {"a": "$"},
        "podLabels": {"b": "$"},
        "podAnnotations": {"a": "$"},
        "nodeSelector": {"a": "$"},
        "ingress": {"enabled": True, "className": "$", "hosts": ["$"], "annotations": {"a": "$"}},
        "httpRoute": {"enabled": True, "parentRefs": [{"name": "$"}], "hostnames": ["$"]},
        "extraEnv": [{"name": "A", "value": "$"}],
        "service": {"annotations": {"a": "$"}},
        "serviceMonitor": {"enabled": True, "labels": {"b": "$"}},
        "prometheusRule": {"enabled": True, "labels": {"b": "$"}},
        "dashboard": {"enabled": True, "labels": {"b": "$"}},
        "policy": {"existingConfigMap": "$"},
    },
    {
        "redis": {"mode": "external", "external": {"hosts": ["$"], "username": "$", "passwordSecret": {"name": "$"}}}
        | {"namespace": "$"},
        "cache": {"type": "persistentVolumeClaim", "existingClaim": "$"},
        "backends": {"existingConfigMap": "$"},
    },
    {"redis": {"mode": "external", "external": {"urlSecret": {"name": "$", "key": "$"}}}},
]


def filled(value: Any, text: str) -> Any:
    if isinstance(value, dict):
        return {key: filled(each, text) for key, each in value.items()}
    if isinstance(value, list):
        return [filled(each, text) for each in value]
    return value.replace("$", text) if isinstance(value, str) else value


def types(value: Any) -> Any:
    """The shape of a document, without what its strings say."""
    if isinstance(value, dict):
        return {key: types(each) for key, each in value.items() if "name" not in (key, value.get("name"))}
    return [types(each) for each in value] if isinstance(value, list) else type(value).__name__


def checked(rendered: Rendered) -> None:
    for _, document in rendered.documents:
        if document["kind"] not in OWN_KINDS:
            kubernetes_validate.validate(document, OLDEST, strict=True)


@pytest.mark.parametrize("values", EVERYTHING, ids=range(len(EVERYTHING)))
@pytest.mark.parametrize("text", ["2024", "on", "1e3"])
def test_strings_that_look_like_something_else(values: dict[str, Any], text: str) -> None:
    plain = render(filled(values, "word"), name="word", namespace="word")
    rendered = render(filled(values, text), name=text, namespace=text)
    checked(rendered)
    assert [(file, types(each)) for file, each in rendered.documents] == [
        (file, types(each)) for file, each in plain.documents
    ]
    assert {each["metadata"]["namespace"] for _, each in rendered.documents} == {text}
    assert rendered.one("Deployment")["metadata"]["labels"]["app.kubernetes.io/instance"] == text


@pytest.mark.parametrize("release", ["2024", "9.a--b", "r" * 32, "r" * 47 + "---rrr", "4" * 53])
def test_every_release_has_names_that_kubernetes_takes(release: str) -> None:
    rendered = render(CASES["ha"], name=release, namespace="n")
    checked(rendered)
    for _, document in rendered.documents:
        name = document["metadata"]["name"]
        assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name)
        # The longest label made of a name: controller-revision-hash of a StatefulSet, eleven characters more.
        assert len(name) + (11 if document["kind"] == "StatefulSet" else 0) <= 63
        for label in document["metadata"]["labels"].values():
            assert re.fullmatch(r"[A-Za-z0-9]([-.\w]{0,61}[A-Za-z0-9])?", label)
