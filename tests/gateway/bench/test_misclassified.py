"""`bench misclassified`: plans from statistics, and how the cost of a wrong one is said."""

from __future__ import annotations

import json

import pytest

from backends.bench.decoding import Cell, Run
from backends.models.tiny import TINY_MODEL_NAME
from backends.types import DecodingPlan
from gateway import cli
from gateway.bench.misclassified import AGAIN, OWN, plan_of, rows_of
from policy.planner import propose
from policy.statistics.counters import Tally


def test_a_class_gets_what_its_statistics_speak_for() -> None:
    weak = propose([[0.3], [0.02]], [60.0, 40.0])
    strong = propose([[0.8, 0.1], [0.7, 0.1], [0.6, 0.1], [0.5, 0.1]], [60.0, 50.0, 40.0, 30.0])
    assert plan_of("chat", weak, 4).num_heads < plan_of("code", strong, 4).num_heads == 4
    assert plan_of("chat", None, 4) == DecodingPlan(num_heads=4, max_nodes=32, rule="chat")
    assert plan_of("code", strong, 3).num_heads == 3


def test_a_wrong_plan_is_compared_with_the_own_one() -> None:
    runs = {OWN: [Run(100, 1.0, [[1]])], AGAIN: [Run(100, 1.1, [[1]])], "code": [Run(100, 1.25, [[1]])]}
    spent = {OWN: 1000.0, AGAIN: 1000.0, "code": 1040.0}
    tallies = {
        ("chat", 1, who): Tally({"spent_us": us, "emitted_tokens": 100.0, "steps": 50.0}) for who, us in spent.items()
    }
    again, code = rows_of(Cell("chat", 0.0, 1, runs), tallies)
    assert again["plan_of"] == AGAIN and again["by_table"] == 1.0
    assert code["by_clock"] == 0.8 and code["by_table"] == pytest.approx(0.962, abs=0.001)
    assert code["tokens_per_step"] == 2.0 and code["identical"] is True


def test_it_runs_on_a_tiny_model(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("--model", TINY_MODEL_NAME, "--rounds", "1", "--concurrency", "1", "--max-tokens", "4", "--json")
    assert cli.main(["bench", "misclassified", *argv]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report["plans"]) == {"code", "chat", "creative"}
    assert all(plan["steps"] >= 50 for plan in report["plans"].values())
    assert len(report["cells"]) == 9 and all(cell["identical"] for cell in report["cells"])
