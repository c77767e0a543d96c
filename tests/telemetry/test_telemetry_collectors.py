"""``medusa-gateway serve`` with telemetry and real collectors.

One streamed request is one trace, and figures get out the same by OTLP and at ``/metrics``.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import httpx
import openai
import pytest

from telemetry.attributes import CHILD_SPANS
from telemetry.attributes import Attributes as A
from telemetry.catalog import BY_NAME, METRICS
from telemetry.providers import TelemetrySettings, make_resource, open_providers
from telemetry.service import Telemetry
from tests.support.fakes import PATIENCE_S
from tests.support.live_gateway import running_gateway
from tests.support.otlp_collectors import HttpCollector, attributes_of, rotel
from tests.support.prometheus_server import prometheus_labels

MODEL = "tiny-random"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
# Out of everybody's control group: which requests are in it is drawn by their ids.
POLICY = "version: 1\ndefaults: {control: 0, fallback: {min_speedup: 0.1}}\n"


@dataclass
class Served:
    url: str
    collector: HttpCollector
    client: openai.OpenAI

    def metrics(self) -> str:
        return httpx.get(f"{self.url}/metrics", timeout=PATIENCE_S).raise_for_status().text


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    policy = tmp_path_factory.mktemp("policy") / "policy.yaml"
    policy.write_text(POLICY)
    with HttpCollector() as collector:
        environment = {
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
            "OTEL_BSP_SCHEDULE_DELAY": "200",
            "OTEL_METRIC_EXPORT_INTERVAL": "500",
        }
        command = [sys.executable, "-m", "gateway", "serve", "--model", MODEL, "--port", "0", "--policy", str(policy)]
        command += ["--redis-url", "memory"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert process.stdout is not None
        try:
            line = next(line for line in process.stdout if "serves" in line)
            found = re.search(r"(http://\S+)/v1", line)
            assert found, line
            with openai.OpenAI(base_url=found.group(), api_key="x", timeout=PATIENCE_S, max_retries=0) as client:
                yield Served(found.group(1), collector, client)
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def streamed(served: Served) -> list[Any]:
    """The chunks of one streamed request that belongs to a client's trace."""
    stream = served.client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Write a Python function that adds two numbers."}],
        max_tokens=24,
        temperature=0.5,
        seed=3,
        stream=True,
        stream_options={"include_usage": True},
        extra_headers={"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "req-1"},
        extra_body={"ignore_eos": True},
    )
    return list(stream)


def test_one_streamed_request_is_one_trace_with_all_its_spans(served: Served, streamed: list[Any]) -> None:
    usage, report, answer = streamed[-1].usage, streamed[-1].decoding, streamed[-1].id
    spans = served.collector.trace(TRACE, 1 + len(CHILD_SPANS))
    assert sorted(span.name for span in spans) == sorted(["chat tiny-random", *CHILD_SPANS])
    by_name = {span.name: span for span in spans}
    server = by_name.pop("chat tiny-random")
    assert server.parent_span_id.hex() == PARENT, "the client's trace goes on"
    assert server.kind == 2, "a server span"
    assert {span.parent_span_id for span in by_name.values()} == {server.span_id}
    assert server.status.code == 0

    attributes = attributes_of(server)
    expected = {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "medusa-gateway",
        "gen_ai.request.model": MODEL,
        "gen_ai.request.max_tokens": 24,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.seed": 3,
        "gen_ai.request.stream": True,
        "gen_ai.response.id": answer,
        "gen_ai.response.model": MODEL,
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        A.REQUEST_ID: "req-1",
        A.CLASS: "code",
    }
    assert {name: attributes.get(name) for name in expected} == expected
    assert "error.type" not in attributes
    assert not [value for value in attributes.values() if "Python function" in str(value)], "no prompt in a span"

    assert attributes_of(by_name["classify"]) == {A.CLASS: "code", A.CLASS_SOURCE: "classifier"}
    decide = attributes_of(by_name["decide"])
    expected = {
        A.RULE: report["rule"],
        A.REASON: decide[A.REASON],
        A.POLICY_VERSION: report["policy_version"],
        A.CLASS: "code",
        A.ARM: "policy",
        A.PLAN_METHOD: "medusa",
        A.PLAN_HEADS: 4,
        A.PLAN_ACCEPTANCE: "exact",
        A.PLAN_TEMPERATURE: 0.5,
    }
    assert {name: decide.get(name) for name in expected} == expected
    assert decide[A.STATS_SOURCE] in ("local", "fleet"), "the fleet's as soon as the store was read, in a second or so"
    assert decide[A.REASON] in report["reason"]

    assert attributes_of(by_name["prefill"])[A.PROMPT_TOKENS] == usage.prompt_tokens
    decode = attributes_of(by_name["decode"])
    expected = {
        A.CHOICE: 0,
        A.PLAN_METHOD: "medusa",
        A.STEPS: report["steps"],
        A.DRAFTED: report["drafted_tokens"],
        A.ACCEPTED: report["accepted_draft_tokens"],
        A.EMITTED: 24,
        A.FINISH_REASON: "length",
    }
    assert {name: decode.get(name) for name in expected} == expected
    assert decode[A.SPEEDUP] == pytest.approx(report["speedup_estimate"], abs=1e-3)

    stages = [by_name[name] for name in CHILD_SPANS]
    assert all(span.start_time_unix_nano <= span.end_time_unix_nano for span in spans)
    for earlier, later in pairwise(stages):
        assert earlier.end_time_unix_nano <= later.start_time_unix_nano, (earlier.name, later.name)
    assert server.start_time_unix_nano <= stages[0].start_time_unix_nano
    assert stages[-1].end_time_unix_nano <= server.end_time_unix_nano


