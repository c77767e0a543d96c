"""Everything a gateway tells of itself, in one object that is made at the start and passed around."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from opentelemetry import trace
from opentelemetry.context import Context, attach, detach
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder

from backends.types import StepSampler
from telemetry.environment import PROPAGATORS, TelemetrySettings
from telemetry.logs import CONTENT_LOG, REQUEST_LOG
from telemetry.metrics import GatewayMetrics
from telemetry.providers import Providers, make_resource, open_propagator, open_providers
from telemetry.request import Attempt, RequestRecord
from telemetry.request_counts import RequestCounts, RequestWindow
from telemetry.snapshot import ClosedLabels, Figures, Sources, StepWindow, savings_figures, take_figures
from telemetry.tracing import (
    Epoch,
    end_client_span,
    end_server_span,
    server_attributes,
    start_client_span,
    start_server_span,
)

SHUTDOWN_PATIENCE_S = 3.0
_SCOPE = "medusa_gateway"

logger = logging.getLogger("telemetry")
_request_log = logging.getLogger(REQUEST_LOG)
_FIELD = re.compile(r"[a-z][a-z0-9_]{0,39}(?:\[\d+\])*")
_content_log = logging.getLogger(CONTENT_LOG)


@dataclass(slots=True)
class RequestTrace:
    """A request under way. ``span`` None: its trace, if it has any, is not ours to record."""

    record: RequestRecord
    epoch: Epoch
    context: Context | None = None
    span: trace.Span | None = None


@dataclass(slots=True)
class OutgoingCall:
    """A request to an upstream under way. ``span`` None: it has none of our own."""

    attempt: Attempt
    span: trace.Span | None = None

    def end(self, outcome: str, *, failed: bool) -> None:
        """``outcome``: completed, abandoned, or the code of the error. Called once."""
        self.attempt.outcome = outcome
        if self.span is not None:
            end_client_span(self.span, outcome, failed=failed)


class Telemetry:
    """``figures`` are those of the last :meth:`observe`; alerts are evaluated on them.

    ``log_content``: prompts and answers are logged. ``by_tenant``: counts of requests have the names of API keys as
    labels. ``window``: how requests went in the last hours, for alerts. Figures are taken even where nothing
    is exported.
    """

    def __init__(
        self,
        providers: Providers | None,
        registry: CollectorRegistry | None,
        *,
        version: str = "",
        log_content: bool = False,
        by_tenant: bool = False,
        propagators: Sequence[str] = PROPAGATORS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.figures: Figures = {}
        self.version = version
        self.counts = RequestCounts(by_tenant=by_tenant)
        self.window = RequestWindow()
        self.log_content = log_content
        self.clock = clock
        self._providers = providers
        self._registry = registry
        self._propagator = open_propagator(propagators)
        self._tracer = None
        self._metrics = None
        if providers is not None:
            self._metrics = GatewayMetrics(providers.metering.get_meter(_SCOPE, version))
            if providers.tracing is not None:
                self._tracer = providers.tracing.get_tracer(_SCOPE, version)
        self._labels = ClosedLabels((), ())
        self._steps = StepWindow()

    @classmethod
    def off(cls) -> Telemetry:
        """Exports nothing and records nothing."""
        return cls(None, None)

    @classmethod
    def from_environment(
        cls,
        environment: Mapping[str, str],
        *,
        version: str,
        instance: str,
        log_content: bool = False,
        by_tenant: bool = False,
    ) -> Telemetry:
        """By the standard OTEL_* variables. Raises :class:`telemetry.environment.TelemetryError` for wrong ones."""
        settings = TelemetrySettings.from_environment(environment)
        if settings.disabled:
            return cls(None, None, version=version, log_content=log_content)
        # The instrumentation scope is always ours: as a label it would only make every series longer.
        registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=registry)
        reader = PrometheusMetricReader(scope_info_enabled=False, registry=registry)
        providers = open_providers(settings, make_resource(version, instance), reader)
        for doubt in settings.doubts:
            logger.warning("%s", doubt)
        return cls(
            providers,
            registry,
            version=version,
            log_content=log_content,
            by_tenant=by_tenant,
            propagators=settings.propagators,
        )

    def begin(self, record: RequestRecord, headers: Iterable[tuple[bytes, bytes]]) -> RequestTrace:
        """Continue the trace that the client's headers name, or begin one, if traces are exported at all."""
        request = RequestTrace(record, Epoch.now(self.clock))
        if self._providers is not None:
            carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}
            request.context = self._propagator.extract(carrier, Context())
            if self._tracer is not None:
                request.span = start_server_span(self._tracer, record, request.context, request.epoch)
                request.context = trace.set_span_in_context(request.span, request.context)
        return request

    def call_out(
        self, record: RequestRecord, backend: str, url: str, upstream_model: str, headers: dict[str, str]
    ) -> OutgoingCall:
        """Begin a request to an upstream: note it, open its span, and add to its headers what makes it part of it.

        Without a span of our own it is part of the present trace, which may be the client's.
        """
        attempt = Attempt(backend)
        record.attempts.append(attempt)
        span, context = None, None
        if self._tracer is not None:
            span = start_client_span(self._tracer, record, backend, url, upstream_model)
            context = trace.set_span_in_context(span)
        self._propagator.inject(headers, context)
        return OutgoingCall(attempt, span)

    def note_lag(self, seconds: float) -> None:
        """The event loop woke a sleeper so much too late."""
        if self._metrics is not None:
            self._metrics.record_lag(seconds)

    def finish(self, request: RequestTrace) -> None:
        """The response is over: record its figures, end its spans, log it. What fails here fails in silence but for the
        log: the client has its answer."""
        try:
            self._finish(request)
        except Exception:
            logger.exception("a request was not recorded")

    def _finish(self, request: RequestTrace) -> None:
        record = request.record
        record.close(self.clock())
        self.counts.add(record, self._labels)
        self.window.add(record, self._labels)
        if self._metrics is not None:
            self._metrics.record_request(record, self._labels, request.context)
        if request.span is not None and self._tracer is not None and request.context is not None:
            end_server_span(self._tracer, request.span, request.context, record, request.epoch)
        _log_request(record)

    def observe(self, sources: Sources, now: float) -> Figures:
        """Take the figures, and the engines' steps into their histograms. Called about once a second."""
        self._labels = ClosedLabels(sources.models, sources.classes)
        for backend, decoder in sources.decoders.items():
            samples = decoder.take_steps() if isinstance(decoder, StepSampler) else []
            self._steps.add(backend, samples, now)
            if self._metrics is not None:
                self._metrics.record_steps(decoder.info.name, backend, samples)
        self.window.tick(now)
        savings = savings_figures(self.counts.by_tenant(sources.saved_s, self._labels), sources.cost)
        self.figures = {**take_figures(sources, self._steps, now), **self.counts.figures(), **savings}
        if self._metrics is not None:
            self._metrics.figures = self.figures
        return self.figures

    def exposition(self, accept: str) -> tuple[bytes, str] | None:
        """What Prometheus scrapes, and its media type; None where telemetry is switched off. Thread-safe."""
        if self._registry is None:
            return None
        encode, media_type = choose_encoder(accept)
        return encode(self._registry), media_type

    def shutdown(self, patience_s: float = SHUTDOWN_PATIENCE_S) -> None:
        """Export what is left, within ``patience_s``."""
        if self._providers is not None and not self._providers.shutdown(patience_s):
            logger.warning("telemetry was not all exported within %g s", patience_s)


