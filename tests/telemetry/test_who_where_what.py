"""Who asked, who answered and what it came to: in headers, log lines, spans, counters, and for the whole fleet."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest
from opentelemetry.trace import SpanKind

from gateway.auth.access import Access, open_keys
from gateway.routing.spec import HealthCheck, UpstreamSpec
from gateway.serving import fleet_lookup
from gateway.serving.controller import Controller
from gateway.serving.statistics_store import store_opener
from gateway.serving.targets import Backends, UpstreamTarget
from policy.runtime import PolicyRuntime
from telemetry.attributes import Attributes as A
from telemetry.logs import REQUEST_LOG, JsonFormatter
from tests.support.access_helpers import bearer, entry, new_key, write_keys
from tests.support.live_gateway import MODEL, LiveGateway, running_gateway
from tests.support.scripted_upstream import DONE, event, scripted_upstream, stream
from tests.support.valkey import ValkeyProcess
from tests.telemetry.test_telemetry_requests import HELLO, Observed, observing

CHAT = "/v1/chat/completions"
BODY = {"model": MODEL, "messages": HELLO, "max_tokens": 12}


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    logger = logging.getLogger(REQUEST_LOG)
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield stream
    logger.removeHandler(handler)
    logger.setLevel(before)


def last_line(log: io.StringIO) -> dict[str, Any]:
    return json.loads(log.getvalue().splitlines()[-1])


def named(observed: Observed, name: str) -> list[dict[str, str]]:
    """The labels of a series of /metrics, as soon as the figures are taken."""
    from gateway.api.metrics import take_figures

    async def take() -> None:
        take_figures(observed.live.state)

    observed.live.in_loop(take())
    return [dict(labels) for labels in observed.samples(name)]


@pytest.mark.parametrize("by_tenant", [False, True])
def test_the_tenant_is_in_log_and_span_and_on_demand_in_counters(
    tmp_path: Path, log: io.StringIO, by_tenant: bool
) -> None:
    key = new_key()
    write_keys(tmp_path / "keys.json", entry("alice", key, limits={"requests_per_minute": 2}))
    access = Access(open_keys(tmp_path / "keys.json"), local=True)
    with observing(gateway={"access": access}, by_tenant=by_tenant) as observed:
        http = observed.live.http
        assert http.post(CHAT, json=BODY, headers=bearer(key)).status_code == 200
        observed.live.wait_idle()
        line, server = last_line(log), observed.spans()["server"]
        assert line[A.TENANT] == "alice" == (server.attributes or {})[A.TENANT]
        assert line[A.BACKEND] == MODEL
        assert line["message"].endswith(f"by {MODEL} for alice")
        http.post(CHAT, json=BODY, headers=bearer(key))
        assert http.post(CHAT, json=BODY, headers=bearer(key)).status_code == 429
        assert last_line(log)[A.TENANT] == "alice", "whose key gets 429 is in the log"
        assert http.post(CHAT, json=BODY, headers=bearer("wrong")).status_code == 401
        named(observed, "medusa_requests_total")
        counted = observed.samples("medusa_requests_total")
        outcomes = {(dict(each)["outcome"], dict(each)["tenant"]) for each, count in counted.items() if count}
        name = "alice" if by_tenant else ""
        assert outcomes == {("ok", name), ("limited", name), ("unauthorized", "")}
        assert [each["tenant"] for each in named(observed, "medusa_prompt_tokens_total")] == [name]
        assert [each["version"] for each in named(observed, "medusa_keys_info")] == [access.keys.status.version]  # type: ignore[union-attr]


def test_every_answer_says_which_replica_gave_it() -> None:
    with running_gateway() as live:
        replica = live.state.controller.statistics.replica
        for answer in (
            live.http.post(CHAT, json=BODY),
            live.http.get("/healthz"),
            live.http.get("/nowhere"),
            live.http.post(CHAT, json={}),
        ):
            assert answer.headers["x-medusa-replica"] == replica
            assert answer.headers["x-medusa-version"]


def fleet(url: str, count: int, opened: ExitStack) -> list[LiveGateway]:
    policy = PolicyRuntime.from_text(b"version: 1\n")
    return [
        opened.enter_context(running_gateway(controller=Controller(policy, open_store=store_opener(url))))
        for _ in range(count)
    ]


def test_any_replica_tells_of_any_decision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = ValkeyProcess(tmp_path).start()
    try:
        with ExitStack() as opened:
            one, two, _ = fleet(server.url, 3, opened)
            answer = one.http.post(CHAT, json=BODY, headers={"x-request-id": "mine"})
            mine = one.http.get("/admin/decisions/mine").raise_for_status().json()
            assert mine["replica"] == answer.headers["x-medusa-replica"]
            for name in ("mine", answer.json()["id"]):
                assert two.http.get(f"/admin/decisions/{name}").raise_for_status().json() == mine
            monkeypatch.setattr(fleet_lookup, "PATIENCE_S", 0.5)
            refused = two.http.get("/admin/decisions/nobodys")
            assert refused.status_code == 404
            assert "No other replica has answered" in refused.json()["error"]["message"]
            server.kill()
            refused = two.http.get("/admin/decisions/mine")
            assert refused.status_code == 404
            assert "could not be asked" in refused.json()["error"]["message"]
    finally:
        server.kill()


def test_attempts_are_client_spans_and_outcomes_are_counted(log: io.StringIO) -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": 20, "total_tokens": 27}
    with scripted_upstream() as upstream:
        upstream.script = lambda: stream(event("Hel"), event("lo"), event(None, "stop", usage=usage), DONE)
        same: dict[str, Any] = {"upstream_model": "theirs", "health": HealthCheck(every_s=3600.0)}
        dead = UpstreamSpec("dead", MODEL, "http://127.0.0.1:9/v1", **same)
        well = UpstreamSpec("well", MODEL, upstream.url, **same)
        backends = Backends([UpstreamTarget(dead), UpstreamTarget(well)], frozenset())
        with observing(gateway={"backends": backends}) as observed:
            assert observed.live.http.post(CHAT, json={**BODY, "stream": True}).status_code == 200
            observed.live.wait_idle()
            spans = observed.spans()
            server = spans["server"]
            clients = [span for span in observed.exporter.get_finished_spans() if span.kind is SpanKind.CLIENT]
            told = [dict(span.attributes or {}) for span in clients]
            assert [(each[A.BACKEND], each[A.OUTCOME]) for each in told] == [
                ("dead", "upstream_unavailable"),
                ("well", "completed"),
            ]
            assert [each.get("error.type") for each in told] == ["upstream_unavailable", None]
            assert (told[0]["server.address"], told[0]["server.port"]) == ("127.0.0.1", 9)
            for span in clients:
                assert span.parent is not None and server.context is not None
                assert span.parent.span_id == server.context.span_id
            # The upstream's own spans go below the attempt.
            carried = upstream.requests[-1][1]["traceparent"]
            assert clients[1].context is not None
            assert carried.split("-")[2] == f"{clients[1].context.span_id:016x}"
            line = last_line(log)
            assert line[A.BACKEND] == "well"
            assert line[A.ATTEMPTS] == ["dead: upstream_unavailable", "well: completed"]
            assert (line["gen_ai.usage.input_tokens"], line["gen_ai.usage.output_tokens"]) == (7, 20)
            counted = observed.samples
            named(observed, "medusa_backend_requests_total")
            found = {
                (dict(labels)["backend"], dict(labels)["outcome"]): value
                for labels, value in counted("medusa_backend_requests_total").items()
                if value
            }
            assert found == {("dead", "upstream_unavailable"): 1, ("well", "completed"): 1}
            assert list(counted("medusa_completion_tokens_total").values()) == [20]
            assert {each["backend"] for each in named(observed, "medusa_backend_up")} == {"dead", "well"}
            assert named(observed, "medusa_longest_token_gap_seconds_count")


def test_a_stream_that_is_cut_says_how_far_it_came(log: io.StringIO) -> None:
    with observing() as observed:
        observed.decoder.hold(at_step=3)
        chunks = observed.live.client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=40, stream=True)
        seen = [next(iter(chunks)) for _ in range(2)]
        chunks.close()
        observed.live.wait_idle()
        observed.spans()
        line = last_line(log)
        assert seen
        assert line["error.type"] == "client_disconnected"
        assert line["gen_ai.usage.output_tokens"] >= 1
        assert sum(observed.samples("medusa_requests_total").values()) in (0, 1)


def test_an_answer_that_its_deadline_cut_says_whose_it_was(log: io.StringIO) -> None:
    policy = PolicyRuntime.from_text(b"version: 1\ndefaults: {deadline: 50s, control: 10%}\n")
    with observing(gateway={"controller": Controller(policy)}) as observed:
        http = observed.live.http
        told = http.post("/v1/decoding/explain", json={**BODY, "decoding": {"deadline_ms": 2000}}).json()
        assert told["deadline"] == {"seconds": 2.0, "set_by": "client"}
        assert http.post("/v1/decoding/explain", json=BODY).json()["deadline"] == {"seconds": 50.0, "set_by": "policy"}
        answer = http.post(CHAT, json=BODY, headers={"x-request-id": "r"})
        assert answer.status_code == 200
        kept = http.get("/admin/decisions/r").json()
        assert kept["deadline"] == {"seconds": 50.0, "set_by": "policy"}
        assert kept["backend"] == MODEL
        observed.live.wait_idle()
        decide = next(span for span in observed.exporter.get_finished_spans() if span.name == "decide")
        assert (decide.attributes or {})[A.DEADLINE_OF] == "policy"


def test_the_share_of_the_control_group_is_told() -> None:
    policy = PolicyRuntime.from_text(b"version: 1\ndefaults: {control: 10%}\n")
    with running_gateway(controller=Controller(policy)) as live:
        told = live.http.post("/v1/decoding/explain", json=BODY).json()
        if live.decoder.info.num_heads:
            assert told["decision"]["control_share"] == 0.1
            assert "drawn at random to decode vanilla" in told["notes"][0]
        else:
            assert (told["decision"]["control_share"], told["notes"]) == (None, [])
            assert told["decision"]["group"] == "vanilla", "a model without heads is no control group"


def test_what_the_process_is_and_does_is_scraped() -> None:
    with observing() as observed:
        assert isinstance(observed.live.client, openai.OpenAI)
        (build,) = named(observed, "medusa_build_info")
        assert build["replica"] == observed.live.state.controller.statistics.replica
        assert named(observed, "medusa_policy_info")
        text = observed.live.http.get("/metrics").text
        for name in ("process_resident_memory_bytes", "process_open_fds", "process_start_time_seconds"):
            assert f"\n{name} " in text
        observed.live.http.post(CHAT, json=BODY)
        observed.live.wait_idle()
        for name in ("medusa_draining", "medusa_places_limit", "medusa_file_hangs", "medusa_policy_rejected"):
            assert named(observed, name)
