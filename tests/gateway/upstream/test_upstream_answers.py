"""When an upstream's answer begins, what it costs, and how often it is asked for: by scripts, over real sockets."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import httpx
import msgspec
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.completions import ChatCall, CompletionCall
from gateway.auth.access import Access, open_keys
from gateway.routing.circuit_breaker import BreakerSettings
from gateway.routing.spec import HealthCheck, Placement, Timeouts, UpstreamSpec
from gateway.serving import pipeline
from gateway.serving.targets import Backends, UpstreamTarget
from gateway.upstream import stream as streams
from gateway.upstream.chunk import Chunk, read_chunk
from gateway.upstream.errors import UpstreamFailure, retry_after_seconds
from gateway.upstream.sse import MalformedStream
from gateway.upstream.stream import _MOST_HELD
from gateway.upstream.tally import Tally
from gateway.wire.event_stream import in_one_line
from gateway.wire.requests import ChatCompletionRequest, ChatMessage, CompletionRequest
from policy.limits.limiter import Limiter
from telemetry.logs import REQUEST_LOG
from telemetry.request import RequestRecord
from telemetry.service import RequestTrace, Telemetry
from telemetry.tracing import child_spans
from tests.support.access_helpers import bearer, entry, new_key, write_keys
from tests.support.live_gateway import LiveGateway, running_gateway
from tests.support.scripted_upstream import (
    DONE,
    GOOD,
    HANG,
    MODELS,
    ScriptedUpstream,
    answer,
    event,
    scripted_upstream,
    stream,
)

MODEL = "ours"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": MODEL, "prompt": "hi"}
QUICK = Timeouts(connect_s=5.0, first_byte_s=0.2, between_bytes_s=0.2, total_s=20.0)
PATIENT = Timeouts(connect_s=5.0, first_byte_s=60.0, between_bytes_s=60.0, total_s=60.0)
ROLE = event("").replace(b'"content"', b'"role": "assistant", "content"')
END = event(None, "stop")


def data(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def counted(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def remote(name: str, upstream: ScriptedUpstream, **changes: Any) -> UpstreamTarget:
    settings = {"upstream_model": "theirs", "timeouts": PATIENT, "health": HealthCheck(every_s=3600.0), **changes}
    return UpstreamTarget(UpstreamSpec(name, MODEL, upstream.url, **settings))


class Remembering(Telemetry):
    """Keeps the records of requests that are over."""

    def finish(self, request: RequestTrace) -> None:
        super().finish(request)
        records.append(request.record)


records: list[RequestRecord] = []


@contextmanager
def gateway_over(*backends: UpstreamTarget, **state: Any) -> Iterator[LiveGateway]:
    records.clear()
    with running_gateway(backends=Backends(backends, frozenset()), telemetry=Remembering.off(), **state) as live:
        yield live


@pytest.fixture(scope="module")
def upstreams() -> Iterator[tuple[ScriptedUpstream, ScriptedUpstream]]:
    with scripted_upstream() as first, scripted_upstream() as second:
        yield first, second


@pytest.fixture
def first(upstreams: tuple[ScriptedUpstream, ScriptedUpstream]) -> ScriptedUpstream:
    each = upstreams[0]
    each.script, each.health = lambda: GOOD, lambda: answer(200, MODELS)
    each.requests.clear()
    return each


@pytest.fixture
def second(upstreams: tuple[ScriptedUpstream, ScriptedUpstream]) -> ScriptedUpstream:
    each = upstreams[1]
    each.script = lambda: GOOD
    each.requests.clear()
    return each


def until(condition: Any) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# When an answer begins.

SAYS_NOTHING = {
    "role": ROLE,
    "empty": event(""),
    "null": event("x").replace(b'"x"', b"null"),
    "nothing in lists": event("").replace(b'"content": ""', b'"tool_calls": [], "refusal": null'),
    "no choices": data(choices=[]),
    "null for choices": data(choices=None),
    "no text": data(choices=[{"index": 0, "text": "", "finish_reason": None}]),
    "no logprobs": data(choices=[{"index": 0, "text": "", "logprobs": {"content": [], "refusal": None}}]),
    "usage": data(choices=[], usage=counted(3, 0)),
}
ENDS = {"error": data(error={"message": "overloaded"}), "cut": b"", "silent": HANG, "done": DONE}


@pytest.fixture(scope="module")
def two(upstreams: tuple[ScriptedUpstream, ScriptedUpstream]) -> Iterator[LiveGateway]:
    never = BreakerSettings(failures=1000)
    with gateway_over(
        remote("first", upstreams[0], timeouts=QUICK, breaker=never),
        remote("second", upstreams[1], placement=Placement(priority=1)),
    ) as live:
        yield live


@pytest.fixture(scope="module")
def one(upstreams: tuple[ScriptedUpstream, ScriptedUpstream]) -> Iterator[LiveGateway]:
    with gateway_over(remote("first", upstreams[0], breaker=BreakerSettings(failures=1000))) as live:
        yield live


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("path", ["chat", "text"])
@pytest.mark.parametrize("streaming", [True, False], ids=["streamed", "whole"])
def test_until_something_is_said_a_failure_goes_elsewhere(
    two: LiveGateway, first: ScriptedUpstream, second: ScriptedUpstream, end: str, path: str, streaming: bool
) -> None:
    first.script = lambda: stream(*SAYS_NOTHING.values(), *([ENDS[end]] if ENDS[end] else []), ended=end != "cut")
    good = data(choices=[{"index": 0, "text": "Hello", "finish_reason": "stop"}])
    second.script = lambda: GOOD if path == "chat" else stream(good, DONE)
    failed = two.http.get("/admin/backends").json()["backends"][0]["counts"]
    body, url = (CHAT, "/v1/chat/completions") if path == "chat" else (TEXT, "/v1/completions")
    said = two.http.post(url, json={**body, "stream": streaming})
    assert said.status_code == 200
    assert '{"error"' not in said.text
    assert "Hel" in said.text
    assert '"backend":"second"' in said.text
    counts = two.http.get("/admin/backends").json()["backends"][0]["counts"]
    assert sum(counts.values()) - sum(failed.values()) == 2, "one request, one failure"
    assert (len(first.requests), len(second.requests)) == (1, 1)


@pytest.mark.parametrize("kind", SAYS_NOTHING)
def test_what_says_nothing_begins_nothing(kind: str) -> None:
    raw = SAYS_NOTHING[kind].removeprefix(b"data: ").strip()
    chunk = read_chunk(raw, 1, "a")
    assert (chunk.begins, chunk.parts, chunk.characters) == (False, 0, 0)


@pytest.mark.parametrize(
    ("choice", "parts", "characters"),
    [
        ({"delta": {"content": " "}}, 1, 1),
        ({"delta": {"role": "assistant", "reasoning_content": "hm"}}, 1, 2),
        ({"delta": {"refusal": "no"}}, 1, 2),
        ({"delta": {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": ""}}]}}, 1, 1),
        ({"text": "ab"}, 1, 2),
        ({"delta": {"content": ""}, "logprobs": {"content": [{"token": "", "logprob": -1.0, "bytes": []}]}}, 1, 0),
        ({"text": "", "logprobs": {"tokens": [""], "token_logprobs": [-1.0], "top_logprobs": None}}, 1, 0),
        ({"delta": {}, "finish_reason": "stop"}, 0, 0),
    ],
)
def test_what_says_something_begins(choice: dict[str, Any], parts: int, characters: int) -> None:
    chunk = read_chunk(json.dumps({"choices": [{"index": 0, **choice}]}).encode(), 1, "a")
    assert (chunk.begins, chunk.parts, chunk.characters) == (True, parts, characters)


def test_the_first_token_is_the_first_that_says_something(first: ScriptedUpstream) -> None:
    """Nor does the response start before it, nor a half-open circuit close. What was held back is not lost."""
    gate = threading.Event()
    backend = remote("first", first, breaker=BreakerSettings(failures=1, open_s=0.01))
    with gateway_over(backend) as live, ThreadPoolExecutor() as pool:
        first.script = lambda: answer(500, b"")
        assert live.http.post("/v1/chat/completions", json=CHAT).status_code == 502
        assert backend.breaker.tripped
        until(lambda: backend.breaker.allows(time.monotonic()))
        # More of it than is kept: what comes past that is forgotten.
        first.script = lambda: stream(ROLE, *[event("")] * (2 * _MOST_HELD), gate, event("ok"), END, DONE)
        heard = backend._heard_at
        asked = pool.submit(live.http.post, "/v1/chat/completions", json={**CHAT, "stream": True})
        until(lambda: backend._heard_at > heard)
        assert backend.breaker.tripped, "a role is no answer"
        assert not asked.done()
        opened_at = time.monotonic()
        gate.set()
        said = asked.result()
        assert not backend.breaker.tripped
        assert '"role":"assistant"' in said.text.replace(" ", "")
        assert said.text.count("data: ") == _MOST_HELD + 3
        until(lambda: len(records) == 2)
        assert records[1].first_token_at is not None
        assert records[1].first_token_at >= opened_at
        assert records[0].first_token_at is None


# What it costs.

NO_COUNTS = (b"null", b"{}", b"[]", b'{"total_tokens":"x"}', b'{"total_tokens":-5}')
chunks = st.tuples(
    st.none() | st.integers(1, 5000), st.sampled_from(NO_COUNTS), st.integers(0, 3000), st.integers(0, 3)
)


@given(st.lists(chunks, max_size=6), st.integers(0, 50))
def test_no_order_of_chunks_costs_less_than_what_was_counted_or_came(found: list[Any], prompt: int) -> None:
    tally = Tally(prompt)
    for count, no_count, characters, parts in found:
        usage = no_count if count is None else json.dumps(counted(count, count)).encode()
        tally.take(Chunk(usage=msgspec.Raw(usage), characters=characters, parts=parts))
    largest = 2 * max((count for count, *_ in found if count is not None), default=0)
    assert tally.tokens >= largest
    if not largest:
        assert tally.tokens - prompt >= max(sum(each[2] for each in found) / 4, sum(each[3] for each in found))
        return
    assert msgspec.json.decode(tally.usage)["total_tokens"] == largest, "what the client is told"
    if found[-1][0] is not None and 2 * found[-1][0] == largest:
        assert tally.tokens == largest, "nothing came that it can't have counted"


FINISHED = data(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}], usage=counted(4000, 900))
ORDERS = {
    "with the end": [event("hi"), FINISHED],
    "an empty chunk after it": [event("hi"), FINISHED, data(choices=[])],
    "a null after it": [event("hi"), FINISHED, data(choices=[], usage=None)],
    "in all but the last": [event("hi", usage=counted(4000, 900)), END],
    "less after it": [event("hi"), FINISHED, data(choices=[], usage=counted(0, 1))],
    "after a null": [event("hi", usage=None), END, data(choices=[], usage=counted(4000, 900))],
    "before anything": [data(choices=[], usage=counted(4000, 900)), event("hi"), END],
    "without a total": [event("hi"), END, data(choices=[], usage={"prompt_tokens": 4000, "completion_tokens": 900})],
}


@pytest.fixture(scope="module")
def paying(
    upstreams: tuple[ScriptedUpstream, ScriptedUpstream], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """Calls the gateway with a key whose limit does not refill, and gives back what the call has cost."""
    first, key, file = upstreams[0], new_key(), tmp_path_factory.mktemp("payer") / "keys"
    write_keys(file, entry("payer", key, limits={"tokens_per_minute": 10**9}))
    access = Access(open_keys(file), limiter=Limiter(clock=lambda: 0.0))
    probe = {**CHAT, "max_tokens": 1}
    probed = stream(event("x", "stop"), data(choices=[], usage=counted(1, 1)), DONE)

    with gateway_over(remote("first", first), access=access) as live:

        def left() -> int:
            script, first.script = first.script, lambda: probed
            headers = live.http.post("/v1/chat/completions", json=probe, headers=bearer(key)).headers
            first.script = script
            return int(headers["x-ratelimit-remaining-tokens"])

        def cost(call: Any) -> int:
            records.clear()
            before = left()
            call(live, bearer(key))
            live.wait_idle()
            return before - 2 - left()

        yield cost


@pytest.mark.parametrize("streaming", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("order", ORDERS)
def test_the_upstreams_count_is_paid(
    first: ScriptedUpstream, paying: Any, order: str, streaming: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, REQUEST_LOG)
    first.script = lambda: stream(*ORDERS[order], DONE)
    body = {**CHAT, "stream": streaming}
    shown = {"stream_options": {"include_usage": True}} if streaming else {}

    def call(live: LiveGateway, headers: dict[str, str]) -> None:
        answered = live.http.post("/v1/chat/completions", json={**body, **shown}, headers=headers)
        said = answered.text
        assert '"prompt_tokens":4000' in said.replace(" ", ""), "and the client is told the same"

    assert paying(call) == 4900
    until(lambda: len(records) >= 2)
    told = max(records, key=lambda each: each.output_tokens)
    assert (told.prompt_tokens, told.output_tokens, told.finish_reasons) == (4000, 900, ("stop",))
    assert "200: 900 tokens in" in caplog.text
    assert [span.name for span in child_spans(told)] == ["classify", "decide"], "no engine's, so none that was aborted"


def test_without_a_count_length_is_paid(first: ScriptedUpstream, paying: Any) -> None:
    words = [event("word " * 400) for _ in range(10)]
    first.script = lambda: stream(*words, END, DONE)

    def read(live: LiveGateway, headers: dict[str, str]) -> None:
        live.http.post("/v1/chat/completions", json={**CHAT, "stream": True}, headers=headers).raise_for_status()

    def leave(live: LiveGateway, headers: dict[str, str]) -> None:
        body = {**CHAT, "stream": True}
        with live.http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as said:
            read = b""
            for piece in said.iter_bytes():
                read += piece
                if read.count(b"word word") and read.count(b"data: ") == 10:
                    break
        first.wait_left()

    assert paying(read) == 5001, "20,000 characters at four a token, and the prompt"
    first.script = lambda: stream(*words, HANG)
    assert paying(leave) == 5001, "a client that leaves has had what came"
    (left,) = [each for each in records if each.error is not None]
    assert (left.output_tokens, left.error) == (5000, "client_disconnected")
    assert [span.name for span in child_spans(left)] == ["classify", "decide"], "no engine has decoded"
    early = data(choices=[], usage=counted(10, 1))
    first.script = lambda: stream(early, *words, HANG)
    assert paying(leave) == 5001, "a count that was given before it came is none of it"


def test_half_an_answer_that_nobody_is_given_costs_nothing(first: ScriptedUpstream, paying: Any) -> None:
    first.script = lambda: stream(event("word " * 400), ended=False)

    def call(live: LiveGateway, headers: dict[str, str]) -> None:
        assert live.http.post("/v1/chat/completions", json=CHAT, headers=headers).status_code == 502

    assert paying(call) == 0


def test_an_end_that_does_not_come_is_not_waited_for(first: ScriptedUpstream, monkeypatch: pytest.MonkeyPatch) -> None:
    """All was said. Whether the upstream then hangs or breaks, the answer is whole and its backend well."""
    monkeypatch.setattr(streams, "_USAGE_S", 0.05)
    backend = remote("first", first)
    with gateway_over(backend) as live:
        for last in (HANG, b""):
            first.script = lambda last=last: stream(event("ok"), END, *([last] if last else []), ended=False)
            assert live.http.post("/v1/chat/completions", json=CHAT).status_code == 200
            said = live.http.post("/v1/chat/completions", json={**CHAT, "stream": True}).text
            assert '{"error"' not in said
            assert said.index('"finish_reason":"stop"') < said.index('"decoding"') < said.index("[DONE]")
        assert backend.counts == {"requests": 4, "completed": 4}
    assert [each.error for each in records] == [None] * 4
    assert all(each.output_tokens == 1 for each in records)


def test_an_end_that_is_said_twice_is_passed_on_twice(one: LiveGateway, first: ScriptedUpstream) -> None:
    first.script = lambda: stream(event("a"), event("b", "stop"), END, DONE)
    said = one.http.post("/v1/chat/completions", json={**CHAT, "stream": True}).text
    events = [json.loads(line[6:]) for line in said.splitlines() if line.startswith("data: {")]
    assert "".join(each["choices"][0]["delta"].get("content", "") for each in events) == "ab"
    assert ["decoding" in each for each in events] == [False, False, True]


def test_an_estimate_of_something_is_not_nothing() -> None:
    def chat(text: str) -> list[int]:
        return ChatCall(ChatCompletionRequest(model=MODEL, messages=[ChatMessage("user", text)])).estimated_tokens

    def text(prompt: Any) -> list[int]:
        return CompletionCall(CompletionRequest(model=MODEL, prompt=prompt)).estimated_tokens

    assert [chat("x" * n) for n in (0, 1, 3, 4, 5)] == [[0], [1], [1], [1], [2]]
    assert text("ab") == [1]
    assert text(["ab", "abcde"]) == [1, 2]
    assert text([[1, 2, 3], [4]]) == [3, 1]
    assert text([7, 8]) == [2]


# How often it is asked.


@contextmanager
def fresh(first: ScriptedUpstream) -> Iterator[tuple[LiveGateway, UpstreamTarget]]:
    """A gateway whose health check leaves no connection behind."""
    first.health = lambda: answer(200, MODELS, extra="connection: close\r\n")
    backend = remote("first", first)
    with gateway_over(backend) as live:
        until(lambda: backend.health.ok)
        yield live, backend


def test_over_a_new_connection_a_post_is_sent_once(first: ScriptedUpstream) -> None:
    first.script = list
    with fresh(first) as (live, _):
        assert live.http.post("/v1/chat/completions", json=CHAT).status_code == 502
    assert len(first.requests) == 1


def test_over_a_kept_connection_that_is_dead_it_is_sent_again(
    first: ScriptedUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "STALE_S", 60.0)  # on a busy machine all takes its time
    with fresh(first) as (live, _):
        assert live.http.post("/v1/chat/completions", json=CHAT).status_code == 200
        scripts = iter([[], GOOD])
        first.script = lambda: next(scripts)
        assert live.http.post("/v1/chat/completions", json=CHAT).status_code == 200
    assert len(first.requests) == 3


def test_what_breaks_later_was_no_dead_connection(first: ScriptedUpstream, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that brings an upstream down is not sent to it a second time."""
    monkeypatch.setattr(streams, "STALE_S", -1.0)
    with fresh(first) as (live, _):
        assert live.http.post("/v1/chat/completions", json=CHAT).status_code == 200
        first.script = list
        assert live.http.post("/v1/chat/completions", json=CHAT).status_code == 502
    assert len(first.requests) == 2


