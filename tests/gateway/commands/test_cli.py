"""The command line: what ``serve`` passes on, and how mistakes are told."""

from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import constants

from backends.cost.stores import CostStore, FolderStore
from backends.models.hub import settle_for_the_cache
from gateway import cli
from gateway.commands import serve
from gateway.http import server
from gateway.http.server import bind, greeting, url_of
from tests.support.fakes import FakeDecoder, FakeTokenizer


@dataclass
class EngineOptions:
    model: str | None
    heads: str | None
    device: str
    dtype: str
    max_model_len: int | None
    max_running: int | None
    served_name: str | None
    kv_tokens: int | None
    quantize: str | None = None
    threads: int | None = None
    measure_anew: bool = False


class FakeLoading(ModuleType):
    """Stands in for ``backends.engine.loading``, which would load torch and a model."""

    EngineOptions = EngineOptions

    def __init__(self) -> None:
        super().__init__("backends.engine.loading")
        self.options: EngineOptions | None = None
        self.cost_stores: Sequence[CostStore] = ()
        self.error: Exception | None = None
        self.decoder = FakeDecoder()

    def open_engine(self, options: EngineOptions, cost_stores: Sequence[CostStore] = ()) -> Any:
        self.options, self.cost_stores = options, cost_stores
        if self.error is not None:
            raise self.error
        return SimpleNamespace(decoder=self.decoder, tokenizer=FakeTokenizer(), grammars=None)


@dataclass
class Served:
    state: Any = None
    port: int = 0


@pytest.fixture
def loading(monkeypatch: pytest.MonkeyPatch) -> FakeLoading:
    fake = FakeLoading()
    monkeypatch.setitem(sys.modules, "backends.engine.loading", fake)
    return fake


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    seen = Served()

    def run_server(state: Any, bound: socket.socket, *more: socket.socket, **options: Any) -> None:
        seen.state, seen.port = state, bound.getsockname()[1]

    monkeypatch.setattr(server, "run_server", run_server)
    yield seen


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("medusa-gateway ")


