"""The Helm chart: what it renders for its presets and for a few values files that reach every template."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from base64 import b64decode
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate
import pytest
import yaml
from cloudcoil.models.prometheus_operator import v1 as operator

from backends.engine.options import EngineOptions
from gateway.auth.keyfile import parse_keys
from gateway.cli import build_parser
from gateway.commands import serve
from gateway.commands.engine_options import given_options
from gateway.http import server
from gateway.routing.backends_file import parse_backends
from gateway.serving.background import FLUSH_PATIENCE_S
from gateway.version import package_version
from policy.file.format import parse_policy
from policy.runtime import PolicyRuntime
from policy.shared.redis_client import RedisTarget, parse_redis_url
from telemetry.alerts.prometheus_rules import ABSENT, rule_file
from telemetry.catalog import BY_NAME
from telemetry.providers import TelemetrySettings
from telemetry.service import SHUTDOWN_PATIENCE_S
from tests.support.chart import (
    CHART,
    NAMESPACE,
    NEWEST,
    OLDEST,
    RELEASE,
    Document,
    Rendered,
    cases,
    overlaid,
    presets,
    render,
    render_files,
)

CASES = cases()
NOT_KUBERNETES = {"ServiceMonitor", "PrometheusRule", "HTTPRoute"}


@pytest.fixture(params=CASES)
def values(request: pytest.FixtureRequest) -> dict[str, Any]:
    return CASES[request.param]


@pytest.fixture
def rendered(request: pytest.FixtureRequest, values: dict[str, Any]) -> Rendered:
    """Shared by all tests of a case: not to be changed."""
    return rendered_case(request.node.callspec.params["values"])


@cache
def rendered_case(name: str) -> Rendered:
    return render(CASES[name])


def pod_templates(rendered: Rendered) -> Iterator[tuple[Document, Document]]:
    """Labels and spec of every pod that the chart makes."""
    for document in [*rendered.all("Deployment"), *rendered.all("StatefulSet")]:
        yield document["spec"]["template"]["metadata"]["labels"], document["spec"]["template"]["spec"]
    for document in rendered.all("Pod"):
        yield document["metadata"]["labels"], document["spec"]


def containers(rendered: Rendered) -> Iterator[Document]:
    for _, pod in pod_templates(rendered):
        yield from [*pod.get("initContainers", []), *pod["containers"]]


def chosen(selector: Document, rendered: Rendered) -> list[Document]:
    """The pods that match."""
    return [pod for labels, pod in pod_templates(rendered) if selector.items() <= labels.items()]


def served(rendered: Rendered) -> Namespace:
    """The gateway's command line, read by the gateway."""
    return build_parser(["serve"]).parse_args(rendered.gateway["args"])


# As Helm and Kubernetes see it.


def test_presets_are_those_of_the_issue() -> None:
    assert {"default", "gpu", "ha", "minimal"} <= set(presets())


def test_lint(values: dict[str, Any]) -> None:
    found = helm_python.lint(str(CHART), values, strict=True)
    assert found["errors"] == []
    assert [each for each in found["messages"] if each["severity"] > 1] == []


def test_an_installation_without_a_cluster() -> None:
    with helm_python.Config(storage_driver="memory") as config:
        release = config.install(str(CHART), RELEASE, values=CASES["ha"], namespace=NAMESPACE, dry_run="client")
    kinds = {each["kind"] for each in yaml.safe_load_all(release["manifest"])}
    assert {"Deployment", "StatefulSet", "HorizontalPodAutoscaler", "Secret"} <= kinds
    assert "Pod" not in kinds, "the test's pod is a hook"
    assert f"helm -n {NAMESPACE} test {RELEASE}" in release["notes"]


def test_a_package_renders_the_same(tmp_path: Path) -> None:
    with helm_python.Chart.load(CHART) as chart:
        archive = chart.save(tmp_path)
    assert Path(archive).name == f"medusa-gateway-{package_version()}.tgz"
    with helm_python.Chart.load(archive) as chart:
        values = {"auth": {"mode": "none"}}  # nothing that is drawn anew by every rendering
        assert chart.render(values, name=RELEASE, namespace=NAMESPACE) == render_files(values)
        assert chart.metadata["appVersion"] == package_version()


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_kubernetes_schemas(rendered: Rendered, version: str) -> None:
    checked = [document for _, document in rendered.documents if document["kind"] not in NOT_KUBERNETES]
    assert len(checked) >= 4
    for document in checked:
        kubernetes_validate.validate(document, version, strict=True)