def test_a_drain_that_comes_while_limits_are_asked_starts_nothing(
    first: ScriptedUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def charge(scope: Any, access: Any, ticket: Any, **_: Any) -> None:
        await asyncio.sleep(0)
        ticket.abort()

    monkeypatch.setattr(pipeline, "charge", charge)
    with gateway_over(remote("first", first)) as live:
        said = live.http.post("/v1/chat/completions", json=CHAT)
    assert (said.status_code, said.json()["error"]["code"]) == (503, "shutting_down")
    assert not first.requests


# What is no answer, and no check.


def test_choices_that_nobody_asked_for_are_refused_streamed_too(one: LiveGateway, first: ScriptedUpstream) -> None:
    first.script = lambda: stream(event("a"), event("b").replace(b'"index": 0', b'"index": 7'), HANG)
    said = one.http.post("/v1/chat/completions", json={**CHAT, "stream": True}).text
    assert '"index":7' not in said
    assert '"code":"upstream_error"' in said
    for bad in ({"index": -1}, {"delta": "x"}, {"delta": [1]}, {"logprobs": 3}):
        with pytest.raises(MalformedStream):
            read_chunk(json.dumps({"choices": [{"index": 0, **bad}]}).encode(), 1, "a")
    with pytest.raises(MalformedStream):
        read_chunk(b'{"choices":[{"index":0,"delta":{"content":"\xff"}}]}', 1, "a")


def test_an_upstreams_words_about_its_failure_stay_here(one: LiveGateway, first: ScriptedUpstream) -> None:
    secret = "no route to 10.1.2.3:8000/v1/secret"
    first.script = lambda: stream(event("a"), data(error={"message": secret}), HANG)
    assert "10.1.2.3" not in one.http.post("/v1/chat/completions", json={**CHAT, "stream": True}).text
    assert secret in one.http.get("/admin/backends").json()["backends"][0]["last_error"]
    with pytest.raises(UpstreamFailure) as caught:
        read_chunk(json.dumps({"error": {"message": secret}}).encode(), 1, "a")
    assert secret not in caught.value.message


def test_a_health_check_reads_so_much_and_no_more(first: ScriptedUpstream) -> None:
    first.health = lambda: [b"HTTP/1.1 200 OK\r\n\r\n", *[b" " * 65536] * 20, HANG]
    backend = remote("first", first, health=HealthCheck(every_s=3600.0, timeout_s=60.0, failures=1))
    with gateway_over(backend):
        until(lambda: backend.health.ok is False)
    assert "more than 1048576 bytes" in (backend.health.error or "")


def test_a_check_that_the_loop_held_up_says_nothing(first: ScriptedUpstream) -> None:
    backend = remote("first", first, health=HealthCheck(every_s=3600.0, timeout_s=0.2, failures=1))
    with gateway_over(backend) as live:
        until(lambda: backend.health.ok is not None)

        async def held_up() -> None:
            checking = asyncio.create_task(backend.check())
            await asyncio.sleep(0)
            time.sleep(0.5)  # noqa: ASYNC251
            await checking

        live.in_loop(held_up())
        assert (backend.health.ok, backend.health.error) == (True, None)


def test_a_check_of_an_upstream_that_answers_others_says_nothing(first: ScriptedUpstream) -> None:
    gate = threading.Event()
    backend = remote("first", first, health=HealthCheck(every_s=3600.0, timeout_s=0.1, failures=1))
    with gateway_over(backend) as live:
        until(lambda: backend.health.ok is not None)
        first.health = lambda: [HANG]

        async def check(*, busy: bool) -> None:
            checking = asyncio.create_task(backend.check())
            await asyncio.sleep(0.02)
            if busy:
                backend.heard()
            await checking

        live.in_loop(check(busy=True))
        assert backend.health.ok, "it has sent tokens meanwhile"
        live.in_loop(check(busy=False))
        assert backend.health.ok is False
        gate.set()


async def test_an_alarm_that_the_loop_was_late_for_looks_again() -> None:
    rung = asyncio.Event()
    clock = streams._Clock(Timeouts(first_byte_s=0.05), rung.set)
    time.sleep(0.3)  # noqa: ASYNC251
    await asyncio.sleep(0)
    assert not rung.is_set()
    clock.go_on()  # what was there in time is read now
    await asyncio.sleep(0.15)
    assert not rung.is_set()
    clock.stop()
    streams._Clock(Timeouts(first_byte_s=0.05), rung.set)
    async with asyncio.timeout(20):
        await rung.wait()


NOW = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (None, 1),
        ("", 1),
        ("7", 7),
        ("0.5", 1),
        ("1.2", 2),
        ("0", 1),
        ("-3", 1),
        ("3600", 60),
        ("1e9999", 60),
        ("nan", 1),
        ("soon", 1),
        (format_datetime(NOW + timedelta(seconds=45), usegmt=True), 45),
        ((NOW + timedelta(seconds=45)).strftime("%A, %d-%b-%y %H:%M:%S GMT"), 45),
        ((NOW + timedelta(seconds=45)).strftime("%a %b %d %H:%M:%S %Y"), 45),
        (format_datetime(NOW + timedelta(hours=2), usegmt=True), 60),
        (format_datetime(NOW - timedelta(seconds=45), usegmt=True), 1),
        ("Mon, 99 Nov 2026 12:00:45 GMT", 1),
    ],
)
def test_retry_after(given: str | None, seconds: int) -> None:
    assert retry_after_seconds(given, NOW) == seconds


