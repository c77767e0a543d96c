"""The catalogue's metrics as instruments: figures are read when somebody collects, requests and steps are recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from opentelemetry.context import Context
from opentelemetry.metrics import CallbackOptions, Histogram, Meter, Observation

from backends.types import StepSample
from telemetry import catalog
from telemetry.catalog import METRICS, MOST_ERRORS, OTHER, Metric
from telemetry.request import PROVIDER, RequestRecord
from telemetry.snapshot import ClosedLabels, Figures


class GatewayMetrics:
    """``figures`` is replaced as a whole by whoever takes them; collecting threads read it."""

    def __init__(self, meter: Meter) -> None:
        self.figures: Figures = {}
        self._histograms: dict[str, Histogram] = {}
        self._errors: set[str] = set()
        for metric in METRICS:
            if metric.kind == "histogram":
                self._histograms[metric.name] = meter.create_histogram(
                    metric.name,
                    metric.unit,
                    metric.description,
                    explicit_bucket_boundaries_advisory=metric.buckets,
                )
                continue
            create = meter.create_observable_counter if metric.kind == "counter" else meter.create_observable_gauge
            create(metric.name, [self._reader(metric)], metric.unit, metric.description)

    def record_request(self, record: RequestRecord, labels: ClosedLabels, context: Context | None) -> None:
        """``context`` holds the request's span, if any: a sampled one is the exemplar of the values."""
        model, class_name = labels.of(record.model, record.class_name)
        attributes = {
            "gen_ai.operation.name": record.operation,
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": model,
            catalog.CLASS: class_name,
        }
        with_error = attributes if record.error is None else {**attributes, "error.type": self._error(record.error)}
        self._record(catalog.REQUEST_DURATION, record.ended - record.arrived, with_error, context)
        if record.first_token_at is not None:
            self._record(catalog.TIME_TO_FIRST_TOKEN, record.first_token_at - record.arrived, attributes, context)
        for stats in record.sequences:
            if stats.first_token_at is None or stats.finished_at is None or stats.emitted_tokens < 2:
                continue
            seconds = (stats.finished_at - stats.first_token_at) / (stats.emitted_tokens - 1)
            self._record(catalog.TIME_PER_OUTPUT_TOKEN, seconds, attributes, context)

    def record_steps(self, model: str, backend: str, samples: Iterable[StepSample]) -> None:
        for sample in samples:
            attributes = {catalog.MODEL: model, "backend": backend, "kind": sample.kind}
            self._record(catalog.STEP_DURATION, sample.seconds, attributes, None)
            self._record(catalog.STEP_ROWS, sample.rows, attributes, None)

    def _error(self, code: str) -> str:
        # Our own codes are few; those of an upstream are whatever it says.
        if code in self._errors or len(self._errors) < MOST_ERRORS:
            self._errors.add(code)
            return code
        return OTHER

    def _record(self, metric: Metric, value: float, attributes: dict[str, str], context: Context | None) -> None:
        self._histograms[metric.name].record(max(value, 0.0), attributes, context)

    def _reader(self, metric: Metric) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def read(_: CallbackOptions) -> list[Observation]:
            values = self.figures.get(metric.name, {})
            return [
                Observation(value, dict(zip(metric.labels, labels, strict=True))) for labels, value in values.items()
            ]

        return read
