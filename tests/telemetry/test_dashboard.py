"""The Grafana dashboard: every query returns series from a real Prometheus that scrapes a real gateway process."""

from __future__ import annotations

import json
import re
import threading
from importlib import resources
from pathlib import Path
from typing import Any

import httpx
import pytest

from backends.heads.format import backbone_fingerprint, save_heads
from backends.models.tiny import tiny_heads, tiny_model, tiny_tokenizer
from telemetry.catalog import METRICS
from tests.drills.demo_alert import serving
from tests.support.debian import binary
from tests.support.prometheus_server import running_prometheus
from tests.support.valkey import ValkeyProcess

DASHBOARD: dict[str, Any] = json.loads(
    resources.files("telemetry").joinpath("assets/grafana-dashboard.json").read_text()
)
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]
# A tree of its own, so that there are drafts whatever the random heads say, and a rejected edit can be counted as 0.
POLICY = """
version: 1
cost: {per_gpu_hour: 2.5}
defaults: {tree: 2x1, fallback: {window: 1s}}
alerts: [{name: slow, metric: speculative_speedup_factor, below: 1}]
"""


BACKENDS = """
version: 1
backends:
  - {{name: here, kind: engine, model: {model}, heads: {heads}, serves: tiny, dtype: float32, max_model_len: 256}}
  - {{name: there, kind: openai, serves: elsewhere, url: "http://127.0.0.1:9/v1"}}
"""


def filled_in(query: str, namespace: str = "production") -> str:
    for name, value in {"namespace": namespace, "pod": ".*", "model": ".*", "class": ".*"}.items():
        query = query.replace(f"${name}", value)
    return query.replace("$__rate_interval", "10s")


@pytest.fixture
def tiny_folder(tmp_path: Path) -> Path:
    """The tiny model and its heads as anybody's model would lie on a disk."""
    model, folder = tiny_model(), tmp_path / "tiny"
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    backbone = {
        "hidden_size": model.config.hidden_size,
        "vocab_size": model.config.vocab_size,
        "fingerprint": backbone_fingerprint(model),
    }
    save_heads(tiny_heads(), tmp_path / "heads", config={"backbone": backbone})
    return folder


def test_the_dashboard_shows_what_it_should() -> None:
    shown = " ".join(QUERIES)
    for name in (
        *("speculative_acceptance_rate", "speculative_speedup_factor", "medusa_head_accuracy", "medusa_alert_state"),
        *("speculative_emitted_tokens_total", "gen_ai_server_time_to_first_token", "speculative_fallback_count_total"),
        *("medusa_backend_up", "medusa_backend_requests_total", "medusa_requests_total", "error_type", "0.99"),
        *("medusa_cost_saved", "currency", "medusa_vanilla_time_seconds_total"),
        *("medusa_queue_wait_seconds", "medusa_event_loop_lag_seconds", 'outcome="limited"', "tenant"),
    ):
        assert name in shown
    exported = {metric.prometheus for metric in METRICS}
    named = {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"\b[a-z_]+(?=\{)", shown)}
    libraries = {"process_resident_memory_bytes", "process_cpu_seconds_total"}
    assert named - exported <= {"speculative_fallback", *libraries}, "all are in the catalogue"
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_every_query_asks_of_one_namespace_and_pod() -> None:
    for query in QUERIES:
        series = re.findall(r"\b(?:medusa|speculative|gen_ai|process)_[a-z_]+(?=[{\[) ]|$)", query)
        series = [name for name in series if name not in ("gen_ai_request_model",)]
        assert query.count('namespace=~"$namespace", pod=~"$pod"') == len(series), query


def test_panels_are_as_grafana_takes_them() -> None:
    """Structure by Grafana's own dashboards of this schema version; panels don't lie on each other."""
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        assert {"id", "type", "title", "gridPos"} <= panel.keys()
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
        if panel["type"] == "row":
            continue
        assert panel["description"], panel["title"]
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs), panel["title"]
        assert all(
            target["legendFormat"] and target["datasource"] == panel["datasource"] for target in panel["targets"]
        )
    names = [variable["name"] for variable in DASHBOARD["templating"]["list"]]
    assert names == ["datasource", "namespace", "pod", "model", "class"]


def trouble(gateway: str, stop: threading.Event) -> None:
    """What other panels need beside good answers: streams, and clients' mistakes."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 12, "stream": True}
    with httpx.Client(base_url=gateway, trust_env=False, timeout=60.0) as client:
        while not stop.wait(0.1):
            client.post("/v1/chat/completions", json=body)
            client.post("/v1/chat/completions", json={**body, "max_tokens": "many"})


def test_every_query_returns_series_of_one_of_two_installations(tmp_path: Path, tiny_folder: Path) -> None:
    binary("prometheus")
    policy, server = tmp_path / "policy.yaml", ValkeyProcess(tmp_path).start()
    policy.write_text(POLICY)
    backends = tmp_path / "backends.yaml"
    backends.write_text(BACKENDS.format(model=tiny_folder, heads=tmp_path / "heads"))
    arguments = ["--backends", str(backends), "--policy", str(policy), "--redis-url", server.url]
    # The same gateway as that of two installations: what a query adds up must be of one of them.
    places = {"production": "pod-a", "staging": "pod-b"}
    stop = threading.Event()
    try:
        with (
            serving(*arguments, log=tmp_path / "gateway.log") as gateway,
            running_prometheus(tmp_path, gateway.url, namespaces=places) as prometheus,
        ):
            asking = threading.Thread(target=trouble, args=(gateway.url, stop), daemon=True)
            asking.start()
            for query in QUERIES:
                if "medusa_device_" in query:
                    # A CPU tells nothing; that the names are exported is test_telemetry_figures.py's to see.
                    assert prometheus.query(filled_in(query)) == [], query
                    continue
                for series in prometheus.wait_for(filled_in(query)):
                    assert series["value"][1] not in ("", None)
                    assert series["metric"].get("pod", "pod-a") == "pod-a", query
                assert prometheus.query(filled_in(query, "nowhere")) == [], query
            counted = next(query for query in QUERIES if query.startswith("count by (version) (medusa_build_info"))
            assert [int(prometheus.query(filled_in(counted, each))[0]["value"][1]) for each in places] == [1, 1]
            assert int(prometheus.query(filled_in(counted, ".*"))[0]["value"][1]) == 2
            for variable in DASHBOARD["templating"]["list"][1:]:
                found = re.fullmatch(r"label_values\((\w+(?:\{.*\})?), (\w+)\)", variable["query"])
                assert found is not None
                assert found[2] in prometheus.wait_for(filled_in(found[1]))[0]["metric"]
            stop.set()
            asking.join(60.0)
    finally:
        stop.set()
        server.kill()
