"""The backends file: what it means, what is refused and how, and `serve --backends`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from backends.engine.options import EngineOptions
from gateway import cli
from gateway.routing.backends_file import json_schema, parse_backends
from gateway.routing.spec import PLAIN, EngineMetrics, EngineSpec, Placement, UpstreamSpec, Variant
from gateway.serving.startup import with_threads
from gateway.upstream.api_key import ApiKeyError, read_api_key
from gateway.upstream.backend import UpstreamBackend
from policy.config.problems import ConfigError
from tests.gateway.commands.test_cli import FakeLoading, Served, loading, served
from tests.support.fakes import FakeDecoder

__all__ = ["loading", "served"]

FULL = """\
version: 1
retries: 1
models:
  cloud: {required: true}
  llama: {required: false}
backends:
  - name: gpu0
    kind: engine
    model: ./llama
    serves: llama
    heads: heads/llama
    device: cuda:0
    dtype: bfloat16
    max_running: 64
  - name: gpu1
    kind: engine
    serves: llama
    classes: [code, chat]
    priority: 1
    threads: 2
    quantize: int8
  - name: cloud
    kind: openai
    serves: cloud
    url: https://example.com/v1/
    upstream_model: big/model
    dialect: vllm
    api_key_file: key
    max_running: 8
    timeouts: {connect: 500ms, first_byte: 5s, between_bytes: 2s, total: 2m}
    breaker: {failures: 3, open: 1m, probes: 2}
    health: {path: /health, every: 1s, timeout: 100ms, failures: 1}
"""


def test_a_full_file(tmp_path: Path) -> None:
    spec = parse_backends(FULL.encode(), str(tmp_path / "backends.yaml"))
    first, second, cloud = spec.backends
    assert isinstance(first, EngineSpec)
    assert (first.options.model, first.options.heads) == (str(tmp_path / "llama"), "heads/llama")
    assert (first.serves, first.options.device, first.options.max_running) == ("llama", "cuda:0", 64)
    options = EngineOptions(threads=2, quantize="int8")
    assert second == EngineSpec("gpu1", "llama", Placement(1, frozenset({"code", "chat"})), options)
    assert isinstance(cloud, UpstreamSpec)
    assert (cloud.url, cloud.api_key_file) == ("https://example.com/v1", str(tmp_path / "key"))
    assert (cloud.max_running, cloud.max_in_flight) == (8, 32)
    assert (cloud.timeouts.connect_s, cloud.timeouts.total_s) == (0.5, 120.0)
    assert (cloud.breaker.open_s, cloud.breaker.probes, cloud.health.timeout_s) == (60.0, 2, 0.1)
    assert (spec.required, spec.retries) == (frozenset({"cloud"}), 1)
    schema = json_schema()
    assert jsonschema_rs.is_valid(schema, yaml.safe_load(FULL))
    assert not jsonschema_rs.is_valid(schema, yaml.safe_load(FULL.replace("retries", "retires")))


def test_a_model_with_an_engine_is_required_and_one_without_is_not() -> None:
    text = """\
version: 1
backends:
  - {name: a, kind: engine, serves: here}
  - {name: b, kind: openai, serves: here, url: "http://h/v1"}
  - {name: c, kind: openai, serves: there, url: "http://h/v1"}
