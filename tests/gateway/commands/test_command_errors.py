"""Bad input to any command: one plain line on standard error and status 2; what a check finds has status 1."""

from __future__ import annotations

import io
import logging
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from gateway import cli
from telemetry.logs import configure_logging

MENDABLE = [
    "serve --redis-url memory --policy {missing}",
    "serve --redis-url memory --policy {folder}",
    "serve --redis-url memory --policy {broken}",
    "serve --redis-url memory --backends {missing}",
    "serve --redis-url memory --backends {folder}",
    "serve --redis-url memory --backends {broken}",
    "serve --redis-url memory --backends {broken} --dtype float32",
    "serve --redis-url http://host",
    "serve --api-keys {missing}",
    "serve --api-keys {folder}",
    "serve --api-keys {broken}",
    "serve --log-content",
    "serve --model {missing}",
    "backends validate {missing}",
    "backends validate {folder}",
    "fetch --model {missing}",
    "fetch --backends {missing}",
    "fetch --backends {folder}",
    "fetch --backends {broken}",
    "policy validate {missing}",
    "policy explain --policy {missing}",
    "policy explain --policy {folder}",
    "policy explain --policy {broken}",
    "policy diff {broken} {broken}",
    "keys validate {folder}",
    "keys list {missing}",
    "keys list {folder}",
    "keys list {broken}",
    "keys new alice --expires soon",
    "keys hash",
    "alerts rules --policy {missing}",
    "alerts rules --policy {folder}",
    "alerts rules --policy {broken}",
    "heads inspect {folder}",
    "heads train --out {missing} --sequential --input hidden",
    "heads prompts --out {folder}",
    "classifier train --data {missing}",
    "classifier train --data {folder}",
    "classifier train --data {broken}",
    "classifier eval --data {missing}",
    "classifier bench --data {missing}",
    "classifier bench --artifact {broken}",
    "classifier bench --count 0",
    "classify --jsonl {missing}",
    "classify --jsonl {folder}",
    "classify --jsonl {broken}",
    "classify --artifact {missing} text",
    "classify --artifact {folder} text",
    "verify-lossless --architecture gemma2",
    "verify-lossless --tokenizer llama3",
    "verify-lossless --tiny --architecture nonsense",
    "bench sweep --quick",
    "bench --policy {broken}",
    "bench telemetry --runner native",
]
USAGE = [
    "",
    "nonsense",
    "serve --nonsense",
    "serve --port x",
    "serve --max-running 0",
    "serve --deadline never",
    "backends",
    "policy explain --turn third",
    "keys new",
    "alerts rules --label x",
    "heads train",
    "classifier train",
    "classify",
    "verify-lossless --prompts x",
    "bench --concurrency 0",
]
FOUND = ["backends validate {broken}", "policy validate {broken}", "keys validate {broken}"]


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    found = {"missing": tmp_path / "missing", "folder": tmp_path / "folder", "broken": tmp_path / "broken.yaml"}
    found["folder"].mkdir()
    found["broken"].write_text("version: 1\n  nonsense: [\n")
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(readline=lambda: "short\n", buffer=io.BytesIO()))
    return found


def arguments(line: str, places: dict[str, Path]) -> list[str]:
    return line.format(**places).split()


@pytest.mark.parametrize("line", MENDABLE)
def test_what_can_be_mended_is_one_line(line: str, places: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments(line, places)) == 2
    told = capsys.readouterr()
    last = told.err.splitlines()[-1]
    assert last.startswith("medusa-gateway: error: ") and len(last) > 30
    assert "Traceback" not in told.err and told.err.count("error: ") == 1
    assert told.out == ""


@pytest.mark.parametrize("line", USAGE)
def test_a_wrong_call_is_told_with_its_usage(
    line: str, places: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments(line, places)) == 2
    told = capsys.readouterr().err
    assert told.startswith("usage: medusa-gateway") and ": error: " in told.splitlines()[-1]


@pytest.mark.parametrize("line", FOUND)
def test_what_a_check_finds_is_its_output(
    line: str, places: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments(line, places)) == 1
    told = capsys.readouterr()
    assert told.out.startswith(f"{places['broken']}:") and told.err == ""


def test_every_command_is_tried() -> None:
    tried = {line.split()[0].replace("-", "_") for line in MENDABLE}
    assert tried == set(cli.available_commands())


def test_a_log_follows_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    try:
        first = io.StringIO()
        monkeypatch.setattr(sys, "stderr", first)
        configure_logging("text", "warning")
        first.close()
        monkeypatch.setattr(sys, "stderr", second := io.StringIO())
        logging.getLogger("gateway").warning("still heard")
        assert "still heard" in second.getvalue() and "Logging error" not in second.getvalue()
    finally:
        root.handlers[:] = before
        root.setLevel(level)