@given(st.text(st.sampled_from("0123456789 -+.:,eEMonNovGT"), max_size=32) | st.floats().map(str))
def test_any_retry_after_is_some_time(given: str) -> None:
    assert 1 <= retry_after_seconds(given, NOW) <= 60


def test_a_retry_after_that_is_a_date_is_passed_on(first: ScriptedUpstream) -> None:
    backend = remote("first", first)
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=45), usegmt=True)
    first.script = lambda: answer(429, b"", extra=f"retry-after: {date}\r\n")
    with gateway_over(backend) as live:
        said = live.http.post("/v1/chat/completions", json=CHAT)
        assert 20 <= int(said.headers["retry-after"]) <= 45
        assert live.http.get("/admin/backends").json()["backends"][0]["busy"]


@given(st.text(st.sampled_from('a\u2028\u2029\u0085\u00e2\u0080é\\"€\U0001f600\x0b\x1c'), max_size=20))
def test_events_stay_in_one_line_and_say_the_same(text: str) -> None:
    raw = msgspec.json.encode({"content": text})
    shown = in_one_line(raw)
    assert json.loads(shown) == {"content": text}
    assert len(shown.decode().splitlines()) == 1


def test_readers_of_lines_read_whole_events(one: LiveGateway, first: ScriptedUpstream) -> None:
    text = "a\u2028b\u2029c\u0085d"
    raw = data(choices=[{"index": 0, "delta": {"content": text}}]).replace(
        json.dumps(text)[1:-1].encode(), text.encode()
    )
    first.script = lambda: stream(raw, END, DONE)
    with one.http.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as said:
        lines = [line.removeprefix("data: ") for line in said.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    assert json.loads(lines[0])["choices"][0]["delta"]["content"] == text
    with openai.OpenAI(base_url=f"{one.url}/v1", api_key="unused") as client:
        chunks: Any = client.chat.completions.create(**CHAT, stream=True)  # type: ignore[arg-type]
        assert next(iter(chunks)).choices[0].delta.content == text


def test_words_of_transport_errors_quote_nothing() -> None:
    from telemetry.words import transport_words

    for error in (
        httpx.LocalProtocolError("Illegal header value b'Bearer SECRET\\n'"),
        httpx.InvalidURL("Invalid port: 'SECRET'"),
        httpx.UnsupportedProtocol("SECRET"),
        httpx.RemoteProtocolError("SECRET"),
        httpx.ProxyError("SECRET"),
        ValueError("SECRET"),
    ):
        assert "SECRET" not in transport_words(error)
        assert type(error).__name__ in transport_words(error)
    assert transport_words(httpx.ConnectError("[Errno 111] Connection refused")).endswith("refused")
