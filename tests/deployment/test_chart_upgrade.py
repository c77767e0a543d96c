"""``helm upgrade`` from the chart as it was: no field that Kubernetes never changes is another one now.

``tests/data/chart/immutable.json`` holds those fields by preset, as the version named in it rendered them. It is not
to be written anew for a change of the chart: what fails here would fail for everybody who upgrades.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.chart import Rendered, overlaid, presets, render
from tests.support.paths import ROOT

KEPT = json.loads((ROOT / "tests" / "data" / "chart" / "immutable.json").read_text())
IMMUTABLE = {
    "Deployment": ("selector",),
    "StatefulSet": ("selector", "serviceName", "podManagementPolicy", "volumeClaimTemplates"),
    "PersistentVolumeClaim": ("accessModes", "storageClassName", "volumeMode", "volumeName", "selector"),
    "Service": ("clusterIP", "selector", "type"),
}
"""Fields of ``spec``. A claim's size may grow. Of a Service the type and selector may change, but pods of both versions
are to be found while one replaces the other."""


def immutable(rendered: Rendered) -> dict[str, Any]:
    """By kind and name: what an upgrade can't change, and the names of what would be lost if they changed."""
    found: dict[str, Any] = {}
    for _, document in rendered.documents:
        kind, name = document["kind"], document["metadata"]["name"]
        if kind in IMMUTABLE:
            fields = {field: document["spec"].get(field) for field in IMMUTABLE[kind]}
            for claim in fields.get("volumeClaimTemplates") or ():
                claim["metadata"].pop("labels", None)  # compared by the API server, but none may name a version
            found[f"{kind}/{name}"] = fields
        elif kind == "Secret":
            found[f"{kind}/{name}"] = {"type": document.get("type"), "keys": sorted(document["data"])}
    return found


@pytest.mark.parametrize("preset", sorted(KEPT["presets"]))
def test_an_upgrade_changes_no_field_that_can_not_change(preset: str) -> None:
    assert immutable(render(presets()[preset])) == KEPT["presets"][preset]


def test_labels_of_claims_name_no_version() -> None:
    """A StatefulSet's templates can't change, so a label with the chart's version would end all upgrades."""
    bundled = render(presets()["ha"])
    for template in bundled.one("StatefulSet", "-redis")["spec"]["volumeClaimTemplates"]:
        labels = template["metadata"].get("labels", {})
        assert not {"helm.sh/chart", "app.kubernetes.io/version"} & set(labels)


@pytest.mark.parametrize("preset", sorted(presets()))
def test_argo_cd_can_own_it(preset: str) -> None:
    """It renders without a cluster, again and again: with Secrets named by the operator nothing is drawn at random."""
    own = {
        "auth": {"mode": "secret", "secret": {"name": "team-keys"}},
        "redis": {"bundled": {"passwordSecret": {"name": "redis-password"}}},
    }
    values = overlaid(presets()[preset], own)
    first, second = render(values), render(values)
    assert first.documents == second.documents
    assert first.all("Secret") == []


@pytest.mark.parametrize("preset", sorted(presets()))
def test_openshift_may_choose_every_user(preset: str) -> None:
    """Its restricted constraints refuse ids outside the namespace's range, and root; with nulls none is asked for."""
    nobody = {"runAsUser": None, "runAsGroup": None, "fsGroup": None}
    values = overlaid(
        presets()[preset], {"podSecurityContext": nobody, "redis": {"bundled": {"podSecurityContext": nobody}}}
    )
    rendered = render(values)
    pods = [each["spec"]["template"]["spec"] for kind in ("Deployment", "StatefulSet") for each in rendered.all(kind)]
    assert pods
    for pod in pods:
        context = pod["securityContext"]
        assert not {"runAsUser", "runAsGroup", "fsGroup"} & set(context)
        assert context["runAsNonRoot"] is True
        for container in (*pod["containers"], *pod.get("initContainers", ())):
            assert "runAsUser" not in container["securityContext"]
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_two_node_pools() -> None:
    """Gateways on GPU nodes with a taint of their own, Redis on the others."""
    values = overlaid(
        presets()["ha"],
        {
            "gpu": {"enabled": True},
            "nodeSelector": {"pool": "gpu"},
            "tolerations": [{"key": "pool", "value": "gpu", "effect": "NoSchedule"}],
        },
    )
    rendered = render(values)
    gateway = rendered.one("Deployment")["spec"]["template"]["spec"]
    redis = rendered.one("StatefulSet", "-redis")["spec"]["template"]["spec"]
    assert gateway["nodeSelector"] == {"pool": "gpu"}
    assert {"key": "pool", "value": "gpu", "effect": "NoSchedule"} in gateway["tolerations"]
    assert "nodeSelector" not in redis, "a GPU node is not for it"
    assert "tolerations" not in redis