@pytest.mark.parametrize("argv", [[], ["nonsense"], ["serve", "--port", "x"], ["serve", "--port", "70000"]])
def test_mistakes_are_told_without_a_traceback(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == 2
    assert "error:" in capsys.readouterr().err


def test_help_lists_only_commands_that_are_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    assert "serve" in capsys.readouterr().out
    assert set(cli.available_commands()) <= set(cli.COMMANDS)


def test_defaults(loading: FakeLoading, served: Served) -> None:
    assert cli.main(["serve", "--port", "0"]) == 0
    assert loading.options == EngineOptions(None, None, "auto", "auto", None, None, None, None)
    assert list(served.state.backends.models) == ["fake-model"]
    assert [type(store) for store in loading.cost_stores] == [FolderStore]
    assert served.state.settings.max_concurrent == loading.decoder.load().max_running
    assert not loading.decoder.alive, "the engine is closed at the end"


def test_options_are_passed_on(loading: FakeLoading, served: Served) -> None:
    options = (
        "--model m --heads h --device cpu --dtype float32 --served-model-name s --max-model-len 99 --kv-tokens 1000"
    )
    limits = (
        "--max-running 3 --max-queue 0 --drain-timeout 1.5 --deadline 9 --default-max-tokens 7 --max-body-bytes 100"
    )
    access = "--keep-alive 620 --allowed-host box.lan --allowed-host llm.lan"
    assert cli.main(["serve", "--port", "0", *options.split(), *limits.split(), *access.split()]) == 0
    assert served.state.settings.keep_alive_s == 620
    assert served.state.access.allowed_hosts == {"box.lan", "llm.lan"}
    assert loading.options == EngineOptions("m", "h", "cpu", "float32", 99, 3, "s", 1000)
    settings = served.state.settings
    assert (settings.capacity, settings.drain_timeout_s, settings.deadline_s) == (3, 1.5, 9.0)
    assert (settings.default_max_tokens, settings.max_body_bytes) == (7, 100)


@pytest.mark.parametrize("error", [OSError("no such\n  folder"), ValueError("bad config")])
def test_a_model_that_cannot_be_loaded(
    loading: FakeLoading, served: Served, error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    loading.error = error
    assert cli.main(["serve", "--port", "0", "--model", "m"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("medusa-gateway: error: can't load m: ")
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--model /nonexistent", "there is no folder /nonexistent"),
        ("--model ./nonexistent", "there is no folder ./nonexistent"),
        ("--model a/b/c", "there is no folder a/b/c"),
        ("--heads /nonexistent", "there is no folder /nonexistent"),
        ("--model {file}", "{file} is a file; name its folder"),
        ("--backends {file}", "{file}: there is no folder {folder}/nonexistent"),
        ("--backends /nope.yaml", "/nope.yaml: No such file or directory"),
        ("--policy /nope.yaml", "/nope.yaml: No such file or directory"),
        ("--policy {folder}", "{folder}: is a folder; it must be a regular file, or a link to one"),
    ],
)
def test_a_file_or_folder_that_is_not_there_is_told_in_a_line_before_torch_is_loaded(
    loading: FakeLoading, tmp_path: Path, arguments: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "backends.yaml"
    file.write_text("version: 1\nbackends:\n  - {name: one, kind: engine, model: ./nonexistent, serves: first}\n")
    place = {"file": file, "folder": tmp_path}
    assert cli.main(["serve", "--port", "0", "--redis-url", "memory", *arguments.format(**place).split()]) == 2
    assert capsys.readouterr().err == f"medusa-gateway: error: {says.format(**place)}\n"
    assert loading.options is None


def test_a_hub_that_cannot_be_reached_is_asked_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with bind("127.0.0.1", 0) as nobody:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{nobody.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        settle_for_the_cache(str(tmp_path))
        assert not constants.HF_HUB_OFFLINE, "a folder needs no hub"
        settle_for_the_cache("gpt2")
        assert constants.HF_HUB_OFFLINE
        settle_for_the_cache("gpt2")
    (line,) = caplog.messages
    assert "gpt2 is looked for in the cache" in line


def test_a_taken_port_is_known_before_the_model_is_loaded(
    loading: FakeLoading, capsys: pytest.CaptureFixture[str]
) -> None:
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        assert cli.main(["serve", "--port", str(taken.getsockname()[1])]) == 2
    assert "can't listen on 127.0.0.1" in capsys.readouterr().err
    assert loading.options is None


def test_remote_hosts_need_a_flag(loading: FakeLoading, served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--host", "0.0.0.0", "--port", "0"]) == 2
    assert "--insecure-no-auth" in capsys.readouterr().err
    assert loading.options is None
    assert cli.main(["serve", "--host", "0.0.0.0", "--port", "0", "--insecure-no-auth"]) == 0


def test_the_redis_password_may_come_apart(
    loading: FakeLoading, served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MEDUSA_REDIS_PASSWORD", "p@ss")
    assert cli.main(["serve", "--port", "0", "--redis-url", "memory"]) == 0
    assert cli.main(["serve", "--port", "0"]) == 0, "no URL, no use for a password"
    monkeypatch.setenv("MEDUSA_REDIS_URL", "unix:///run/x.sock")
    assert cli.main(["serve", "--port", "0"]) == 2
    told = capsys.readouterr().err
    assert "a Unix socket takes no password" in told
    assert "p@ss" not in told


def test_cost_tables_are_shared_through_redis_and_may_be_measured_anew(
    loading: FakeLoading, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main(["serve", "--port", "0", "--redis-url", "redis://:secret@h:7/0", "--remeasure"]) == 0
    assert [str(store) for store in loading.cost_stores][1:] == ["redis://h:7/0"]
    assert loading.options is not None and loading.options.measure_anew
    monkeypatch.setenv("MEDUSA_REMEASURE", "0")
    assert cli.main(["serve", "--port", "0", "--redis-url", "memory"]) == 0
    assert len(loading.cost_stores) == 1 and not loading.options.measure_anew
    monkeypatch.setenv("MEDUSA_REMEASURE", "1")
    assert cli.main(["serve", "--port", "0", "--redis-url", "memory"]) == 0
    assert loading.options.measure_anew


def test_greeting() -> None:
    told = greeting("http://127.0.0.1:8080", "smollm2-135m-instruct")
    assert "http://127.0.0.1:8080/v1\n" in told
    assert "curl -N http://127.0.0.1:8080/v1/chat/completions" in told


def test_url_of_ipv6() -> None:
    try:
        bound = bind("::1", 0)
    except OSError:
        pytest.skip("no IPv6 here")
    with bound:
        assert url_of(bound).startswith("http://[::1]:")


def test_serve_has_its_own_parser() -> None:
    parser = argparse.ArgumentParser()
    serve.add_parser(parser.add_subparsers())
    assert parser.parse_args(["serve"]).run is serve.run
