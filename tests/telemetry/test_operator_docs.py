"""What operators read follows from what there is: every metric is explained, every alert that ships has a runbook."""

from __future__ import annotations

import re

import pytest

from telemetry.catalog import METRICS
from tests.support.operator_docs import RUNBOOKS, conditions, derived_files
from tests.support.paths import ROOT


@pytest.mark.parametrize("path", derived_files(), ids=lambda path: path.name)
def test_made_pages_are_current(path: object) -> None:
    file = next(each for each in derived_files() if each == path)
    assert file.read_text() == derived_files()[file], "run: python -m tests.support.operator_docs"


def test_every_alert_that_ships_has_a_page_and_every_page_an_alert() -> None:
    pages = {page.stem for page in RUNBOOKS.glob("*.md")} - {"README"}
    assert pages == set(conditions())
    for page in pages:
        text = (RUNBOOKS / f"{page}.md").read_text()
        assert text.startswith(f"# {page}\n")
        assert "\n## Look at\n" in text and "\n## Do\n" in text, page


def test_pages_name_only_metrics_options_and_pages_that_exist() -> None:
    exported = {metric.prometheus for metric in METRICS} | {"gen_ai_request_model"}
    for page in [*RUNBOOKS.glob("*.md"), ROOT / "docs" / "operate.md"]:
        text = page.read_text()
        named = {
            re.sub(r"_(bucket|sum|count)$", "", name)
            for name in re.findall(r"`((?:medusa|speculative|gen_ai)_[a-z_]+)", text)
        }
        assert named <= exported, f"{page.name}: {named - exported}"
        for link in re.findall(r"\]\(([^)#]+\.md)", text):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_every_fault_has_tests_that_exist() -> None:
    rows = re.findall(r"^\| A(\d+) \|.*", text := (ROOT / "docs" / "faults.md").read_text(), re.MULTILINE)
    assert [int(number) for number in rows] == list(range(1, 35))
    for line in filter(lambda line: line.startswith("| A"), text.splitlines()):
        assert "::" in line, line
    for path, name in re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", text):
        assert re.search(rf"def {name}\(", (ROOT / path).read_text()), f"{path}::{name}"
