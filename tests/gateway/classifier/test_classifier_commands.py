"""`classify` and `classifier` on the command line."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from gateway import cli
from gateway.classifier import PromptClassifier


def run(*argv: str) -> int:
    return cli.main(argv)


def test_classify_json_has_label_probabilities_and_features(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("classify", "--json", "Write a poem about the sea") == 0
    out = json.loads(capsys.readouterr().out)
    assert out.keys() == {"label", "uncertain", "probabilities", "features"}
    assert out["label"] == "creative"
    assert out["probabilities"].keys() == {"chat", "code", "creative"}
    assert out["features"] and all(feature.keys() == {"feature", "score"} for feature in out["features"])


def test_classify_prints_the_label_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("classify", "sort a list in python") == 0
    assert capsys.readouterr().out.startswith("code")


def test_classify_lines_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "prompts.jsonl"
    rows = [
        {"prompt": "regex for a date"},
        {"messages": [{"role": "user", "content": "Schreib ein Gedicht"}]},
        {"prompt": ""},
    ]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    assert run("classify", "--jsonl", str(path)) == 0
    out = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["label"] for row in out[:2]] == ["code", "creative"]
    assert all(row.keys() == {"label", "uncertain", "probabilities"} for row in out)
    assert all(isinstance(row["uncertain"], bool) for row in out)


def test_classify_reads_standard_input(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    stdin = io.TextIOWrapper(io.BytesIO('{"prompt": "写一首诗"}\n'.encode() + b'{"prompt": "\xff\xfe"}\n'))
    monkeypatch.setattr(sys, "stdin", stdin)
    assert run("classify", "--jsonl", "-") == 0
    out = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert out[0]["label"] == "creative" and len(out) == 2


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("classify", "--jsonl", "missing.jsonl"), "missing.jsonl"),
        (("classify", "--artifact", "missing.npz", "hello"), "missing.npz"),
        (("classifier", "train", "--data", "missing.jsonl"), "missing.jsonl: no such file"),
        (("classifier", "eval", "--data", "missing.jsonl"), "missing.jsonl: no such file"),
        (("classifier", "bench", "--artifact", "missing.npz"), "missing.npz"),
        (("classifier", "bench", "--count", "0"), "--count 0"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(
    argv: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*argv) == 2
    assert message in capsys.readouterr().err


def test_classify_refuses_a_bad_line_by_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "fine"}\n{"promt": "typo"}\n')
    assert run("classify", "--jsonl", str(path)) == 2
    assert "prompts.jsonl:2:" in capsys.readouterr().err


def test_train_with_own_labels_then_classify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "tickets.jsonl"
    rows = [{"prompt": f"refund invoice {i} please", "label": "billing", "source": f"s{i % 2}"} for i in range(20)]
    rows += [{"prompt": f"parcel {i} is late", "label": "shipping", "source": f"s{i % 2}"} for i in range(20)]
    data.write_text("\n".join(map(json.dumps, rows)))
    out = tmp_path / "tickets"
    assert run("classifier", "train", "--data", str(data), "--out", str(out)) == 0
    assert "billing, shipping" in capsys.readouterr().out
    assert "| s0 | unknown |" in (out / "README.md").read_text()
    assert PromptClassifier.load(out / "classifier.npz").labels == ("billing", "shipping")
    assert run("classify", "--json", "--artifact", str(out / "classifier.npz"), "refund my invoice") == 0
    assert json.loads(capsys.readouterr().out)["label"] == "billing"
    assert run("classifier", "eval", "--data", str(data), "--card", str(out)) == 0
    assert "unseen sources" in (out / "README.md").read_text()


def test_bench_prints_a_row_for_every_length(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("classifier", "bench", "--count", "3") == 0
    out = capsys.readouterr().out
    assert all(f"| {length} |" in out for length in ("as they are", 8_000, 1_000_000))


@pytest.mark.parametrize("command", ["train", "eval"])
def test_without_scikit_learn_training_says_what_to_install(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    data = tmp_path / "prompts.jsonl"
    data.write_text("")
    assert cli.main(["classifier", command, "--data", str(data)]) == 2
    told = capsys.readouterr().err
    assert f"`classifier {command}` needs scikit-learn" in told
    assert "pip install 'medusa-gateway[train]'" in told


def test_classifying_imports_no_scikit_learn() -> None:
    script = (
        "import sys; import gateway.cli, gateway.commands.serve; from gateway.classifier import PromptClassifier;"
        "PromptClassifier.load().classify('hello');"
        "import gateway.serving.controller, gateway.http.app;"
        "print([name for name in ('sklearn', 'scipy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
