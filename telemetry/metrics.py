"""The catalogue's metrics as instruments: figures are read when somebody collects, requests and steps are recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from opentelemetry.context import Context
from opentelemetry.metrics import CallbackOptions, Histogram, Meter, Observation

from backends.types import StepSample
from telemetry import catalog
from telemetry.catalog import METRICS, MOST_ERRORS, OTHER, Metric
from telemetry.request import PROVIDER, RequestRecord
from telemetry.request_counts import per_token_times
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
        for seconds in per_token_times(record):
            self._record(catalog.TIME_PER_OUTPUT_TOKEN, seconds, attributes, context)
        self._record_stages(record, {catalog.MODEL: model, catalog.CLASS: class_name}, context)

    def _record_stages(self, record: RequestRecord, by_class: dict[str, str], context: Context | None) -> None:
        if record.longest_gap is not None:
            self._record(catalog.LONGEST_GAP, record.longest_gap, by_class, context)
        for stats in record.sequences:
            if stats.admitted_at is not None:
                if record.submitted_at is not None:
                    self._record(catalog.QUEUE_WAIT, stats.admitted_at - record.submitted_at, by_class, context)
                if stats.first_token_at is not None:
                    prefill_s = stats.first_token_at - stats.admitted_at
                    self._record(catalog.PREFILL_DURATION, prefill_s, by_class, context)
            if stats.steps:
                self._record(catalog.TOKENS_PER_STEP, stats.tokens_per_step, by_class, context)

    def record_lag(self, seconds: float) -> None:
        self._record(catalog.LOOP_LAG, seconds, {}, None)

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
