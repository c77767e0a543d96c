"""``medusa-gateway bench peers``, ``bench load`` and ``bench prompts`` as commands, and load over HTTP."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from backends.bench.peers.contestants import Place, Unavailable
from gateway.bench import http_load
from gateway.bench.http_load import LoadOptions, generator_command, read_result, run_http_load
from gateway.cli import main

RESULT: dict[str, Any] = {
    "benchmark_duration": {"avg": 10.0},
    "request_count": {"avg": 20.0},
    "good_request_count": {"avg": 15.0},
    "output_token_throughput": {"avg": 96.04},
    "time_to_first_token": {"p50": 30.04, "p99": 700.0},
    "inter_token_latency": {"p50": 8.0, "p99": 21.0},
    "error_summary": [{"count": 2}],
}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(model=tmp_path / "model", demo=False, eos=[0], threads=1, folder=tmp_path / "peers")


def test_load_over_http_asks_every_server_at_every_rate(place: Place) -> None:
    commands: list[Sequence[str]] = []

    @contextlib.contextmanager
    def serving(server: str, place: Place, folder: Path) -> Iterator[str]:
        if server == "vanilla":
            raise RuntimeError("it did not start: no room\n")
        yield f"http://127.0.0.1:1/{server}"

    def generate(command: Sequence[str], environment: Mapping[str, str], seconds: float) -> None:
        commands.append(command)
        assert "HF_HUB_OFFLINE" not in environment
        prompts = Path(command[command.index("--input-file") + 1]).read_text().splitlines()
        assert len(prompts) == 48 and all(json.loads(line)["text"] for line in prompts)
        out = Path(command[command.index("--artifact-dir") + 1])
        out.mkdir()
        (out / "profile_export_aiperf.json").write_text(json.dumps(RESULT))

    options = LoadOptions(servers=("adaptive", "vanilla", "llama-q4"), rates=(1.0, 2.5))
    report = run_http_load(options, place, generate=generate, serving=serving)
    assert report["skipped"] == {"vanilla": "it did not start: no room"}
    assert [(cell["server"], cell["rate"]) for cell in report["cells"]] == [
        ("adaptive", 1.0),
        ("adaptive", 2.5),
        ("llama-q4", 1.0),
        ("llama-q4", 2.5),
    ]
    assert report["cells"][0] == {
        "server": "adaptive",
        "rate": 1.0,
        "requests": 20,
        "errors": 2,
        "goodput": 1.5,
        "good_share": 0.75,
        "tokens_per_s": 96.0,
        "first_token_p50_ms": 30.0,
        "first_token_p99_ms": 700.0,
        "per_token_p50_ms": 8.0,
        "per_token_p99_ms": 21.0,
    }
    assert len(commands) == 4 and "--arrival-pattern" in commands[0]


def test_load_over_http_without_its_generator_names_the_command(place: Place) -> None:
    with pytest.raises(ValueError, match="aiperf is not installed; run: make peers"):
        run_http_load(LoadOptions(), place)


def test_a_server_that_does_not_start_says_its_last_words(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('no such weights')"]
    monkeypatch.setattr(http_load, "server_command", lambda *given: command)
    monkeypatch.setattr(http_load, "load_options", lambda *given: {})
    with (
        pytest.raises(RuntimeError, match="it did not start: no such weights"),
        http_load.served("llama-q4", place, tmp_path),
    ):
        pass
    monkeypatch.undo()
    with pytest.raises(Unavailable, match="demo model only"), http_load.served("llama-q4", place, tmp_path):
        pass


def test_a_result_that_is_not_there_is_told_of(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="aiperf's result can't be read: FileNotFoundError"):
        read_result(tmp_path)


def test_the_target_and_the_rate_reach_the_generator(place: Place, tmp_path: Path) -> None:
    options = LoadOptions(target_ms=(250.0, 12.5), seconds=3.0)
    command = generator_command("/p/bin/python", "http://h", 2.5, options, place, tmp_path / "p", tmp_path / "o")
    assert command[0] == "/p/bin/aiperf"
    assert command[command.index("--goodput") + 1] == "time_to_first_token:250 inter_token_latency:12.5"
    assert command[command.index("--request-rate") + 1] == "2.5"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("peers", "--rates", "1"), "--rates is only for bench load, not for bench peers"),
        (("sweep", "--contestants", "vanilla"), "--contestants is only for bench peers and bench load"),
        (("peers", "--temperature", "0"), "--temperature is only for bench decoding, not for bench peers"),
        (("decoding", "file.jsonl"), "SOURCE is only for bench prompts"),
        (("load", "--quick"), "--quick is not for bench load"),
        (("peers", "--runner", "native"), "--runner is not for bench peers"),
        (("peers", "--quantize", "int8"), "the contestant int8 has eight-bit weights"),
        (("peers", "--classes", "code,cooking"), "there are no prompts of class 'cooking'; there are: code, chat"),
        (("peers", "--contestants", "vanilla,mine"), "there is no contestant 'mine'; there are: vanilla, "),
        (("peers", "--prompts", "missing.jsonl"), "missing.jsonl"),
        (("prompts",), "bench prompts wants a SOURCE"),
    ],
)
def test_what_a_bench_does_not_take_is_refused(
    arguments: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [("--target", "500"), ("--rates", "0"), ("--rates", "a"), ("--contestants", "vanilla,vanilla")]
)
def test_malformed_lists_are_refused(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "load", *arguments]) == 2
    assert "such as" in capsys.readouterr().err


def test_prompts_are_brought_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "question.jsonl", tmp_path / "prompts.jsonl"
    source.write_text('{"category": "qa", "turns": ["Why?", "Why not?"]}\n')
    assert main(["bench", "prompts", str(source), "--out", str(out)]) == 0
    assert f"{out}: qa 1;" in capsys.readouterr().out
    assert json.loads(out.read_text()) == {"category": "qa", "text": "Why?"}
    assert main(["bench", "prompts", str(source)]) == 0
    assert json.loads(capsys.readouterr().out) == {"category": "qa", "text": "Why?"}
    source.write_text("nothing of the kind")
    assert main(["bench", "prompts", str(source)]) == 2
    assert "line 1: it is no JSON" in capsys.readouterr().err
