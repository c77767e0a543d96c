"""What the OTEL_* variables ask for, and that an exporter that hangs is left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from telemetry import environment
from telemetry.providers import Providers, TelemetryError, TelemetrySettings, make_resource, open_providers
from telemetry.service import Telemetry
from tests.support.paths import ROOT

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
PROTOCOL = "OTEL_EXPORTER_OTLP_PROTOCOL"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, TelemetrySettings()),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, TelemetrySettings()),
        ({ENDPOINT: "http://c:4318"}, TelemetrySettings("http/protobuf", "http/protobuf")),
        ({ENDPOINT: "http://c:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, TelemetrySettings("grpc", "grpc")),
        (
            {ENDPOINT: "http://c", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "OTEL_METRICS_EXPORTER": "prometheus"},
            TelemetrySettings("grpc", None),
        ),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://c"}, TelemetrySettings(None, "http/protobuf")),
        (
            {ENDPOINT: "http://c", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"},
            TelemetrySettings("grpc", "http/protobuf"),
        ),
        ({ENDPOINT: "http://c", "OTEL_TRACES_EXPORTER": "none"}, TelemetrySettings(None, "http/protobuf")),
        ({ENDPOINT: "http://c", "OTEL_SDK_DISABLED": "true"}, TelemetrySettings(disabled=True)),
        (
            {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.1"},
            TelemetrySettings(),
        ),
    ],
)
def test_what_is_exported(environment: dict[str, str], expected: TelemetrySettings) -> None:
    assert TelemetrySettings.from_environment(environment) == expected


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "OTEL_TRACES_EXPORTER is 'zipkin'"),
        ({ENDPOINT: "http://c", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, "OTEL_EXPORTER_OTLP_PROTOCOL"),
        ({"OTEL_TRACES_SAMPLER": "sometimes"}, "OTEL_TRACES_SAMPLER is 'sometimes'"),
        ({"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "10%"}, "OTEL_TRACES_SAMPLER_ARG"),
        ({"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "2"}, "OTEL_TRACES_SAMPLER_ARG"),
    ],
)
def test_wrong_values_are_refused_by_name(environment: dict[str, str], named: str) -> None:
    with pytest.raises(TelemetryError, match=named):
        TelemetrySettings.from_environment(environment)


NONSENSE = ("x", "-1", "1,,2", "a b=c d,,e")
WHOLE = [*environment._LIMITS, *(f"OTEL_BSP_{each}" for each in environment._BATCHES)]
SECRET = "zanzibar"


@pytest.mark.parametrize(
    "given",
    [
        *({name: value} for name in WHOLE for value in NONSENSE),
        *({"OTEL_PROPAGATORS": value} for value in ("b3", "jaeger", "tracecontext,,baggage", "tracecontext,x")),
        *({name: value} for name in ("OTEL_METRIC_EXPORT_INTERVAL", "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT")
          for value in (*NONSENSE, "0", "nan", "inf")),
        *({"OTEL_METRICS_EXEMPLAR_FILTER": value} for value in NONSENSE),
        *({name: f"x,{SECRET}"} for name in ("OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_METRICS_HEADERS")),
        {"OTEL_EXPORTER_OTLP_HEADERS": f"key={SECRET}%0A{SECRET}"},
        {"OTEL_EXPORTER_OTLP_CERTIFICATE": "/no/such/file"},
        *({ENDPOINT: value} for value in ("collector:4318", "127.0.0.1:4318", "htp://127.0.0.1:4318", "collector",
          f"//{SECRET}", "http://", "http://c:port", "http://[::1", "http://c c", f"{SECRET}://c:4318")),
        *({ENDPOINT: value, PROTOCOL: "grpc"} for value in ("htp://c:1", "c:port", "a b", "c:1/p")),
        {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "c:4318", ENDPOINT: "http://c:4318"},
        {ENDPOINT: "http://c:4317", PROTOCOL: "grpc", "OTEL_EXPORTER_OTLP_COMPRESSION": "deflate"},
        {ENDPOINT: "http://c:4318", "OTEL_EXPORTER_OTLP_COMPRESSION": "zip"},
    ],
    ids=str,
)  # fmt: skip
def test_what_the_sdk_would_choke_on_is_refused_by_name(given: dict[str, str]) -> None:
    with pytest.raises(TelemetryError) as caught:
        TelemetrySettings.from_environment(given)
    assert any(name in str(caught.value) for name in given)
    assert SECRET not in str(caught.value), "values may hold keys and passwords"
    assert "\n" not in str(caught.value)
    assert TelemetrySettings.from_environment({**given, "OTEL_SDK_DISABLED": "true"}) == TelemetrySettings(
        disabled=True
    )


@pytest.mark.parametrize(
    "given",
    [
        {"OTEL_PROPAGATORS": ""},
        {"OTEL_PROPAGATORS": "none"},
        {"OTEL_PROPAGATORS": " tracecontext , baggage "},
        {"OTEL_ATTRIBUTE_COUNT_LIMIT": "unset", "OTEL_SPAN_LINK_COUNT_LIMIT": "0"},
        {"OTEL_EXPORTER_OTLP_HEADERS": "api-key=a%20b, Authorization=Basic eA==,"},
        {"OTEL_EXPORTER_OTLP_TIMEOUT": "2.5", "OTEL_BSP_SCHEDULE_DELAY": "100"},
        {ENDPOINT: "https://user:word@collector/otlp/"},
        {ENDPOINT: "http://[::1]:4318", "OTEL_EXPORTER_OTLP_COMPRESSION": "deflate"},
        *(
            {ENDPOINT: value, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
            for value in ("c", "c:4317", "[::1]:4317", "https://c:4317", "unix:///run/c.sock", "dns:///c:4317")
        ),
        # Not asked for, so not in the way.
        {ENDPOINT: "c:4318", "OTEL_TRACES_EXPORTER": "none", "OTEL_METRICS_EXPORTER": "none"},
    ],
    ids=str,
)
def test_what_works_is_taken_by_the_sdk(given: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    Telemetry.from_environment(given, version="1", instance="x").shutdown(0.0)


def test_an_endpoint_for_one_signal_without_its_path_is_doubted() -> None:
    traces = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
    doubts = TelemetrySettings.from_environment({traces: "http://c:4318"}).doubts
    assert traces in doubts[0]
    for known in ({traces: "http://c:4318/v1/traces"}, {ENDPOINT: "http://c:4318"},
                  {traces: "http://c:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}):  # fmt: skip
        assert not TelemetrySettings.from_environment(known).doubts


PROGRAM = """
import sys
from tests.gateway.commands.test_cli import FakeLoading
loading = sys.modules["backends.engine.loading"] = FakeLoading()
loading.error = ValueError("a model was loaded")
from gateway.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"OTEL_PROPAGATORS": "b3"}, "OTEL_PROPAGATORS is 'b3'; use one of: baggage, tracecontext, none"),
        ({"OTEL_PROPAGATORS": "b3", "OTEL_SDK_DISABLED": "true"}, "a model was loaded"),
        # Empty is unset, also where the SDK sees it otherwise.
        (
            {"OTEL_ATTRIBUTE_COUNT_LIMIT": "", "OTEL_EXPORTER_OTLP_TIMEOUT": " ", PROTOCOL: "grpc", ENDPOINT: "c:4317"},
            "a model was loaded",
        ),
        ({"OTEL_PYTHON_EXPORTER_OTLP_HTTP_CREDENTIAL_PROVIDER": "x", ENDPOINT: "http://c"}, "OTEL_* variables"),
    ],
)
def test_a_start_is_refused_in_one_line_before_a_model_is_loaded(given: dict[str, str], told: str) -> None:
    """In a process of its own: much of the environment is read when modules are imported."""
    command = [sys.executable, "-c", PROGRAM, "serve", "--port", "0", "--redis-url", "memory", "--log-format", "json"]
    ended = subprocess.run(command, env={**os.environ, **given}, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 2, ended.stderr
    lines = [json.loads(line) for line in ended.stderr.splitlines()]
    assert told in lines[-1]["message"]
    assert all(line["message"].startswith("loading") for line in lines[:-1])


def test_an_error_that_nobody_foresaw_is_a_line_of_json_too() -> None:
    program = PROGRAM.replace("ValueError", "RuntimeError")
    command = [sys.executable, "-c", program, "serve", "--port", "0", "--redis-url", "memory", "--log-format", "json"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 1
    line = json.loads(ended.stderr.splitlines()[-1])
    assert "RuntimeError: a model was loaded" in line["exception"]


def test_the_operators_resource_attributes_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=mine,deployment.environment.name=test")
    attributes = make_resource("1.2.3", "replica").attributes
    assert attributes["service.name"] == "mine"
    assert attributes["deployment.environment.name"] == "test"
    assert attributes["service.version"] == "1.2.3"
    monkeypatch.delenv("OTEL_RESOURCE_ATTRIBUTES")
    assert make_resource("1.2.3", "replica").attributes["service.name"] == "medusa-gateway"


class Hanging(SpanExporter):
    """Takes a batch and never comes back from it, until the process ends."""

    def __init__(self, released: Any) -> None:
        self.released = released

    def export(self, spans: Any) -> SpanExportResult:
        self.released.wait()
        return SpanExportResult.FAILURE

    def shutdown(self) -> None:
        self.released.wait()


def test_a_queue_that_nobody_empties_is_bounded_and_does_not_hold_up_the_end() -> None:
    released = threading.Event()
    tracing = TracerProvider(shutdown_on_exit=False)
    tracing.add_span_processor(BatchSpanProcessor(Hanging(released), max_queue_size=32, max_export_batch_size=8))
    providers = Providers(tracing, open_providers(TelemetrySettings(), make_resource("", "")).metering)
    tracer = tracing.get_tracer("tests")
    try:
        for _ in range(1000):  # far more than the queue holds: every one of them returns
            tracer.start_span("a").end()
        assert providers.shutdown(0.2) is False
    finally:
        released.set()


def test_an_end_in_order_says_so() -> None:
    assert open_providers(TelemetrySettings(), make_resource("", "")).shutdown(30.0) is True