def test_the_schemas_would_notice() -> None:
    deployment = render().one("Deployment")
    deployment["spec"]["template"]["spec"]["containers"][0]["image2"] = "x"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, OLDEST, strict=True)


def test_operator_resources() -> None:
    rendered = render(CASES["sentinel"])
    monitor = operator.ServiceMonitor.model_validate(rendered.one("ServiceMonitor"))
    assert monitor.spec is not None
    (endpoint,) = monitor.spec.endpoints
    (port,) = rendered.one("Service", "-admin")["spec"]["ports"]
    assert (endpoint.port, endpoint.path, endpoint.interval) == (port["name"], "/metrics", "15s")
    labels = rendered.one("Service", "-admin")["metadata"]["labels"]
    assert (monitor.spec.selector.match_labels or {}).items() <= labels.items()
    assert rendered.one("ServiceMonitor")["metadata"]["labels"]["release"] == "prometheus"


def test_alert_rules_are_those_that_the_gateway_prints() -> None:
    spec = PolicyRuntime.embedded().spec
    printed = {
        each["alert"]: each
        for group in rule_file(spec.alerts, runbooks=spec.runbooks)["groups"]
        for each in group["rules"]
    }
    assert len(printed) >= 5
    # Of several installations that a Prometheus scrapes, each is missed by itself.
    printed[ABSENT]["expr"] = 'absent(medusa_build_info{namespace="llm"})'
    rendered = render(CASES["sentinel"]).one("PrometheusRule")
    rule = operator.PrometheusRule.model_validate(rendered)
    assert rule.spec is not None
    assert rule.spec.groups
    shown = {each["alert"]: each for group in rendered["spec"]["groups"] for each in group["rules"]}
    assert shown == printed
    assert rendered["metadata"]["labels"]["release"] == "prometheus"
    own = render(CASES["cluster"]).one("PrometheusRule")
    assert [group["name"] for group in own["spec"]["groups"]] == ["own"]


