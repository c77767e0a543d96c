"""OpenTelemetry's providers as the standard OTEL_* variables ask for them. Nothing is registered globally.

Exporters work in threads of their own behind bounded queues: one that hangs loses spans and figures, and holds up no
request. What the SDK reads from the environment by itself (queue sizes, intervals, time-outs, headers, certificates,
resource attributes, sampler) it goes on reading; here is decided what is exported at all, and wrong values are refused
by name.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, cast

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricExporter, MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter

logger = logging.getLogger("telemetry")

Signal = Literal["traces", "metrics"]
Protocol = Literal["grpc", "http/protobuf"]

_PROTOCOLS = ("grpc", "http/protobuf")
_SAMPLERS = ("always_on", "always_off", "traceidratio")
_EXPORTERS = {"traces": ("otlp", "none"), "metrics": ("otlp", "prometheus", "none")}


class TelemetryError(ValueError):
    """An OTEL_* variable that can't be used; the message names it and says what can."""


@dataclass(frozen=True, slots=True)
class TelemetrySettings:
    """What is exported, by which protocol; None: not at all. ``disabled``: not even ``/metrics``."""

    traces: Protocol | None = None
    metrics: Protocol | None = None
    disabled: bool = False

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> TelemetrySettings:
        """Raises :class:`TelemetryError`."""
        if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
            return cls(disabled=True)
        _check_sampler(environment)
        return cls(traces=_export(environment, "traces"), metrics=_export(environment, "metrics"))


@dataclass(frozen=True, slots=True)
class Providers:
    """``tracing`` None: no trace is begun here."""

    tracing: TracerProvider | None
    metering: MeterProvider

    def shutdown(self, patience_s: float) -> bool:
        """Export what is left, for as long as ``patience_s``; False when an exporter had not finished by then."""
        ends: list[Callable[[], object]] = [self.metering.shutdown]
        if self.tracing is not None:
            ends.append(self.tracing.shutdown)
        # Side by side, so that one that hangs leaves the other its time; daemons, so that it can't hold up the exit.
        threads = [threading.Thread(target=_quietly, args=(end,), daemon=True) for end in ends]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + patience_s
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in threads)


def open_providers(settings: TelemetrySettings, resource: Resource, *readers: MetricReader) -> Providers:
    """``readers``: further readers of metrics, beside the exporter."""
    tracing = None
    if settings.traces is not None:
        tracing = TracerProvider(resource=resource, shutdown_on_exit=False)
        tracing.add_span_processor(BatchSpanProcessor(_span_exporter(settings.traces)))
    metric_readers = list(readers)
    if settings.metrics is not None:
        metric_readers.append(PeriodicExportingMetricReader(_metric_exporter(settings.metrics)))
    return Providers(tracing, MeterProvider(metric_readers, resource, shutdown_on_exit=False))


def make_resource(version: str, instance: str) -> Resource:
    """This process; OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES take precedence over what is said here."""
    own = {"service.name": "medusa-gateway", "service.version": version, "service.instance.id": instance}
    given = OTELResourceDetector().detect().attributes
    return Resource.create({name: value for name, value in own.items() if name not in given})


def _export(environment: Mapping[str, str], signal: Signal) -> Protocol | None:
    upper = signal.upper()
    name = f"OTEL_{upper}_EXPORTER"
    asked = [each.strip() for each in environment.get(name, "otlp").split(",") if each.strip()] or ["otlp"]
    for each in asked:
        if each not in _EXPORTERS[signal]:
            raise TelemetryError(f"{name} is '{each}'; use one of: {', '.join(_EXPORTERS[signal])}")
    endpoints = (f"OTEL_EXPORTER_OTLP_{upper}_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    if "otlp" not in asked or not any(environment.get(each, "").strip() for each in endpoints):
        return None
    for name in (f"OTEL_EXPORTER_OTLP_{upper}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if protocol := environment.get(name, "").strip():
            if protocol not in _PROTOCOLS:
                raise TelemetryError(f"{name} is '{protocol}'; use one of: {', '.join(_PROTOCOLS)}")
            return cast(Protocol, protocol)
    return "http/protobuf"


def _check_sampler(environment: Mapping[str, str]) -> None:
    # The SDK would warn and sample everything.
    sampler = environment.get("OTEL_TRACES_SAMPLER", "").strip().lower()
    if sampler and sampler.removeprefix("parentbased_") not in _SAMPLERS:
        names = ", ".join([*_SAMPLERS, *(f"parentbased_{each}" for each in _SAMPLERS)])
        raise TelemetryError(f"OTEL_TRACES_SAMPLER is '{sampler}'; use one of: {names}")
    if sampler.endswith("traceidratio"):
        text = environment.get("OTEL_TRACES_SAMPLER_ARG", "1.0")
        try:
            known = 0.0 <= float(text) <= 1.0
        except ValueError:
            known = False
        if not known:
            raise TelemetryError(f"OTEL_TRACES_SAMPLER_ARG is '{text}'; use a share from 0 to 1")


def _span_exporter(protocol: Protocol) -> SpanExporter:
    # Imported where it is wanted: gRPC alone takes as long to import as the rest of the gateway.
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    else:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    return OTLPSpanExporter()


def _metric_exporter(protocol: Protocol) -> MetricExporter:
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
    else:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    return OTLPMetricExporter()


def _quietly(end: Callable[[], object]) -> None:
    try:
        end()
    except Exception as error:
        logger.warning("telemetry was not shut down in order: %s", error)
