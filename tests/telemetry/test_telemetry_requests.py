"""What is told of requests that go well, badly or nowhere; and that telling it never gets in their way."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import openai
import pytest
from opentelemetry import propagate
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider, sampling
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

from backends.types import GenerationRequest, GenerationStats
from telemetry.catalog import CHILD_SPANS, FALLBACK_EVENT, OTHER
from telemetry.catalog import Attributes as A
from telemetry.logs import CONTENT_LOG, REQUEST_LOG, JsonFormatter
from telemetry.providers import Providers
from telemetry.request import RequestRecord
from telemetry.service import Telemetry
from telemetry.tracing import MOST_SEQUENCES, child_spans
from tests.support.fakes import PATIENCE_S, FakeDecoder, FakeHandle
from tests.support.live_gateway import MODEL, LiveGateway, running_gateway

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CONTINUED = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
HELLO: list[Any] = [{"role": "user", "content": "hello, my secret"}]


class CarryingDecoder(FakeDecoder):
    """Remembers the trace context that a call out of the gateway would carry at the moment of submission."""

    def __init__(self) -> None:
        super().__init__()
        self.carried: dict[str, str] = {}

    def submit(self, request: GenerationRequest) -> FakeHandle:
        self.carried = {}
        propagate.inject(self.carried)
        return super().submit(request)


@dataclass
class Observed:
    live: LiveGateway
    decoder: CarryingDecoder
    exporter: InMemorySpanExporter
    telemetry: Telemetry

    def spans(self) -> dict[str, ReadableSpan]:
        """Of requests that are over, by name; the server span as "server"."""
        self.live.in_loop(self._settled())
        spans = {span.name: span for span in self.exporter.get_finished_spans()}
        return {
            "server" if span.parent is None or span.parent.is_remote else name: span for name, span in spans.items()
        }

    async def _settled(self) -> None:
        # A response's last byte is out before its record is closed; both happen in this loop.
        deadline = asyncio.get_running_loop().time() + PATIENCE_S
        while not self.exporter.get_finished_spans():
            assert asyncio.get_running_loop().time() < deadline, "no span came"
            await asyncio.sleep(0)

    def samples(self, name: str) -> dict[tuple[tuple[str, str], ...], float]:
        text = self.live.http.get("/metrics").raise_for_status().text
        families = text_string_to_metric_families(text)
        return {
            tuple(sorted(sample.labels.items())): sample.value
            for family in families
            for sample in family.samples
            if sample.name == name
        }


@contextmanager
def observing(sampler: sampling.Sampler = sampling.DEFAULT_ON, **options: Any) -> Iterator[Observed]:
    """A gateway whose spans end up in memory at once."""
    exporter = InMemorySpanExporter()
    tracing = TracerProvider(sampler, shutdown_on_exit=False)
    tracing.add_span_processor(SimpleSpanProcessor(exporter))
    telemetry = Telemetry.from_environment({}, version="1", instance="replica", **options)
    assert telemetry._providers is not None
    providers = Providers(tracing, telemetry._providers.metering)
    telemetry = Telemetry(providers, telemetry._registry, version="1", **options)
    decoder = CarryingDecoder()
    with running_gateway(decoder=decoder, telemetry=telemetry) as live:
        yield Observed(live, decoder, exporter, telemetry)


@pytest.fixture
def observed() -> Iterator[Observed]:
    with observing() as made:
        yield made


def ask(observed: Observed, **arguments: Any) -> Any:
    settings = {"model": MODEL, "messages": HELLO, "max_tokens": 12, "extra_headers": CONTINUED, **arguments}
    return observed.live.client.chat.completions.create(**settings)


def test_calls_out_of_a_request_belong_to_its_span(observed: Observed) -> None:
    ask(observed)
    server = observed.spans()["server"]
    assert server.context is not None and server.parent is not None
    assert (f"{server.context.trace_id:032x}", f"{server.parent.span_id:016x}") == (TRACE, PARENT)
    assert observed.decoder.carried["traceparent"] == f"00-{TRACE}-{server.context.span_id:016x}-01"


def test_without_an_exporter_the_clients_context_passes_through() -> None:
    decoder = CarryingDecoder()
    telemetry = Telemetry.from_environment({}, version="1", instance="replica")
    with running_gateway(decoder=decoder, telemetry=telemetry) as live:
        settings: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 4}
        live.client.chat.completions.create(**settings, extra_headers=CONTINUED)
        assert decoder.carried["traceparent"] == CONTINUED["traceparent"]
        live.client.chat.completions.create(**settings)
        assert decoder.carried == {}


def test_what_the_operator_does_not_sample_costs_no_spans() -> None:
    with observing(sampling.ParentBased(sampling.ALWAYS_OFF)) as observed:
        observed.live.client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=4)
        assert int(observed.decoder.carried["traceparent"][-2:], 16) & 1 == 0
        ask(observed)  # this client's trace is sampled, and the sampler follows the parent
        assert set(observed.spans()) == {"server", *CHILD_SPANS}


def test_each_choice_has_its_stages(observed: Observed) -> None:
    ask(observed, n=3, stream=False)
    observed.spans()
    decoded = [span for span in observed.exporter.get_finished_spans() if span.name == "decode"]
    assert sorted(dict(span.attributes or {})[A.CHOICE] for span in decoded) == [0, 1, 2]


def test_a_client_that_leaves_is_told_so(observed: Observed) -> None:
    observed.decoder.hold(at_step=2)
    stream = ask(observed, stream=True, max_tokens=40)
    next(iter(stream))
    stream.close()
    observed.live.wait_idle()
    spans = observed.spans()
    assert (spans["server"].attributes or {})["error.type"] == "client_disconnected"
    assert "decode" in spans
    durations = observed.samples("gen_ai_server_request_duration_seconds_count")
    assert [dict(labels)["error_type"] for labels in durations] == ["client_disconnected"]


def test_an_engine_that_fails_is_an_error_of_the_span(observed: Observed) -> None:
    observed.decoder.fail(at_step=2)
    with pytest.raises(openai.APIError):
        list(ask(observed, stream=True, max_tokens=40))
    server = observed.spans()["server"]
    assert (server.attributes or {})["error.type"] == "engine_error"
    assert not server.status.is_ok
    assert (server.attributes or {})["http.response.status_code"] == 200, "its first byte was out already"


def test_an_engine_that_fails_at_once_has_its_status(observed: Observed) -> None:
    observed.decoder.fail(at_step=0)
    with pytest.raises(openai.InternalServerError):
        ask(observed)
    server = observed.spans()["server"]
    assert ((server.attributes or {})["http.response.status_code"], server.status.is_ok) == (500, False)


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"model": "x" * 100, "messages": HELLO}, 404, "model_not_found"),
        ({"model": MODEL, "messages": HELLO, "max_tokens": "many"}, 400, "invalid_type"),
        ({"model": MODEL, "messages": HELLO, "surprise": 1}, 400, "unknown_parameter"),
    ],
)
def test_refusals_are_counted_by_code_and_not_by_what_was_sent(
    observed: Observed, body: dict[str, Any], status: int, code: str
) -> None:
    assert observed.live.http.post("/v1/chat/completions", json=body).status_code == status
    server = observed.spans()["server"]
    attributes = server.attributes or {}
    assert (attributes["http.response.status_code"], attributes["error.type"]) == (status, code)
    assert server.status.is_unset, "a client's mistake is no error of the server"
    ((labels, count),) = observed.samples("gen_ai_server_request_duration_seconds_count").items()
    found = dict(labels)
    assert (found["error_type"], found["gen_ai_request_model"], count) == (code, OTHER, 1)


def test_health_and_metrics_have_no_traces(observed: Observed) -> None:
    for path in ("/healthz", "/readyz", "/metrics", "/v1/models", "/nowhere"):
        observed.live.http.get(path)
    ask(observed)
    observed.spans()
    spans = observed.exporter.get_finished_spans()
    assert {f"{span.context.trace_id:032x}" for span in spans if span.context} == {TRACE}


def test_telemetry_that_breaks_breaks_no_request(observed: Observed, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("telemetry is broken")

    monkeypatch.setattr(observed.telemetry._metrics, "record_request", broken)
    assert ask(observed).choices[0].message.content
    assert len(list(ask(observed, stream=True))) > 1


def test_metrics_can_be_switched_off() -> None:
    telemetry = Telemetry.from_environment({"OTEL_SDK_DISABLED": "true"}, version="1", instance="replica")
    with running_gateway(telemetry=telemetry) as live:
        live.client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=4)
        refused = live.http.get("/metrics")
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "metrics_off")


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """All that loggers of the gateway write at INFO, as JSON."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    before, content = root.level, logging.getLogger(CONTENT_LOG)
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    content.setLevel(logging.INFO)
    yield stream
    root.removeHandler(handler)
    root.setLevel(before)
    content.setLevel(logging.NOTSET)


