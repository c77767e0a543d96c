"""``medusa-gateway alerts rules``: Prometheus itself reads the rules, and fires them when the gateway would."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from cloudcoil.models.prometheus_operator import v1

from gateway.cli import main
from policy.alerts import FIGURES
from policy.file.format import parse_policy
from telemetry.alerts.prometheus_rules import EXPRESSIONS, expression, rule_file
from telemetry.catalog import BY_NAME, METRICS
from tests.support.debian import binary
from tests.support.paths import DATA
from tests.support.prometheus_server import prometheus_labels

FULL = DATA / "policies" / "full.yaml"
EVERY = "version: 1\nclasses: {sql: {}}\nalerts:\n" + "".join(
    f"  - {{name: {name.replace('_', '-')}, metric: {name}, {side}, for: 90s, keep: 1500ms}}\n"
    for name in FIGURES
    for side in ["below: 0.5"]
)


def promtool(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [binary("promtool"), *arguments], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_figure_is_of_metrics_that_exist() -> None:
    assert EXPRESSIONS.keys() == FIGURES.keys()
    exported = {metric.prometheus: metric for metric in METRICS}
    for name, each in EXPRESSIONS.items():
        for metric in each.metrics:
            assert BY_NAME[metric.name] is metric
            assert f"{metric.prometheus}{{filters}}" in each.series, "its name is the one that is scraped"
            assert metric.prometheus in exported
            assert set(each.by) <= prometheus_labels(metric)
        if FIGURES[name].by_head:
            assert {"head", "rank"} <= prometheus_labels(each.metrics[0])


@pytest.mark.parametrize("name", ["embedded", "full", "every figure"])
def test_promtool_checks_the_rules(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(EVERY if name == "every figure" else FULL.read_text())
    arguments = [] if name == "embedded" else ["--policy", str(policy)]
    assert main(["alerts", "rules", "--format", "rules", "--label", "fleet=eu", *arguments]) == 0
    (tmp_path / "rules.yaml").write_text(capsys.readouterr().out)
    made = yaml.safe_load((tmp_path / "rules.yaml").read_text())
    assert f"{len(made['groups'][0]['rules'])} rules found" in promtool(tmp_path, "check", "rules", "rules.yaml")
    assert made["groups"][0]["rules"][0]["labels"]["fleet"] == "eu"


def test_the_object_for_prometheus_operator(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--name", "gw", "--namespace", "llm", "--metadata-label", "release=prometheus"]
    assert main(["alerts", "rules", *arguments]) == 0
    document = yaml.safe_load(capsys.readouterr().out)
    made = v1.PrometheusRule.model_validate(document)
    assert made.metadata is not None
    assert (made.metadata.name, made.metadata.namespace) == ("gw", "llm")
    assert document["metadata"]["labels"] == {"release": "prometheus"}
    assert main(["alerts", "rules", "--format", "rules"]) == 0
    assert document["spec"] == yaml.safe_load(capsys.readouterr().out)


def test_a_broken_policy_is_told_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p.yaml").write_text("version: 1\nalerts: [{name: a, metric: medusa_redis_up}]\n")
    assert main(["alerts", "rules", "--policy", str(tmp_path / "p.yaml")]) == 2
    assert "give either below or above" in capsys.readouterr().err


def test_filters_and_words_are_taken_literally() -> None:
    text = """
version: 1
alerts:
  - name: odd
    metric: medusa_head_accuracy
    head: 3
    below: 0.2
    class: [code, chat]
    model: ["a.b*", 'c"d']
    summary: "as in {{ $value }}"