class Attached:
    """A context in which a request's span is the present one, for logs and for calls that go out."""

    def __init__(self, request: RequestTrace) -> None:
        self._context = request.context

    def __enter__(self) -> None:
        self._token = None if self._context is None else attach(self._context)

    def __exit__(self, *_: object) -> None:
        if self._token is not None:
            detach(self._token)


def loggable(param: str) -> str:
    """The path of a field for the log. Names that the client chose may hold anything, a prompt too: only what looks
    like a field of some API is repeated."""
    return ".".join(name if _FIELD.fullmatch(name) else "?" for name in param[:200].split("."))


def _log_request(record: RequestRecord) -> None:
    if _request_log.isEnabledFor(logging.INFO):
        seconds = record.ended - record.arrived
        outcome = f"{record.status} {record.error}" if record.error else str(record.status)
        if record.param:
            outcome += f" ({loggable(record.param)})"
        fields = {**server_attributes(record), "duration_s": round(seconds, 6)}
        who = f" for {record.tenant}" if record.tenant else ""
        where = f" by {record.backend}" if record.backend else ""
        _request_log.info(
            "POST %s %s: %d tokens in %.3f s%s%s",
            *(record.route, outcome, record.output_tokens, seconds, where, who),
            extra={"fields": fields},
        )
    if record.content:
        _content_log.info("content of %s", record.answer_id, extra={"fields": record.content})