def lines(stream: io.StringIO, logger: str) -> list[dict[str, Any]]:
    return [line for text in stream.getvalue().splitlines() if (line := json.loads(text))["logger"] == logger]


def test_a_request_is_one_line_with_its_trace_and_without_its_text(observed: Observed, log: io.StringIO) -> None:
    answer = ask(observed)
    server = observed.spans()["server"]
    observed.live.wait_idle()
    (line,) = lines(log, REQUEST_LOG)
    assert server.context is not None
    assert (line["trace_id"], line["span_id"]) == (TRACE, f"{server.context.span_id:016x}")
    assert line["gen_ai.usage.output_tokens"] == answer.usage.completion_tokens
    assert line[A.RULE] == "default"
    assert lines(log, CONTENT_LOG) == []
    ours = [text for text in log.getvalue().splitlines() if json.loads(text)["logger"].startswith("gateway")]
    assert "my secret" not in "".join(ours)
    assert answer.choices[0].message.content not in "".join(ours)


@pytest.mark.parametrize(
    ("field", "told"),
    [("truncate", "truncate"), ("colour", "colour"), ("a\nline", "?"), ("Tell me", "?"), ("x" * 500, "?")],
)
def test_the_line_of_a_refused_request_names_the_field(
    observed: Observed, log: io.StringIO, field: str, told: str
) -> None:
    observed.live.http.post("/v1/chat/completions", json={"model": MODEL, "messages": HELLO, field: {}})
    observed.live.wait_idle()
    (line,) = lines(log, REQUEST_LOG)
    code = "unsupported_parameter" if field == "truncate" else "unknown_parameter"
    assert f" 400 {code} ({told}): " in line["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_and_answers_are_logged_only_on_demand(log: io.StringIO, stream: bool) -> None:
    with observing(log_content=True) as observed:
        answer = ask(observed, stream=stream)
        text = (
            "".join(chunk.choices[0].delta.content or "" for chunk in answer)
            if stream
            else answer.choices[0].message.content
        )
        observed.spans()
        observed.live.wait_idle()
    (line,) = lines(log, CONTENT_LOG)
    assert line["gen_ai.input.messages"] == HELLO
    assert line["gen_ai.output.messages"] == [text]


def test_an_exception_in_a_log_line_stays_one_line() -> None:
    try:
        raise ValueError("first\nsecond")
    except ValueError as error:
        record = logging.LogRecord("x", logging.ERROR, "f", 1, "went %s", ("wrong",), (ValueError, error, None))
    text = JsonFormatter().format(record)
    assert "\n" not in text
    assert json.loads(text)["message"] == "went wrong"
    assert "second" in json.loads(text)["exception"]


def test_pauses_of_drafting_are_events_and_spans_are_bounded() -> None:
    stats = GenerationStats(
        "medusa",
        steps=9,
        emitted_tokens=9,
        admitted_at=2.0,
        first_token_at=3.0,
        finished_at=9.0,
        paused_at=(5.0, 7.0),
        behind_at=8.0,
    )
    record = RequestRecord("chat", "/v1/chat/completions", 1.0, submitted_at=1.5, sequences=(stats,) * 40)
    record.completed = True
    record.close(10.0)
    spans = list(child_spans(record))
    assert len(spans) == 3 * MOST_SEQUENCES
    decode = next(span for span in spans if span.name == "decode")
    assert [at for at, name, _ in decode.events if name == FALLBACK_EVENT] == [5.0, 7.0, 8.0]
    assert "deadline" in str(decode.events[-1])
    assert record.first_token_at == 3.0


def test_a_sequence_that_ended_in_the_queue_has_only_that() -> None:
    stats = GenerationStats("medusa", finished_at=4.0)
    record = RequestRecord("chat", "/v1/chat/completions", 1.0, submitted_at=1.5, sequences=(stats,), completed=True)
    record.close(4.5)
    (queue,) = child_spans(record)
    assert (queue.name, queue.began, queue.ended) == ("queue", 1.5, 4.0)