"""
    (rule,) = parse_policy(text.encode(), "p").alerts
    assert expression(rule) == (
        'avg by (model, class) (medusa_head_accuracy{class=~"code|chat", model=~"a\\\\.b.*|c\\"d", head="3", rank="1"})'
        " < 0.2"
    )
    assert rule_file([rule])["groups"][0]["rules"][0]["annotations"]["summary"] == 'as in {{ "{{" }} $value }}'


def unit_test(rule: str, series: dict[str, str], expected: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """A case for ``promtool test rules``: series as promtool writes them, by name; alerts expected by time."""
    return {
        "interval": "15s",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [
            {"eval_time": at, "alertname": rule, "exp_alerts": alerts} for at, alerts in expected.items()
        ],
    }


def test_promtool_fires_and_resolves_them(tmp_path: Path) -> None:
    """Of the shipped policy: speedup under 1 for 60 s of one class of two, by two replicas; a store that is away for
    one of them; a KV cache that is full."""
    assert main(["alerts", "rules", "--format", "rules"]) == 0
    spec = parse_policy((Path("policy") / "assets" / "default.yaml").read_bytes(), "default")
    (tmp_path / "rules.yaml").write_text(json.dumps(rule_file(spec.alerts)))

    def alert(summary: str, value: str, **labels: str) -> dict[str, Any]:
        severity = labels.pop("severity", "warning")
        return {"exp_labels": {"severity": severity, **labels}, "exp_annotations": {"summary": summary, "value": value}}

    slow = alert("speculative_speedup_factor is below 1 for m/code", "0.95", model="m", **{"class": "code"})
    full = alert("medusa_kv_usage is above 0.95 for m", "1", model="m")
    (words,) = (rule.summary for rule in spec.alerts if rule.name == "heads-of-another-model")
    stale = alert(words, "1", model="m")
    cases = [
        unit_test(
            "speculation-does-not-pay",
            {
                'speculative_speedup_factor{instance="a",model="m",class="code"}': "1.5x4 0.9x8 1.5x20",
                'speculative_speedup_factor{instance="b",model="m",class="code"}': "1.5x4 1.0x8 1.5x20",
                'speculative_speedup_factor{instance="a",model="m",class="chat"}': "1.5x40",
            },
            # Pending from 75 s on (the fifth value), firing 60 s later, clear at 210 s, and gone 60 s after that.
            {"120s": [], "135s": [slow], "195s": [slow], "285s": []},
        ),
        unit_test(
            "statistics-store-down",
            {'medusa_redis_up{instance="a"}': "1x2 0x6 1x20", 'medusa_redis_up{instance="b"}': "1x30"},
            {"60s": [], "75s": [alert("medusa_redis_up is below 1", "0")], "300s": []},
        ),
        unit_test(
            "kv-cache-full",
            {
                'medusa_kv_pages_used{instance="a",model="m"}': "10x20",
                'medusa_kv_pages_limit{instance="a",model="m"}': "10x20",
                'medusa_kv_pages_used{instance="b",model="m"}': "1x20",
                'medusa_kv_pages_limit{instance="b",model="m"}': "10x20",
            },
            {"105s": [], "120s": [full]},
        ),
        unit_test(
            "heads-of-another-model",
            {
                'medusa_heads_stale{instance="a",model="m",backend="one"}': "0x20",
                'medusa_heads_stale{instance="a",model="m",backend="two"}': "0x4 1x4 0x20",
                'medusa_heads_stale{instance="a",model="n",backend="three"}': "0x20",
            },
            {
                "60s": [],
                "75s": [stale],
                "210s": [],
            },
        ),
        unit_test(
            "heads-got-worse",
            {
                'medusa_head_accuracy{model="m",class="code",head="1",rank="1"}': "0.3x40",
                'medusa_head_accuracy_prior{model="m",class="code",head="1",rank="1"}': "0.6x40",
                'medusa_head_accuracy{model="m",class="code",head="2",rank="1"}': "0.1x40",
                'medusa_head_accuracy_prior{model="m",class="code",head="2",rank="1"}': "0.6x40",
            },
            {
                "285s": [],
                "300s": [
                    alert(
                        "medusa_head_accuracy_ratio (head 1) is below 0.7 for m/code",
                        "0.5",
                        model="m",
                        **{"class": "code"},
                    )
                ],
            },
        ),
    ]
    tests = {"rule_files": ["rules.yaml"], "evaluation_interval": "15s", "tests": cases}
    (tmp_path / "tests.yaml").write_text(json.dumps(tests))
    promtool(tmp_path, "test", "rules", "tests.yaml")
