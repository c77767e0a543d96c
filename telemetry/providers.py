"""OpenTelemetry's providers as the standard OTEL_* variables ask for them. Nothing is registered globally.

Exporters work in threads of their own behind bounded queues: one that hangs loses spans and figures, and holds up no
request. What the SDK reads from the environment by itself (queue sizes, intervals, time-outs, headers, certificates,
resource attributes, sampler) it goes on reading; ``telemetry.environment`` has looked at it before.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points

from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricExporter, MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter

from telemetry.environment import Protocol, TelemetryError, TelemetrySettings

logger = logging.getLogger("telemetry")


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


def open_propagator(names: Sequence[str]) -> CompositePropagator:
    """Rather than ``opentelemetry.propagate``, which reads the environment when it is imported, and fails there."""
    known = {each.name: each for each in entry_points(group="opentelemetry_propagator")}
    return CompositePropagator([known[name].load()() for name in names])


def open_providers(settings: TelemetrySettings, resource: Resource, *readers: MetricReader) -> Providers:
    """``readers``: further readers of metrics, beside the exporter. Raises :class:`TelemetryError`."""
    try:
        return _open_providers(settings, resource, *readers)
    except Exception as error:
        # Of the variables of plug-ins, say, which nobody here knows.
        raise TelemetryError(f"the OTEL_* variables can't be used: {type(error).__name__}: {error}") from error


def _open_providers(settings: TelemetrySettings, resource: Resource, *readers: MetricReader) -> Providers:
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