def test_the_statistics_of_earlier_requests_are_in_the_next_ones_trace(served: Served, streamed: list[Any]) -> None:
    """With their age, and beside the decision that was made on them."""
    served.collector.wait(lambda got: any(m.name == "speculative_steps" for m in got.metrics), "counts of the first")
    trace = "1" * 32
    served.client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Write a Python function that adds two numbers."}],
        max_tokens=8,
        temperature=0.5,
        extra_headers={"traceparent": f"00-{trace}-{PARENT}-01"},
    )
    spans = served.collector.trace(trace, 1 + len(CHILD_SPANS))
    decide = attributes_of(next(span for span in spans if span.name == "decide"))
    assert decide[A.STATS_AGE] >= 0
    assert decide[A.STATS_STEPS] > 0
    assert decide[A.STATS_SPEEDUP] > 0


def test_figures_are_the_same_by_otlp_and_for_prometheus(served: Served, streamed: list[Any]) -> None:
    wanted = ("speculative_emitted_tokens", "gen_ai.server.time_to_first_token", "medusa_step_duration")
    served.collector.wait(lambda got: set(wanted) <= {metric.name for metric in got.metrics}, "metrics")
    text = served.metrics()
    families = set(re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE))
    for metric in {each.name: each for each in served.collector.metrics}.values():
        listed = BY_NAME[metric.name]
        assert (metric.unit, metric.description) == (listed.unit, listed.description)
        assert listed.prometheus in families
        data = getattr(metric, metric.WhichOneof("data"))
        for point in data.data_points:
            assert set(attributes_of(point)) <= set(listed.labels)
    assert {"process_resident_memory_bytes", "process_cpu_seconds_total"} <= families, "of the library, /metrics only"
    ours = {name for name in families if not name.startswith("process_")}
    assert ours <= {metric.prometheus for metric in METRICS} | {"target_info"}
    labels = {label for metric in METRICS for label in prometheus_labels(metric)}
    found = {
        name for line in text.splitlines() if line.startswith(("medusa", "spec", "gen")) for name in names_in(line)
    }
    assert found <= labels | {"le"}


def names_in(line: str) -> list[str]:
    return re.findall(r'(\w+)="', line)


def test_grpc_reaches_another_collector() -> None:
    with rotel() as (endpoint, wait_for), pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        providers = open_providers(TelemetrySettings(traces="grpc"), make_resource("1", "replica"))
        telemetry = Telemetry(providers, None)
        with running_gateway(telemetry=telemetry) as live:
            live.client.chat.completions.create(
                model="fake-model",
                messages=[{"role": "user", "content": "hello"}],
                extra_headers={"traceparent": f"00-{TRACE}-{PARENT}-01"},
            )
            live.wait_idle()
        telemetry.shutdown()
        log = wait_for(r"chat fake-model")
        assert TRACE in log
        for name in CHILD_SPANS:
            assert re.search(rf"\b{name}\b", log), name
