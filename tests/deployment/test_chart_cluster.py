"""The chart in a cluster: volumes that one pod may mount, rollouts that are given up, blocked ports, taints."""

from __future__ import annotations

from typing import Any

import helm_python
import pytest

from tests.support.chart import Document, Rendered, cases, default_values, nested, overlaid, render

CASES = cases()
CLAIM = {"cache": {"type": "persistentVolumeClaim"}}
UNITS = {"mb": 2**20, "gb": 2**30, "Mi": 2**20, "Gi": 2**30}


def rollout(rendered: Rendered) -> tuple[Any, Any]:
    strategy = rendered.one("Deployment")["spec"]["strategy"]
    assert strategy["type"] == "RollingUpdate"
    return strategy["rollingUpdate"]["maxSurge"], strategy["rollingUpdate"]["maxUnavailable"]


def let_out(rendered: Rendered) -> set[int]:
    """TCP ports that the gateway's pods may reach anywhere, but DNS."""
    egress = rendered.one("NetworkPolicy")["spec"]["egress"]
    ports = {port["port"] for rule in egress if "to" not in rule for port in rule["ports"] if port["protocol"] == "TCP"}
    assert {53, 5353} <= ports, "OpenShift's DNS is on 5353"
    return ports - {53, 5353}


# Rollouts.


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ({}, (1, 0)),
        (CLAIM, (0, 1)),
        (overlaid(CLAIM, {"replicaCount": 3, "redis": {"mode": "memory"}}), (0, 1)),
        (overlaid(CLAIM, {"cache": {"accessMode": "ReadWriteOncePod"}}), (0, 1)),
        (overlaid(CLAIM, {"cache": {"accessMode": "ReadWriteMany"}}), (1, 0)),
        (overlaid(CLAIM, {"cache": {"existingClaim": "mine"}}), (0, 1)),
        (overlaid(CLAIM, {"cache": {"existingClaim": "mine", "accessMode": "ReadWriteMany"}}), (1, 0)),
        (overlaid(CLAIM, {"rollout": {"maxSurge": 2}}), (2, 0)),
        ({"rollout": {"maxSurge": 0}}, (0, 1)),
        ({"rollout": {"maxSurge": "50%", "maxUnavailable": "25%"}}, ("50%", "25%")),
        (CASES["gpu"], (0, 1)),
    ],
)
def test_a_rollout_does_not_wait_for_a_volume_that_the_old_pod_has(values: dict[str, Any], wanted: Any) -> None:
    assert rollout(render(values)) == wanted


def test_the_notes_say_what_a_claim_means_for_upgrades() -> None:
    assert "cache.accessMode" not in render().notes
    assert "ends the old pod before it starts the new one" in render(CLAIM).notes
    assert "ReadWriteOncePod: one pod" in render(overlaid(CLAIM, {"cache": {"accessMode": "ReadWriteOncePod"}})).notes
    assert "waits for ever" in render(overlaid(CLAIM, {"rollout": {"maxSurge": 1}})).notes
    several = {"replicaCount": 3, "redis": {"mode": "memory"}}
    assert "There may be 3 pods, which must all run on that node" in render(overlaid(CLAIM, several)).notes
    assert "must let several nodes mount it" in render({"model": {"volume": {"existingClaim": "models"}}}).notes


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"replicaCount": 2, "redis": {"mode": "memory"}}, "there may be 2 pods"),
        ({"autoscaling": {"enabled": True}, "redis": {"mode": "memory"}}, "there may be 6 pods"),
        ({"rollout": {"maxSurge": 1}}, "set rollout.maxSurge to 0"),
    ],
)
def test_a_volume_of_one_pod_is_refused_where_there_would_be_two(values: dict[str, Any], told: str) -> None:
    claim = {"cache": {"type": "persistentVolumeClaim", "accessMode": "ReadWriteOncePod"}}
    with pytest.raises(helm_python.HelmRenderError, match=told):
        render(overlaid(claim, values))


@pytest.mark.parametrize("case", CASES)
def test_a_start_within_the_probes_patience_is_no_failed_rollout(case: str) -> None:
    rendered = render(CASES[case])
    spec = rendered.one("Deployment")["spec"]
    pod = spec["template"]["spec"]
    (gateway,) = pod["containers"]
    patience = gateway["startupProbe"]["periodSeconds"] * gateway["startupProbe"]["failureThreshold"]
    fetch = default_values()["model"]["fetchSeconds"] if pod.get("initContainers") else 0
    assert spec["progressDeadlineSeconds"] > patience + fetch + pod["terminationGracePeriodSeconds"]
    assert f"--timeout={spec['progressDeadlineSeconds']}s" in rendered.notes
    longer = render(overlaid(CASES[case], {"model": {"fetchSeconds": 7200}})).one("Deployment")["spec"]
    assert longer["progressDeadlineSeconds"] - spec["progressDeadlineSeconds"] == (5400 if fetch else 0)


