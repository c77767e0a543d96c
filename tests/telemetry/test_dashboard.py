"""The Grafana dashboard: every query returns series from a real Prometheus that scrapes a real gateway process."""

from __future__ import annotations

import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from backends.heads.format import backbone_fingerprint, save_heads
from backends.models.tiny import tiny_heads, tiny_model, tiny_tokenizer
from telemetry.catalog import METRICS
from tests.drills.demo_alert import serving
from tests.policy.test_policy_store import ValkeyProcess
from tests.support.debian import binary
from tests.support.prometheus_server import running_prometheus

DASHBOARD: dict[str, Any] = json.loads(
    resources.files("telemetry").joinpath("assets/grafana-dashboard.json").read_text()
)
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]
# A tree of its own, so that there are drafts whatever the random heads say, and a rejected edit can be counted as 0.
POLICY = """
version: 1
defaults: {tree: 2x1, fallback: {window: 1s}}
alerts: [{name: slow, metric: speculative_speedup_factor, below: 1}]
"""


def filled_in(query: str) -> str:
    return query.replace("$model", ".*").replace("$class", ".*").replace("$__rate_interval", "10s")


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
    ):
        assert name in shown
    exported = {metric.prometheus for metric in METRICS}
    named = {
        re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"\b[a-z_]+(?=\{)|(?<=min\()[a-z_]+", shown)
    }
    assert {name for name in named if name not in exported} <= {"speculative_fallback"}, "all are in the catalogue"
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_every_query_returns_series(tmp_path: Path, tiny_folder: Path) -> None:
    binary("prometheus")
    policy, server = tmp_path / "policy.yaml", ValkeyProcess(tmp_path).start()
    policy.write_text(POLICY)
    arguments = ["--model", str(tiny_folder), "--heads", str(tmp_path / "heads"), "--policy", str(policy)]
    arguments += ["--redis-url", server.url, "--dtype", "float32"]
    try:
        with (
            serving(*arguments, "--max-model-len", "256", log=tmp_path / "gateway.log") as gateway,
            running_prometheus(tmp_path, gateway.url) as prometheus,
        ):
            for query in QUERIES:
                for series in prometheus.wait_for(filled_in(query)):
                    assert series["value"][1] not in ("", None)
            for variable in DASHBOARD["templating"]["list"][1:]:
                metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]).groups()  # type: ignore[union-attr]
                assert label in prometheus.wait_for(metric)[0]["metric"]
    finally:
        server.kill()
