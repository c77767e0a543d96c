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
from policy.config.problems import PolicyError
from policy.file.format import parse_policy
from telemetry.alerts.prometheus_rules import ABSENT, EXPRESSIONS, expression, rule_file
from telemetry.alerts.slo_rules import SLO_EXPRESSIONS
from telemetry.catalog import BY_NAME, METRICS
from tests.support.debian import binary
from tests.support.paths import DATA
from tests.support.prometheus_server import prometheus_labels

FULL = DATA / "policies" / "full.yaml"


def every_figure() -> str:
    text = "version: 1\nclasses: {sql: {}}\nalerts:\n"
    for name, figure in FIGURES.items():
        more = ", above: 6, objective: 99%, window: 1h" if figure.burn else ", below: 0.5"
        if figure.bounds:
            more += f", within: {figure.bounds[-1]:g}s"
        if figure.scope == "class":
            more += ", class: [code, chat], model: 'm*'"
        text += f"  - {{name: {name.replace('_', '-')}, metric: {name}{more}, for: 90s, keep: 1500ms}}\n"
    return text


EVERY = every_figure()


def promtool(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [binary("promtool"), *arguments], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_figure_is_of_metrics_that_exist() -> None:
    assert EXPRESSIONS.keys() | SLO_EXPRESSIONS.keys() == FIGURES.keys()
    assert not EXPRESSIONS.keys() & SLO_EXPRESSIONS.keys()
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
        "avg by (namespace, job, model, class) "
        '(medusa_head_accuracy{class=~"code|chat", model=~"a\\\\.b.*|c\\"d", head="3", rank="1"})'
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
        annotations = {"summary": summary, "value": value, "runbook_url": f"docs/runbooks/{labels.pop('name')}.md"}
        return {"exp_labels": {"severity": severity, **labels}, "exp_annotations": annotations}

    code = {"model": "m", "class": "code"}
    slow = alert("speculative_speedup_factor is below 1 for m/code", "0.95", name="speculation-does-not-pay", **code)
    full = alert("medusa_kv_usage is above 0.95 for m", "1", name="kv-cache-full", model="m")
    (words,) = (rule.summary for rule in spec.alerts if rule.name == "heads-of-another-model")
    stale = alert(words, "1", name="heads-of-another-model", model="m")
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
            {"60s": [], "75s": [alert("medusa_redis_up is below 1", "0", name="statistics-store-down")], "300s": []},
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
                        name="heads-got-worse",
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


COUNT = "gen_ai_server_time_to_first_token_seconds_count"
BUCKET = "gen_ai_server_time_to_first_token_seconds_bucket"


def test_every_alert_that_ships_is_of_one_installation_only(tmp_path: Path) -> None:
    """Two releases are scraped by one Prometheus, and one of them fails in every way that an alert is about: every
    alert of that one fires and is resolved, and none of the other's."""
    spec = parse_policy((Path("policy") / "assets" / "default.yaml").read_bytes(), "default")
    (tmp_path / "rules.yaml").write_text(json.dumps(rule_file(spec.alerts, runbooks=spec.runbooks)))
    # Ill from 2 h to 4 h, of 13 h altogether, by the minute; 120 values of each kind, at whole minutes.
    well, ill, after = 120, 120, 540

    def gauge(good: float, bad: float) -> str:
        return f"{good:g}x{well} {bad:g}x{ill - 1} {good:g}x{after}"

    def counter(good: float, bad: float) -> str:
        """Growing by ``good`` a minute, by ``bad`` while ill."""
        before, then = good * well, good * well + bad * ill
        return f"0+{good:g}x{well} {before + bad:g}+{bad:g}x{ill - 1} {then + good:g}+{good:g}x{after}"

    of_class, of_model = 'model="m",class="code"', 'model="m",backend="b"'
    named = 'gen_ai_request_model="m",class="code"'
    tpot = "gen_ai_server_time_per_output_token_seconds"
    gauges: dict[str, tuple[float, float]] = {
        f"speculative_speedup_factor{{{of_class}}}": (1.5, 0.9),
        f"speculative_acceptance_rate{{{of_class}}}": (0.4, 0.01),
        f"speculative_fallback_active{{{of_class}}}": (0, 1),
        f'medusa_head_accuracy{{{of_class},head="1",rank="1"}}': (0.5, 0.1),
        f'medusa_head_accuracy_prior{{{of_class},head="1",rank="1"}}': (0.5, 0.5),
        f"medusa_heads_stale{{{of_model}}}": (0, 1),
        f"medusa_verification_step_ratio{{{of_model}}}": (1.5, 5),
        "medusa_redis_up{}": (1, 0),
        f"medusa_queue_oldest_age_seconds{{{of_model}}}": (0, 20),
        f"medusa_kv_pages_used{{{of_model}}}": (1, 10),
        f"medusa_kv_pages_limit{{{of_model}}}": (10, 10),
        f"medusa_engine_up{{{of_model}}}": (1, 0),
        f"medusa_backend_up{{{of_model}}}": (1, 0),
        f"medusa_places_used{{{of_model}}}": (1, 10),
        f"medusa_places_limit{{{of_model}}}": (10, 10),
        "medusa_policy_rejected{}": (0, 1),
        "medusa_keys_rejected{}": (0, 1),
        'medusa_file_hangs{file="keys"}': (0, 1),
    }
    counters: dict[str, tuple[float, float]] = {
        f'medusa_requests_total{{{of_class},outcome="ok"}}': (100, 60),
        f'medusa_requests_total{{{of_class},outcome="server_error"}}': (0, 40),
        f'medusa_requests_total{{{of_class},outcome="limited"}}': (0, 600),
        'medusa_requests_total{model="other",class="unclassified",outcome="unauthorized"}': (0, 600),
        f"medusa_decode_time_seconds_total{{{of_class}}}": (20, 40),
        f"medusa_vanilla_time_seconds_total{{{of_class}}}": (30, 30),
        f'{BUCKET}{{{named},le="10.0"}}': (100, 20),
        f"{COUNT}{{{named}}}": (100, 100),
        f'{tpot}_bucket{{{named},le="0.5"}}': (100, 20),
        f"{tpot}_count{{{named}}}": (100, 100),
    }

    def at(series: str, namespace: str, instance: str) -> str:
        name, _, labels = series.partition("{")
        return f'{name}{{namespace="{namespace}",job="gateway",instance="{instance}",{labels}'.replace(",}", "}")

    series: dict[str, str] = {}
    for namespace, is_ill in (("production", True), ("staging", False)):
        for instance in ("a", "b"):
            for name, (good, bad) in gauges.items():
                series[at(name, namespace, instance)] = gauge(good, bad if is_ill else good)
            for name, (good, bad) in counters.items():
                series[at(name, namespace, instance)] = counter(good, bad if is_ill else good)
            series[at(f'medusa_build_info{{replica="{namespace}-{instance}"}}', namespace, instance)] = "1x800"
    scopes = {"class": {"model": "m", "class": "code"}, "model": {"model": "m"}, "fleet": {}}
    tests = []
    for rule in spec.alerts:
        labels = {"namespace": "production", "job": "gateway", "severity": rule.severity, **scopes[rule.figure.scope]}
        # Only which labels it has is looked at: values differ by the last digit between versions of Prometheus.
        firing = f'count by (namespace) (ALERTS{{alertname="{rule.name}", alertstate="firing"}})'
        exact = ", ".join(f'{name}="{value}"' for name, value in labels.items())
        tests += [
            {"expr": firing, "eval_time": "100m", "exp_samples": []},
            {"expr": firing, "eval_time": "239m", "exp_samples": [{"labels": '{namespace="production"}', "value": 1}]},
            {
                "expr": f'count(ALERTS{{alertname="{rule.name}", alertstate="firing", {exact}}})',
                "eval_time": "239m",
                "exp_samples": [{"labels": "{}", "value": 1}],
            },
            {"expr": firing, "eval_time": "700m", "exp_samples": []},
        ]
    case = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": tests,
    }
    gone = {
        "interval": "1m",
        "input_series": [{"series": 'medusa_build_info{instance="a"}', "values": "1x10 stale _x10 1x20"}],
        "promql_expr_test": [
            {
                "expr": f'count(ALERTS{{alertname="{ABSENT}", alertstate="firing"}})',
                "eval_time": when,
                "exp_samples": found,
            }
            for when, found in (("9m", []), ("15m", [{"labels": "{}", "value": 1}]), ("30m", []))
        ],
    }
    document = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [case, gone]}
    (tmp_path / "tests.yaml").write_text(json.dumps(document))
    promtool(tmp_path, "test", "rules", "tests.yaml")