def test_an_upstream_that_is_away_restarts_nothing() -> None:
    """/readyz is 503 without a required upstream; only readiness may ask it. /healthz is 200 while the model is loaded:
    a load that hangs is for the startup probe to find."""
    gateway = render(CASES["backends"]).gateway
    paths = {kind: gateway[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness", "readiness")}
    assert paths == {"startup": "/startupz", "liveness": "/healthz", "readiness": "/readyz"}


# Ports.


@pytest.mark.parametrize(
    ("values", "ports"),
    [
        ({}, set()),
        ({"telemetry": {"otlpEndpoint": "http://collector.obs:4318"}}, {4318}),
        ({"telemetry": {"otlpEndpoint": "https://collector.obs/v1"}}, {443}),
        ({"telemetry": {"otlpEndpoint": "http://collector.obs"}}, {80}),
        ({"telemetry": {"otlpEndpoint": "http://collector.obs", "otlpProtocol": "grpc"}}, {80, 443}),
        ({"telemetry": {"otlpEndpoint": "http://[fd00::1]:4317", "otlpProtocol": "grpc"}}, {4317}),
        ({"extraEnv": [{"name": "HTTPS_PROXY", "value": "http://me:pw:1@proxy.corp:3128/"}]}, {3128}),
        ({"extraEnv": [{"name": "CHAT_URL", "value": "https://chat.example.com:8443/hook?x=:1#:2"}]}, {8443}),
        ({"extraEnv": [{"name": "A", "value": "1"}, {"name": "B"}, {"name": "C", "value": "http:// no"}]}, set()),
        ({"model": {"name": "acme/model"}}, {443}),
        (
            nested(
                "backends.content",
                'version: 1\nbackends:\n  - {name: a, kind: openai, url: "http://vllm.llm:8000/v1"}\n'
                "  - {name: b, kind: openai, url: http://10.0.0.1/v1}\n  - {name: c, kind: engine}\n",
            ),
            {443, 8000, 80},
        ),
        (
            nested(
                "policy.content",
                "version: 1\nreceivers:\n  chat: {kind: webhook, url: 'http://chat.ops:9000/x'}\n"
                "  am: {kind: alertmanager, url: 'http://alertmanager.obs:9093'}\n  third: {url_env: X}\n",
            ),
            {9000, 9093},
        ),
        (nested("backends.content", "backends: {a: b}"), {443}),
        (nested("backends.content", "backends: [a, {url: 1}, null]"), {443}),
        (nested("policy.content", "{{ not: [yaml"), set()),
        ({"redis": {"mode": "external", "external": {"urlSecret": {"name": "r"}}}}, {6379, 26379}),
    ],
)
def test_what_the_values_name_may_be_reached(values: dict[str, Any], ports: set[int]) -> None:
    rendered = render(values)
    assert let_out(rendered) == ports
    said = rendered.notes.partition("It lets them out to DNS")[2].partition(".\n")[0]
    assert all(str(port) in said for port in ports)
    assert ports or said.endswith("nothing else")


def test_the_notes_name_what_the_values_do_not_tell() -> None:
    def notes(values: dict[str, Any]) -> str:
        return render(values).notes

    assert "networkPolicy.extraEgress" in notes({})
    assert "the upstreams of far-away" in notes({"backends": {"existingConfigMap": "far-away"}})
    assert "the receivers of own-policy" in notes(CASES["cluster"])
    assert "Redis, if the URL in the Secret redis-url" in notes(CASES["url"])
    assert "what FAR_KEY of extraEnv name" in notes(CASES["backends"])
    assert "networkPolicy" not in notes(CASES["minimal"])


# Nodes.


def tolerated(rendered: Rendered) -> list[Document]:
    return rendered.one("Deployment")["spec"]["template"]["spec"]["tolerations"]


@pytest.mark.parametrize(
    ("resource", "taints"),
    [
        ("nvidia.com/gpu", ["nvidia.com/gpu"]),
        ("nvidia.com/mig-1g.10gb", ["nvidia.com/mig-1g.10gb", "nvidia.com/gpu"]),
        ("nvidia.com/gpu.shared", ["nvidia.com/gpu.shared", "nvidia.com/gpu"]),
        ("amd.com/gpu", ["amd.com/gpu"]),
    ],
)
def test_the_taint_of_gpu_nodes_is_tolerated(resource: str, taints: list[str]) -> None:
    found = tolerated(render({"gpu": {"enabled": True, "resource": resource}}))
    assert found == [{"key": key, "operator": "Exists", "effect": "NoSchedule"} for key in taints]


def test_ids_can_be_left_to_the_cluster() -> None:
    """OpenShift draws them itself and refuses others."""
    none = dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"))
    values = {"redis": {"mode": "bundled", "bundled": {"podSecurityContext": none}}, "podSecurityContext": none}
    rendered = render(values)
    for document in [rendered.one("Deployment"), rendered.one("StatefulSet", "-redis")]:
        assert not set(document["spec"]["template"]["spec"]["securityContext"]) & set(none)


# The bundled Redis.


def test_the_bundled_redis_holds_what_it_is_given() -> None:
    """No limit is evicted, and the container has room for the copy that rewriting its file takes."""
    rendered = render(CASES["ha"])
    settings = rendered.one("ConfigMap", "-redis")["data"]["redis.conf"]
    assert "maxmemory-policy volatile-ttl" in settings
    (line,) = [line for line in settings.splitlines() if line.startswith("maxmemory ")]
    (container,) = rendered.one("StatefulSet", "-redis")["spec"]["template"]["spec"]["containers"]

    def size(text: str) -> int:
        return int(text[:-2]) * UNITS[text[-2:]]

    assert size(container["resources"]["limits"]["memory"]) > 2 * size(line.split()[1])


# Who may ask.


def test_no_preset_is_open() -> None:
    for name in ("default", "minimal", "gpu", "ha"):
        rendered = render(CASES[name])
        assert "--insecure-no-auth" not in rendered.gateway["args"]
        assert [each for each in rendered.gateway["args"] if each.startswith("--api-keys=")]
        assert "auth.mode is none" not in rendered.notes
    rendered = render({"auth": {"mode": "none"}})
    assert "--insecure-no-auth" in rendered.gateway["args"]
    assert "auth.mode is none: everybody" in rendered.notes