"""
    assert parse_backends(text.encode(), "f").required == frozenset({"here"})


UPSTREAM = "{name: b, kind: openai, serves: m, url: 'http://h/v1'%s}"


@pytest.mark.parametrize(
    ("text", "line", "path", "told"),
    [
        ("", 1, "", "is empty; the shortest backends file is"),
        ("version: 1\n", 1, "backends", "is missing"),
        ("version: 2\nbackends: []", 1, "version", "this gateway reads version 1, not 2"),
        ("version: 1\nbackends: []", 2, "backends", "is empty; name at least one backend"),
        ("version: 1\nbackend: []", 2, "backend", "did you mean 'backends'?"),
        ("version: 1\nbackends:\n  - {name: a}", 3, "backends[0].kind", "is missing; one of engine, openai"),
        ("version: 1\nretries: 0x2\nbackends: []", 2, "retries", "write it in decimal"),
        (f"version: 1\nbackends:\n  - {UPSTREAM % ', max_in_flight: 1:30'}", 3, "backends[0].max_in_flight", "decimal"),
        (
            f"version: 1\nbackends:\n  - {UPSTREAM % ', breaker: {failures: 010}'}",
            3,
            "backends[0].breaker.failures",
            "decimal",
        ),
        (
            f"version: 1\nbackends:\n  - {UPSTREAM % ', timeouts: {total: 1h30m}'}",
            3,
            "backends[0].timeouts.total",
            "5400s",
        ),
        ("version: 1\nbackends:\n  - {name: a, kind: vllm}", 3, "backends[0].kind", "'vllm' is not known"),
        ("version: 1\nbackends:\n  - {name: a, kind: openai}", 3, "backends[0].serves", "is missing"),
        ("version: 1\nbackends:\n  - {name: a, kind: engine, url: x}", 3, "backends[0].url", "unknown field"),
        ("version: 1\nbackends:\n  - {name: a, kind: engine, device: tpu}", 3, "backends[0].device", "cuda:N"),
        (
            "version: 1\nbackends:\n  - {name: a, kind: engine, device: 'cuda:0,cuda:1'}",
            3,
            "backends[0].device",
            "tensor parallel is not supported",
        ),
        (
            "version: 1\nbackends:\n  - {name: a, kind: engine, quantize: int2}",
            3,
            "backends[0].quantize",
            "mean 'int8'?",
        ),
        ("version: 1\nbackends:\n  - " + UPSTREAM % ", dialect: tgi", 3, "backends[0].dialect", "'tgi' is not known"),
        ("version: 1\nbackends:\n  - " + UPSTREAM.replace("http", "ftp") % "", 3, "backends[0].url", "expected a URL"),
        (
            "version: 1\nbackends:\n  - " + UPSTREAM.replace("//h", "//me:pw@h") % "",
            3,
            "backends[0].url",
            "api_key_env",
        ),
        ("version: 1\nbackends:\n  - " + UPSTREAM.replace("/v1", "/v1?a=b") % "", 3, "backends[0].url", "mostly /v1"),
        (
            "version: 1\nbackends:\n  - " + UPSTREAM % ", timeouts: {connect: 5}, breaker: {open: soon}",
            3,
            "backends[0].breaker.open",
            "expected a duration",
        ),
        (
            "version: 1\nbackends:\n  - " + UPSTREAM % ", api_key_env: A, api_key_file: b",
            3,
            "backends[0]",
            "not both",
        ),
        (
            "version: 1\nbackends:\n  - " + UPSTREAM % ", max_running: 9, max_in_flight: 8",
            3,
            "backends[0]",
            "is over max_in_flight",
        ),
        (
            f"version: 1\nbackends:\n  - {UPSTREAM % ''}\n  - {UPSTREAM % ''}",
            4,
            "backends[1].name",
            "another backend above is called 'b' too",
        ),
        (
            "version: 1\nbackends:\n  - " + UPSTREAM % ", classes: code",
            3,
            "backends",
            "no backend of m takes every class",
        ),
        (
            f"version: 1\nmodels: {{n: {{}}}}\nbackends:\n  - {UPSTREAM % ''}",
            2,
            "models.n",
            "no backend serves it",
        ),
    ],
)
def test_refused(text: str, line: int, path: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_backends(text.encode(), "b.yaml")
    assert any(each.line == line and each.path == path and told in each.message for each in caught.value.problems), (
        caught.value.lines()
    )
    assert len(caught.value.problems) == 1


def test_cpu_engines_share_the_cores() -> None:
    options = {"a": EngineOptions(), "b": EngineOptions(threads=3), "c": EngineOptions(device="cuda:1")}
    engines = [EngineSpec(name, "m", options=each) for name, each in options.items()]
    assert [each.options.threads for each in with_threads(engines, 8)] == [4, 3, None]
    assert [each.options.threads for each in with_threads(engines[:1], 8)] == [None]


def test_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spec(**where: Any) -> UpstreamSpec:
        return UpstreamSpec("u", "m", "http://h/v1", **where)

    assert read_api_key(spec()) is None
    monkeypatch.setenv("THE_KEY", " sk-1\n")
    assert read_api_key(spec(api_key_env="THE_KEY")) == "sk-1"
    monkeypatch.setenv("THE_KEY", "")
    with pytest.raises(ApiKeyError, match="THE_KEY is not set or empty"):
        UpstreamBackend(spec(api_key_env="THE_KEY"))
    with pytest.raises(ApiKeyError, match="can't read"):
        read_api_key(spec(api_key_file=str(tmp_path / "nothing")))
    (tmp_path / "key").write_text("two\nlines")
    with pytest.raises(ApiKeyError, match="no key") as caught:
        read_api_key(spec(api_key_file=str(tmp_path / "key")))
    assert "two" not in str(caught.value)


def write(tmp_path: Path, text: str) -> str:
    (tmp_path / "b.yaml").write_text(text)
    return str(tmp_path / "b.yaml")


TWO = """\
version: 1
backends:
  - {name: a, kind: engine, model: tiny, serves: m, max_running: 3, quantize: int8}
  - {name: b, kind: openai, serves: m, url: "http://127.0.0.1:9/v1", classes: code}