def test_labels_and_annotations_of_ones_own(tmp_path: Path) -> None:
    text = """
version: 1
alert_labels: {environment: production, team: search}
runbooks: https://wiki/oncall/{alert}
alerts:
  - name: full
    metric: medusa_kv_usage
    above: 0.9
    labels: {team: platform}
    annotations: {dashboard: "https://grafana/d/{{x}}"}
  - {name: away, metric: medusa_redis_up, below: 1, runbook_url: "https://elsewhere/redis"}
"""
    full, away = rule_file(parse_policy(text.encode(), "p").alerts)["groups"][0]["rules"][:2]
    assert full["labels"] == {"severity": "warning", "environment": "production", "team": "platform"}
    assert full["annotations"]["runbook_url"] == "https://wiki/oncall/full"
    assert full["annotations"]["dashboard"] == 'https://grafana/d/{{ "{{" }}x}}'
    assert away["labels"]["team"] == "search"
    assert away["annotations"]["runbook_url"] == "https://elsewhere/redis"
    (tmp_path / "rules.yaml").write_text(json.dumps(rule_file(parse_policy(text.encode(), "p").alerts)))
    promtool(tmp_path, "check", "rules", "rules.yaml")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{name: a, metric: medusa_ttft_burn_rate, above: 6}", "'within'|is missing"),
        ("{name: a, metric: medusa_ttft_burn_rate, above: 6, within: 3s}", "such as 2.5s"),
        ("{name: a, metric: medusa_error_burn_rate, below: 6}", "give 'above'"),
        ("{name: a, metric: medusa_redis_up, below: 1, objective: 99%}", "has no objective"),
        (
            "{name: a, metric: medusa_redis_up, below: 1, labels: {severity: x}}",
            "that alerts have anyway",
        ),
        ("{name: a, metric: medusa_redis_up, below: 1, annotations: {summary: x}}", "an annotation of one's own"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_fix(line: str, words: str) -> None:
    with pytest.raises(PolicyError, match=words):
        parse_policy(f"version: 1\nalerts:\n  - {line}\n".encode(), "p")
