"""Pages for operators that follow from the catalogue and the shipped policy: ``python -m tests.support.operator_docs``.

``docs/metrics.md`` says of each metric what it means and which alert uses it; ``docs/runbooks/README.md`` lists the
pages of the alerts that ship.
"""

from __future__ import annotations

import json
import re
from importlib import resources
from pathlib import Path

from policy.alerts import AlertRule
from policy.runtime import PolicyRuntime
from telemetry.alerts.prometheus_rules import ABSENT, expression
from telemetry.catalog import METRICS, Metric
from tests.support.paths import ROOT

RUNBOOKS = ROOT / "docs" / "runbooks"
_MADE = "<!-- Made by `python -m tests.support.operator_docs`; a test checks that it is current. -->"


def shipped() -> tuple[AlertRule, ...]:
    """The alerts of the policy that ships."""
    return PolicyRuntime.embedded().spec.alerts


def conditions() -> dict[str, str]:
    """Each alert that ships, the one that only Prometheus has too, and its condition in PromQL."""
    return {**{rule.name: expression(rule) for rule in shipped()}, ABSENT: "absent(medusa_build_info)"}


def used_by(metric: Metric) -> list[str]:
    """The alerts that ship whose condition is about ``metric``."""
    series = re.compile(rf"\b{metric.prometheus}(_bucket|_sum|_count)?\b")
    return [name for name, condition in conditions().items() if series.search(condition)]


def panels(metric: Metric) -> list[str]:
    """The dashboard's panels that show it."""
    text = resources.files("telemetry").joinpath("assets/grafana-dashboard.json").read_text()
    series = re.compile(rf"\b{metric.prometheus}(_bucket|_sum|_count)?\b")
    return [
        panel["title"]
        for panel in json.loads(text)["panels"]
        if any(series.search(target["expr"]) for target in panel.get("targets", []))
    ]


def metrics_page() -> str:
    """``docs/metrics.md``."""
    lines = [
        "# What each metric means, and which alert uses it",
        "",
        _MADE,
        "",
        "Names as Prometheus has them; [telemetry.md](telemetry.md) says what they are over. Alerts are those of the",
        "policy that ships, with their [runbooks](runbooks/README.md); panels are those of the dashboard. `/metrics`",
        "has the library's `process_*` too (memory, CPU seconds, open files, start time).",
        "",
        "| metric | kind | labels | meaning | alerts | panels |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for metric in METRICS:
        labels = ", ".join(label.replace(".", "_") for label in metric.labels)
        alerts = ", ".join(f"[{name}](runbooks/{name}.md)" for name in used_by(metric))
        shown = ", ".join(panels(metric))
        about = metric.description.replace("|", "\\|")
        lines.append(f"| `{metric.prometheus}` | {metric.kind} | {labels} | {about} | {alerts} | {shown} |")
    return "\n".join(lines) + "\n"


def runbooks_page() -> str:
    """``docs/runbooks/README.md``."""
    severities = {rule.name: rule.severity for rule in shipped()} | {ABSENT: "critical"}
    lines = [
        "# Runbooks",
        "",
        _MADE,
        "",
        "One page for each alert that ships: what it means, where to look, what to do. With `runbooks:",
        "https://your.wiki/{alert}` in the policy, alerts name your own pages instead ([alerts.md](../alerts.md)).",
        "",
        "| alert | severity | in short |",
        "| --- | --- | --- |",
    ]
    for name, severity in severities.items():
        lines.append(f"| [{name}]({name}.md) | {severity} | {_first_sentence(RUNBOOKS / f'{name}.md')} |")
    return "\n".join(lines) + "\n"


def _first_sentence(page: Path) -> str:
    text = " ".join(page.read_text().split("\n\n")[1].split())
    return re.split(r"(?<=\.) ", text)[0].replace("|", "\\|")


def derived_files() -> dict[Path, str]:
    """Each page, and what it must hold."""
    return {ROOT / "docs" / "metrics.md": metrics_page(), RUNBOOKS / "README.md": runbooks_page()}


if __name__ == "__main__":
    for file, content in derived_files().items():
        file.write_text(content)