"""


def test_serve_opens_what_the_file_says(loading: FakeLoading, served: Served, tmp_path: Path) -> None:
    loading.decoder = FakeDecoder(name="m")
    assert cli.main(["serve", "--port", "0", "--backends", write(tmp_path, TWO), "--max-queue", "5"]) == 0
    assert loading.options is not None
    assert (loading.options.model, loading.options.served_name, loading.options.max_running) == ("tiny", "m", 3)
    assert loading.options.quantize == "int8"
    backends = served.state.backends
    assert [each.name for each in backends.of_model("m")] == ["a", "b"]
    assert served.state.admission.places.capacity == (8 + 5) + 128
    assert not loading.decoder.alive, "the engine is closed at the end"


@pytest.mark.parametrize(
    ("text", "flags", "told"),
    [
        ("version: 1\nbackends: []", [], "the backends file is refused"),
        (TWO, ["--model", "x"], "--model and --backends exclude each other"),
        (TWO, ["--max-model-len", "9"], "--max-model-len and --backends exclude each other"),
        (TWO.replace("code", "cod"), [], "no prompt is ever of class cod"),
        (TWO.replace("classes: code", "api_key_env: NO_SUCH_KEY"), [], "NO_SUCH_KEY is not set or empty"),
    ],
)
def test_serve_refuses_before_it_loads(
    loading: FakeLoading,
    served: Served,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    text: str,
    flags: list[str],
    told: str,
) -> None:
    assert cli.main(["serve", "--port", "0", "--backends", write(tmp_path, text), *flags]) == 2
    assert told in capsys.readouterr().err
    assert loading.options is None


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["backends", "validate", write(tmp_path, TWO)]) == 0
    assert "ok, 1 engines and 1 upstreams" in capsys.readouterr().out
    assert cli.main(["backends", "validate", write(tmp_path, TWO + "\nx: 1")]) == 1
    assert "b.yaml:6: x: unknown field" in capsys.readouterr().out
    assert cli.main(["backends", "schema"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "medusa-gateway backends"


ARMS = """version: 1
backends:
  - {name: a, kind: openai, serves: m, url: "http://a:1/v1", variant: plain}
  - name: b
    kind: openai
    serves: m
    url: http://b:1/v1
    per_hour: 2.5
    metrics: {every: 2s}
    variant: {name: spec-k4, speculative: {method: ngram, tokens: 4}}
"""


def test_variants_make_arms() -> None:
    a, b = parse_backends(ARMS.encode(), "f.yaml").upstreams
    assert a.variant == PLAIN
    assert b.variant == Variant("spec-k4", "ngram", 4)
    assert (b.per_hour, b.metrics) == (2.5, EngineMetrics(every_s=2.0))


@pytest.mark.parametrize(
    ("old", "new", "line", "told"),
    [
        (", variant: plain", "", 3, "some upstreams of m have a 'variant' and a none"),
        ("variant: plain", "variant: fast", 3, "'fast' is not known"),
        ("variant: plain", "variant: {name: spec-k4}", 3, "another variant of m is called 'spec-k4'"),
        ("name: spec-k4, spec", "name: plain, spec", 10, "'plain' is the name of a variant that drafts nothing"),
        ("method: ngram", "method: magic", 10, "'magic' is not known"),
        ("backends:\n", "backends:\n  - {name: e, kind: engine, serves: m}\n", 3, "e: an engine of this process"),
    ],
)
def test_variants_that_make_no_sense_are_refused(old: str, new: str, line: int, told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_backends(ARMS.replace(old, new).encode(), "f.yaml")
    (problem,) = refused.value.problems
    assert problem.line == line
    assert told in problem.message
