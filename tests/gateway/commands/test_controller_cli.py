"""``medusa-gateway policy``, and what ``serve`` makes of --policy and --redis-url."""

from __future__ import annotations

import argparse
import io
import json
import sys
from pathlib import Path

import pytest

from gateway.classifier.model import save_arrays
from gateway.classifier.training.dataset import Example
from gateway.classifier.training.fit import train
from gateway.commands import policy, serve
from gateway.commands.errors import CommandError
from tests.support.paths import DATA

DATA = DATA / "policies"
FULL = str(DATA / "full.yaml")


def run(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    policy.add_parser(parser.add_subparsers())
    args = parser.parse_args(["policy", *argv])
    return args.run(args)


def test_validate(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("validate", FULL) == 0
    assert "ok, version 1-" in capsys.readouterr().out
    broken = str(DATA / "broken" / "several.yaml")
    assert run("validate", FULL, broken) == 1
    out = capsys.readouterr().out.splitlines()
    assert [line.split(":")[1] for line in out[1:]] == ["3", "4", "7", "8"]
    assert all(line.startswith(f"{broken}:") for line in out[1:])
    with pytest.raises(OSError, match="No such file"):
        run("validate", "nowhere.yaml")


def test_validate_from_standard_input(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for text, status, told in ((b"version: 1\n", 0, "-: ok, version 1-"), (b"version: 2\n", 1, "-:1: version: this")):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
        assert run("validate", "-") == status
        assert capsys.readouterr().out.startswith(told)


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("explain", "--policy", FULL, "--class", "code", "--temperature", "1.9", "--heads", "3") == 0
    out = capsys.readouterr().out
    assert out.startswith("medusa, 3 heads, up to 48 nodes")
    assert "temperature 1.9 (asked for) is clamped to 1.2 by the policy" in out
    assert "rule classes.code" in out
    assert run("explain", "--policy", FULL, "--load", "3", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["method"], told["rule"]) == ("vanilla", "busy")
    assert run("explain") == 0
    assert "rule default" in capsys.readouterr().out
    with pytest.raises(CommandError, match="is empty"):
        run("explain", "--policy", str(DATA / "broken" / "empty.yaml"))


def test_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("schema") == 0
    assert json.loads(capsys.readouterr().out)["title"] == "medusa-gateway policy"


def test_diff(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run("diff", FULL, FULL) == 0
    assert capsys.readouterr().out == "no difference for any request\n"
    other = tmp_path / "other.yaml"
    other.write_text(Path(FULL).read_text().replace("deadline: 60s", "deadline: 30s"))
    assert run("diff", FULL, str(other)) == 1
    assert capsys.readouterr().out.startswith("defaults.deadline_s: 60 -> 30\n")


def served(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve.add_parser(parser.add_subparsers())
    return parser.parse_args(["serve", *argv])


def test_serve_refuses_what_it_cannot_use_before_it_loads_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEDUSA_REDIS_URL", raising=False)
    with pytest.raises(CommandError, match=r"the policy is refused: .*several.yaml:3: defaults.heads"):
        serve._controller(served("--policy", str(DATA / "broken" / "several.yaml")))
    with pytest.raises(FileNotFoundError):
        serve._controller(served("--policy", "nowhere.yaml"))
    with pytest.raises(CommandError, match="--redis-url: a Redis URL has one of these forms"):
        serve._controller(served("--redis-url", "localhost"))
    monkeypatch.setenv("MEDUSA_REDIS_URL", "ftp://x")
    with pytest.raises(CommandError, match="one of these forms"):
        serve._controller(served())


def test_serve_takes_policy_and_classifier() -> None:
    controller = serve._controller(served("--policy", FULL, "--redis-url", "memory"))
    assert controller.policy.path == Path(FULL)
    assert controller.known_classes == ["chat", "code", "creative", "sql", "unclassified"]
    asked = [{"role": "user", "content": "Write a Python function that reverses a string."}]
    assert controller.class_of(asked) == "code"


def test_serve_takes_a_classifier_of_your_own(tmp_path: Path) -> None:
    subjects = ("order", "account", "invoice", "parcel", "today", "March")
    asks = {"sql": ("sum the totals of {}", "query for {}"), "chat": ("why is {} late", "tell me about {}")}
    rows = [
        Example(f"{label}{i}{text}", f"shop-{i % 2}", "CC0", label, "en", (("user", text),))
        for label, texts in asks.items()
        for i, subject in enumerate(subjects)
        for text in (template.format(subject) for template in texts)
    ]
    artifact = tmp_path / "own.npz"
    save_arrays(train(rows), artifact)
    controller = serve._controller(served("--policy", FULL, "--redis-url", "memory", "--classifier", str(artifact)))
    assert controller.class_of("query for March") == "sql"  # a class of the policy that the shipped one doesn't know
    with pytest.raises(CommandError, match=r"--classifier: .*none\.npz: no such classifier artifact"):
        serve._controller(served("--redis-url", "memory", "--classifier", str(tmp_path / "none.npz")))