def test_the_dashboard_is_the_gateways() -> None:
    shown = render(CASES["ha"]).one("ConfigMap", "-dashboard")
    original = (CHART.parent / "telemetry" / "assets" / "grafana-dashboard.json").read_text()
    assert shown["data"] == {"medusa-gateway.json": original}
    assert shown["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_nothing_of_an_operator_unless_asked_for() -> None:
    assert not NOT_KUBERNETES & {document["kind"] for _, document in render().documents}


def test_one_resource_a_file(rendered: Rendered) -> None:
    assert max(Counter(file for file, _ in rendered.documents).values()) == 1


def test_names_are_unique_and_every_resource_is_labelled(rendered: Rendered) -> None:
    names = Counter((each["kind"], each["metadata"]["name"]) for _, each in rendered.documents)
    assert max(names.values()) == 1
    for _, document in rendered.documents:
        metadata = document["metadata"]
        assert metadata["namespace"] == NAMESPACE
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", metadata["name"])
        assert metadata["labels"]["app.kubernetes.io/instance"] == RELEASE
        assert metadata["labels"]["app.kubernetes.io/component"] in ("gateway", "redis", "test")


def test_long_names_stay_within_what_a_label_may_hold() -> None:
    rendered = render(overlaid(CASES["ha"], {"fullnameOverride": "n" * 60, "nameOverride": "m" * 60}))
    assert max(len(each["metadata"]["name"]) for _, each in rendered.documents) <= 63
    (labels, _), *_ = pod_templates(rendered)
    assert max(map(len, labels.values())) <= 63


# Parts that must agree.


def test_selectors_choose_their_pods_and_no_others(rendered: Rendered) -> None:
    for document in [*rendered.all("Deployment"), *rendered.all("StatefulSet")]:
        (pod,) = chosen(document["spec"]["selector"]["matchLabels"], rendered)
        assert pod is document["spec"]["template"]["spec"]
        for each in pod.get("topologySpreadConstraints", []):
            assert chosen(each["labelSelector"]["matchLabels"], rendered) == [pod]
    for service in rendered.all("Service"):
        (pod,) = chosen(service["spec"]["selector"], rendered)
        ports = {port["name"] for each in pod["containers"] for port in each["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    for kind in ("PodDisruptionBudget", "NetworkPolicy"):
        for document in rendered.all(kind):
            spec = document["spec"]
            assert len(chosen((spec.get("selector") or spec["podSelector"])["matchLabels"], rendered)) == 1


def test_ports_agree(rendered: Rendered) -> None:
    gateway = rendered.gateway
    ports = {port["name"]: port["containerPort"] for port in gateway["ports"]}
    assert (served(rendered).port, served(rendered).admin_port) == (ports["http"], ports["admin"])
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert gateway[probe]["httpGet"]["port"] == "http"
    for policy in rendered.all("NetworkPolicy"):
        (pod,) = chosen(policy["spec"]["podSelector"]["matchLabels"], rendered)
        opened = [port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]]
        assert opened == [each["containerPort"] for each in pod["containers"][0]["ports"]]


def test_every_mount_has_its_volume_and_every_volume_its_mount(rendered: Rendered) -> None:
    for document in [*rendered.all("Deployment"), *rendered.all("StatefulSet")]:
        pod = document["spec"]["template"]["spec"]
        claims = {each["metadata"]["name"] for each in document["spec"].get("volumeClaimTemplates", [])}
        volumes = {each["name"] for each in pod["volumes"]} | claims
        mounts = {
            m["name"] for each in [*pod.get("initContainers", []), *pod["containers"]] for m in each["volumeMounts"]
        }
        assert mounts == volumes


def test_own_references_lead_somewhere() -> None:
    """ConfigMaps, Secrets, claims, accounts and services that carry the release's name are made by the release."""
    for values in CASES.values():
        rendered = render(values)
        made = {(each["kind"], each["metadata"]["name"]) for _, each in rendered.documents}
        for _, pod in pod_templates(rendered):
            wanted = {("ServiceAccount", pod.get("serviceAccountName", ""))}
            for volume in pod.get("volumes", []):
                wanted.add(("ConfigMap", volume.get("configMap", {}).get("name", "")))
                wanted.add(("Secret", volume.get("secret", {}).get("secretName", "")))
                wanted.add(("PersistentVolumeClaim", volume.get("persistentVolumeClaim", {}).get("claimName", "")))
            for container in pod["containers"]:
                for variable in container.get("env", []):
                    wanted.add(("Secret", variable.get("valueFrom", {}).get("secretKeyRef", {}).get("name", "")))
            assert {each for each in wanted if RELEASE in each[1]} <= made
        for file, document in rendered.documents:
            if file in ("ingress.yaml", "httproute.yaml", "hpa.yaml"):
                kind = "Deployment" if file == "hpa.yaml" else "Service"
                assert (kind, rendered.one(kind)["metadata"]["name"]) in made
                assert rendered.one(kind)["metadata"]["name"] in json.dumps(document["spec"])


def test_the_pods_grace_covers_the_whole_drain(rendered: Rendered) -> None:
    pod = rendered.one("Deployment")["spec"]["template"]["spec"]
    pause = int(rendered.gateway.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["", "0"])[1])
    needed = pause + served(rendered).drain_timeout + server.UNWIND_S + FLUSH_PATIENCE_S + SHUTDOWN_PATIENCE_S
    assert needed + 5 <= pod["terminationGracePeriodSeconds"] <= needed + 10
    for scaler in rendered.all("HorizontalPodAutoscaler"):
        # The API's own limit.
        assert scaler["spec"]["behavior"]["scaleDown"]["policies"][0]["periodSeconds"] <= 1800


def test_a_long_drain_stays_within_the_autoscalers_limits() -> None:
    rendered = render(overlaid(CASES["ha"], {"drain": {"timeoutSeconds": 7200}}))
    (scaler,) = rendered.all("HorizontalPodAutoscaler")
    assert scaler["spec"]["behavior"]["scaleDown"]["policies"][0]["periodSeconds"] == 1800


# As the gateway sees it.


def test_the_gateway_takes_its_flags(rendered: Rendered) -> None:
    args = served(rendered)
    assert args.run is serve.run
    assert args.policy == "/etc/medusa-gateway/policy/policy.yaml"
    pod = rendered.one("Deployment")["spec"]["template"]["spec"]
    for init in pod.get("initContainers", []):
        fetched = build_parser(["fetch"]).parse_args(init["args"])
        assert (fetched.model, fetched.heads, fetched.backends) == (args.model, args.heads, args.backends)


def test_values_arrive_as_flags() -> None:
    args = served(render(CASES["sentinel"]))
    assert (args.model, args.heads, args.served_model_name) == ("acme/model", "acme/heads", 'acme: "one"')
    assert (args.dtype, args.device, args.max_model_len, args.kv_tokens) == ("float32", "cpu", 8192, 100_000)
    assert (args.max_running, args.max_queue, args.deadline, args.drain_timeout) == (16, 0, 2.5, 0.5)
    assert (args.max_body_bytes, args.default_max_tokens, args.access_log) == (4 * 1024 * 1024, 1024, True)
    own = build_parser(["serve"]).parse_args(["serve"])
    default = served(render())
    for name in ("max_queue", "default_max_tokens", "max_body_bytes", "dtype", "model", "heads", "max_running"):
        assert getattr(default, name) == getattr(own, name), "the chart's default is the gateway's"


def test_telemetry_goes_where_it_is_asked_for() -> None:
    environment = {each["name"]: each.get("value", "") for each in render(CASES["sentinel"]).gateway["env"]}
    assert TelemetrySettings.from_environment(environment) == TelemetrySettings(traces="grpc", metrics="grpc")
    assert environment["OTEL_RESOURCE_ATTRIBUTES"] == f"k8s.namespace.name={NAMESPACE},k8s.pod.name=$(POD_NAME)"
    args = served(render(CASES["sentinel"]))
    assert (args.log_format, args.log_level, args.log_content) == ("json", "info", False)
    environment = {each["name"]: each.get("value", "") for each in render().gateway["env"]}
    assert TelemetrySettings.from_environment(environment) == TelemetrySettings()


def test_the_policy_loads(rendered: Rendered, values: dict[str, Any], tmp_path: Path) -> None:
    (mount,) = [each for each in rendered.gateway["volumeMounts"] if each["name"] == "policy"]
    assert "subPath" not in mount, "which would keep edits from a running pod"
    file = Path(served(rendered).policy)
    assert str(file.parent) == mount["mountPath"]
    if values.get("policy", {}).get("existingConfigMap"):
        assert not [each for each in rendered.all("ConfigMap") if each["metadata"]["name"].endswith("-policy")]
        return
    data = rendered.one("ConfigMap", "-policy")["data"]
    (tmp_path / file.name).write_text(data[file.name])
    runtime = PolicyRuntime.open(tmp_path / file.name)
    assert runtime.spec.version.startswith("1-")
    if content := values.get("policy", {}).get("content"):
        assert data[file.name].rstrip() == content.rstrip()
    else:
        assert parse_policy(data[file.name].encode(), "p").settings == PolicyRuntime.embedded().spec.settings


def test_an_edited_policy_restarts_nothing() -> None:
    before = render().one("Deployment")
    after = render({"policy": {"content": "version: 1\ndefaults: {heads: 2}\n"}}).one("Deployment")
    assert before == after


def test_the_backends_load(tmp_path: Path) -> None:
    rendered = render(CASES["backends"])
    args = served(rendered)
    content = rendered.one("ConfigMap", "-backends")["data"]["backends.yaml"].encode()
    spec = parse_backends(content, args.backends)
    assert [each.name for each in spec.backends] == ["small", "big", "far"]
    # Flags that describe one engine are refused beside a backends file.
    assert given_options(args) == EngineOptions()
    for case in ("backends", "own-backends"):
        (mount,) = [each for each in render(CASES[case]).gateway["volumeMounts"] if each["name"] == "backends"]
        assert str(Path(args.backends).parent) == mount["mountPath"]
    # Unlike the policy, it is read once: an edit must roll the pods.
    values = overlaid(CASES["backends"], {"backends": {"content": content.decode() + "# edited\n"}})
    before, after = (each.one("Deployment")["spec"]["template"]["metadata"] for each in (rendered, render(values)))
    assert before["annotations"] != after["annotations"]
    assert before["annotations"]["note"] == "yes"


REDIS = {
    "default": None,
    "minimal": "memory",
    "ha": RedisTarget("standalone", tls=False, hosts=(("demo-medusa-gateway-redis", 6379),)),
    "cluster": RedisTarget("cluster", tls=False, hosts=(("a", 7000), ("b", 7001), ("fd00::1", 7002))),
    "sentinel": RedisTarget(
        "sentinel",
        tls=True,
        hosts=(("sentinel-0.redis", 26379), ("sentinel-1.redis", 26380)),
        username="gate way",
        db=3,
        service="main",
        namespace="blue",
        options=(("ssl_ca_certs", "/etc/medusa-gateway/redis-ca/root.pem"),),
    ),
}


@pytest.mark.parametrize("name", REDIS)
def test_the_redis_url(name: str) -> None:
    gateway = render(CASES[name]).gateway
    url = {each["name"]: each.get("value") for each in gateway["env"]}.get("MEDUSA_REDIS_URL")
    assert (url if url in (None, "memory") else parse_redis_url(url)) == REDIS[name]
    if name == "sentinel":
        (mount,) = [each for each in gateway["volumeMounts"] if each["name"] == "redis-ca"]
        assert "/etc/medusa-gateway/redis-ca/root.pem".startswith(mount["mountPath"])


def test_the_redis_that_replicas_use_may_be_reached() -> None:
    for name, ports in {"sentinel": ["26379", "26380", "6379"], "cluster": ["6379", "7000", "7001", "7002"]}.items():
        egress = render(CASES[name]).one("NetworkPolicy")["spec"]["egress"]
        opened = [str(port["port"]) for rule in egress if "to" not in rule for port in rule["ports"]]
        assert set(ports) <= set(opened), name


def test_scaling_asks_for_metrics_that_exist() -> None:
    (scaler,) = render(CASES["cluster"]).all("HorizontalPodAutoscaler")
    metrics = {each["pods"]["metric"]["name"]: each["pods"]["target"] for each in scaler["spec"]["metrics"]}
    assert metrics["medusa_queue_depth"]["averageValue"] == "2.5"
    assert metrics["medusa_kv_use_ratio"]["averageValue"] == "750m"
    docs = (CHART.parent / "docs" / "kubernetes.md").read_text()
    for name in ("medusa_queue_depth", "medusa_running_sequences", "medusa_kv_use_ratio"):
        assert name in BY_NAME
        assert name in docs
    (scaler,) = render(CASES["url"]).all("HorizontalPodAutoscaler")
    assert [each["type"] for each in scaler["spec"]["metrics"]] == ["Resource"]
    assert "replicas" not in render(CASES["url"]).one("Deployment")["spec"]


def test_a_gpu() -> None:
    rendered = render(CASES["cluster"])
    pod = next(pod for labels, pod in pod_templates(rendered))
    assert pod["containers"][0]["resources"]["limits"] == {"amd.com/gpu": 2, "memory": "4Gi"}
    assert {"key": "amd.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod["tolerations"]
    assert pod["runtimeClassName"] == "nvidia"
    assert served(rendered).device == "cuda"
    assert "initContainers" not in pod
    rendered = render(CASES["gpu"])
    assert rendered.gateway["image"].endswith("-cuda")
    assert all(each["name"] != "OMP_NUM_THREADS" for each in rendered.gateway["env"])


# Security.


def test_pods_meet_the_restricted_standard(rendered: Rendered) -> None:
    for _, pod in pod_templates(rendered):
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        assert pod["securityContext"].get("runAsUser", 1) > 0
    for container in containers(rendered):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container["resources"]["requests"]["memory"]


def test_what_is_written_lies_on_volumes(rendered: Rendered) -> None:
    """With a read-only root, homes, caches and temporary files need a place."""
    pod = rendered.one("Deployment")["spec"]["template"]["spec"]
    for container in [*pod.get("initContainers", []), *pod["containers"]]:
        writable = {each["mountPath"] for each in container["volumeMounts"] if not each.get("readOnly")}
        assert {"/tmp", "/cache"} <= writable
        folders = [
            each["value"] for each in container["env"] if each["name"] in ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME")
        ]
        assert len(folders) == 3
        assert all(folder.startswith("/cache") for folder in folders)


def test_secrets_come_by_reference(rendered: Rendered) -> None:
    for container in containers(rendered):
        for variable in container.get("env", []):
            if re.search(r"PASSWORD|TOKEN|KEY|SECRET", variable["name"]):
                assert set(variable) == {"name", "valueFrom"}
                assert "secretKeyRef" in variable["valueFrom"]
            assert "@" not in variable.get("value", "").partition(":")[2].replace("gate%20way@", "")
    passwords = [value for each in rendered.all("Secret") for value in each["data"].values()]
    rest = "\n".join(json.dumps(each) for _, each in rendered.documents if each["kind"] != "Secret")
    assert all(password not in rest for password in passwords)


def test_only_the_init_container_has_the_hubs_token() -> None:
    pod = render(CASES["gpu"]).one("Deployment")["spec"]["template"]["spec"]
    assert "HF_TOKEN" in json.dumps(pod["initContainers"])
    assert "HF_TOKEN" not in json.dumps(pod["containers"])
    assert {"name": "HF_HUB_OFFLINE", "value": "1"} in pod["containers"][0]["env"]


def test_neither_admin_nor_metrics_leave_the_cluster() -> None:
    rendered = render(CASES["sentinel"])
    (rule,) = rendered.one("Ingress")["spec"]["rules"]
    assert [each["path"] for each in rule["http"]["paths"]] == ["/v1"]
    (rule,) = rendered.one("HTTPRoute")["spec"]["rules"]
    assert rule["matches"] == [{"path": {"type": "PathPrefix", "value": "/v1"}}]
    assert rule["timeouts"] == {"request": "0s"}, "a stream may take its time"
    (port,) = rendered.one("Service")["spec"]["ports"]
    assert rule["backendRefs"] == [{"name": "demo-medusa-gateway", "port": port["port"]}]


def test_the_administrators_port_has_a_service_of_its_own() -> None:
    """One that stays inside the cluster, whatever the type of the other."""
    rendered = render(CASES["url"])
    assert rendered.one("Service")["spec"]["type"] == "LoadBalancer"
    assert [port["name"] for port in rendered.one("Service")["spec"]["ports"]] == ["http"]
    assert "type" not in rendered.one("Service", "-admin")["spec"]
    ingress = render(CASES["ha"]).one("NetworkPolicy")["spec"]["ingress"]
    rules = {rule["ports"][0]["port"]: rule["from"] for rule in ingress}
    assert "monitoring" in json.dumps(rules[8081])
    assert "monitoring" not in json.dumps(rules[8080])


def test_the_generated_key_is_in_the_key_file() -> None:
    rendered = render()
    data = {name: b64decode(value) for name, value in rendered.one("Secret", "-api-keys")["data"].items()}
    key = parse_keys(data["keys.yaml"], "keys.yaml").find(data["api-key"].decode())
    assert key is not None
    assert (key.name, key.scopes, key.disabled) == ("initial", {"inference", "admin"}, False)
    assert data["api-key"] != b64decode(render().one("Secret", "-api-keys")["data"]["api-key"])
    # The gateway gets the digests; the check of `helm test` the key.
    pod = rendered.one("Deployment")["spec"]["template"]["spec"]
    (volume,) = [each["secret"] for each in pod["volumes"] if each["name"] == "keys"]
    assert [each["path"] for each in volume["items"]] == [Path(served(rendered).api_keys).name]
    (test,) = rendered.all("Pod")
    (variable,) = test["spec"]["containers"][0]["env"]
    assert variable["valueFrom"]["secretKeyRef"] == {"name": volume["secretName"], "key": "api-key"}


def test_whoever_may_ask_is_told_to_the_gateway() -> None:
    default = served(render())
    (mount,) = [each for each in render().gateway["volumeMounts"] if each["name"] == "keys"]
    assert (default.api_keys, default.insecure_no_auth) == (f"{mount['mountPath']}/keys.yaml", False)
    assert "subPath" not in mount, "which would keep edits from a running pod"
    own = served(render(CASES["bundled"]))
    assert (own.api_keys, own.insecure_no_auth) == ("/etc/medusa-gateway/keys/team.yaml", False)
    nobody = served(render(CASES["url"]))
    assert (nobody.api_keys, nobody.insecure_no_auth) == (None, True)
    assert served(render(CASES["sentinel"])).cors_origin == ["https://chat.example.com"]


def test_the_password_of_the_bundled_redis() -> None:
    first, second = (render(CASES["ha"]).one("Secret", "-redis")["data"]["password"] for _ in range(2))
    assert first != second, "drawn anew for every release"
    assert len(first) >= 54
    assert render(CASES["bundled"]).all("Secret") == []
