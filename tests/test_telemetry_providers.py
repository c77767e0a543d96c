"""What the OTEL_* variables ask for, and that an exporter that hangs is left behind."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from telemetry.providers import Providers, TelemetryError, TelemetrySettings, make_resource, open_providers

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


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
