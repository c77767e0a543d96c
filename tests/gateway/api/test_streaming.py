"""Server-sent events: what a client reads, and what happens when it leaves or the engine fails."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from backends.types import DecodingPlan, GenerationStats, TokenChunk
from gateway.admission import Admission
from gateway.http.app import create_app
from gateway.serving.generation import Generation
from gateway.serving.results import ChoiceResult
from gateway.serving.state import GatewayState
from gateway.serving.streaming import ChatChoiceWriter, CompletionChoiceWriter, StreamWriter
from gateway.settings import GatewaySettings
from gateway.wire.errors import Unavailable
from gateway.wire.event_stream import EventStream
from tests.support.fakes import FakeDecoder
from tests.support.live_gateway import MODEL, LiveGateway, running_gateway

SAY_HI: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def gateway() -> Iterator[LiveGateway]:
    with running_gateway() as live:
        yield live


@pytest.fixture(autouse=True)
def nothing_left_behind(gateway: LiveGateway) -> Iterator[None]:
    yield
    gateway.decoder.release()
    gateway.wait_idle()
    gateway.decoder.check_integrity()


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": SAY_HI, "stream": True, "temperature": 0} | fields


def read_events(response: httpx.Response) -> list[dict[str, Any]]:
    """All events of a finished stream; it must be well-formed and end with [DONE]."""
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: ") for event in events[:-1])
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def test_the_text_is_that_of_the_unstreamed_answer(gateway: LiveGateway) -> None:
    whole = gateway.client.chat.completions.create(model=MODEL, messages=SAY_HI, temperature=0)
    parts = list(gateway.client.chat.completions.create(model=MODEL, messages=SAY_HI, temperature=0, stream=True))
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert text == whole.choices[0].message.content
    assert parts[0].choices[0].delta.role == "assistant"
    assert [part.choices[0].finish_reason for part in parts[-2:]] == [None, "stop"]
    assert len({part.id for part in parts}) == 1
    assert parts[0].object == "chat.completion.chunk"
    assert all(part.usage is None for part in parts)
    assert parts[-1].to_dict()["decoding"] == whole.to_dict()["decoding"]


def test_usage_comes_last_and_alone(gateway: LiveGateway) -> None:
    http = gateway.http
    events = read_events(
        http.post("/v1/chat/completions", json=chat(stream_options={"include_usage": True}, max_tokens=7))
    )
    assert [event["usage"] for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1]["choices"] == []
    details = {"prompt_tokens_details": {"cached_tokens": 0}}
    assert events[-1]["usage"] == {"prompt_tokens": 4, "completion_tokens": 7, "total_tokens": 11, **details}
    assert events[-1]["decoding"]["method"] == "medusa"
    assert all("decoding" not in event for event in events[:-1])


@pytest.mark.parametrize("include_usage", [True, None])
@pytest.mark.parametrize(
    ("path", "asked"), [("chat/completions", {"messages": SAY_HI}), ("completions", {"prompt": "hi"})]
)
def test_usage_so_far_in_every_chunk(
    gateway: LiveGateway, path: str, asked: dict[str, Any], include_usage: bool | None
) -> None:
    """What benchmarks ask vLLM for. With speculation, a chunk counts all the tokens that its step accepted."""
    options = {"include_usage": include_usage, "continuous_usage_stats": True}
    body = {"model": MODEL, "stream": True, "temperature": 0, "max_tokens": 20, "n": 2, "stream_options": options}
    events = read_events(gateway.http.post(f"/v1/{path}", json=body | asked))
    prompt = events[-1]["usage"]["prompt_tokens"]
    shown, last = ["", ""], [0, 0]
    for event in events:
        counts = event["usage"]
        assert counts["total_tokens"] == counts["prompt_tokens"] + counts["completion_tokens"]
        assert counts["prompt_tokens"] == prompt
        for choice in event["choices"]:
            # The fake's tokens are bytes, so what was shown so far can be counted; a character's first bytes are not.
            text = choice.get("text") or choice.get("delta", {}).get("content") or ""
            shown[choice["index"]] += text
            last[choice["index"]] = len(shown[choice["index"]].encode())
        assert 0 <= counts["completion_tokens"] - sum(last) <= 6
    totals = [event["usage"]["completion_tokens"] for event in events]
    assert totals == sorted(totals)
    assert totals[-1] == 40
    assert len(set(totals)) > 5
    assert (events[-1]["choices"] == []) is bool(include_usage)


def test_headers(gateway: LiveGateway) -> None:
    http = gateway.http
    headers = http.post("/v1/chat/completions", json=chat()).headers
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert headers["cache-control"] == "no-cache"
    assert headers["x-accel-buffering"] == "no"


@pytest.mark.parametrize("include_usage", [True, False])
def test_n_choices(gateway: LiveGateway, include_usage: bool) -> None:
    whole = gateway.client.chat.completions.create(model=MODEL, messages=SAY_HI, n=3, seed=5)
    texts = ["", "", ""]
    finished: list[int] = []
    chunks = gateway.client.chat.completions.create(
        model=MODEL, messages=SAY_HI, n=3, seed=5, stream=True, stream_options={"include_usage": include_usage}
    )
    last: Any = None
    for chunk in chunks:
        last = chunk
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            finished += [choice.index] if choice.finish_reason else []
    assert texts == [choice.message.content for choice in whole.choices]
    assert sorted(finished) == [0, 1, 2]
    assert last.to_dict()["decoding"] == whole.to_dict()["decoding"]
    assert (last.usage == whole.usage) is include_usage


def test_streamed_logprobs(gateway: LiveGateway) -> None:
    ask: dict[str, Any] = {"model": MODEL, "messages": SAY_HI, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    whole = gateway.client.chat.completions.create(**ask).choices[0].logprobs
    entries = []
    for chunk in gateway.client.chat.completions.create(**ask, stream=True):
        if (logprobs := chunk.choices[0].logprobs) is not None:
            entries += logprobs.content or []
    assert whole is not None
    assert entries == whole.content


def test_a_stop_string_is_never_shown_in_part(gateway: LiveGateway) -> None:
    whole = gateway.client.chat.completions.create(model=MODEL, messages=SAY_HI, temperature=0)
    content = whole.choices[0].message.content or ""
    stop = content[8:16]
    parts = gateway.client.chat.completions.create(model=MODEL, messages=SAY_HI, temperature=0, stop=stop, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == content[: content.index(stop)]


async def test_the_async_client(gateway: LiveGateway) -> None:
    async with gateway.async_client() as client:
        stream = await client.completions.create(model=MODEL, prompt="x", temperature=0, stream=True)
        text = "".join([chunk.choices[0].text async for chunk in stream])
        whole = await client.completions.create(model=MODEL, prompt="x", temperature=0)
    assert text == whole.choices[0].text


# The client leaves.


def connect(gateway: LiveGateway, body: dict[str, Any], receive_buffer: int | None = None) -> socket.socket:
    """Send a request over a bare socket, to be closed at will."""
    host, port = gateway.url.removeprefix("http://").split(":")
    client = socket.socket()
    if receive_buffer is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.connect((host, int(port)))
    content = json.dumps(body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    client.sendall(head.encode() + f"content-length: {len(content)}\r\n\r\n".encode() + content)
    return client


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [True, False])
def test_leaving_before_the_first_token_aborts(gateway: LiveGateway, stream: bool, n: int) -> None:
    decoder = gateway.decoder
    decoder.hold()
    before = len(decoder.submitted)
    client = connect(gateway, chat(stream=stream, n=n, temperature=1))
    decoder.wait_until(lambda fake: len(fake.submitted) == before + n)
    client.close()
    ours = {request.request_id for request in decoder.submitted[before:]}
    decoder.wait_until(lambda fake: ours <= set(fake.aborted))
    gateway.wait_idle()
    decoder.check_integrity()


@pytest.mark.parametrize("n", [1, 3])
def test_leaving_in_the_middle_of_a_stream_aborts(gateway: LiveGateway, n: int) -> None:
    decoder = gateway.decoder
    decoder.hold(at_step=2)
    before = len(decoder.submitted)
    client = connect(gateway, chat(n=n))
    assert b"200 OK" in client.recv(65536)
    client.close()
    ours = {request.request_id for request in decoder.submitted[before:]}
    assert len(ours) == n
    decoder.wait_until(lambda fake: ours <= set(fake.aborted))
    gateway.wait_idle()
    decoder.check_integrity()


def test_leaving_while_the_server_is_blocked_writing_aborts() -> None:
    decoder = FakeDecoder(max_model_len=2**20, natural_length=2**20)
    with running_gateway(GatewaySettings(default_max_tokens=400_000), decoder) as live:
        client = connect(live, chat(decoding={"method": "vanilla"}), receive_buffer=4096)

        async def blocked() -> None:
            connections: Any = live.server.server_state.connections
            # uvicorn tells nobody when its buffer is full, so this one is looked for.
            while not any(connection.flow.write_paused for connection in connections):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

        live.in_loop(blocked())
        client.close()
        decoder.wait_until(lambda fake: len(fake.aborted) == 1)
        live.wait_idle()


def test_an_answer_after_a_cancelled_one_is_right(gateway: LiveGateway) -> None:
    right = gateway.client.chat.completions.create(model=MODEL, messages=SAY_HI, temperature=0)
    for _ in range(5):
        stream = gateway.client.chat.completions.create(model=MODEL, messages=SAY_HI, temperature=0, stream=True)
        next(iter(stream))
        stream.close()
    again = gateway.client.chat.completions.create(model=MODEL, messages=SAY_HI, temperature=0)
    assert again.choices[0].message == right.choices[0].message


async def test_a_stream_that_never_started_is_closed_too() -> None:
    closed: list[bool] = []

    async def never() -> Any:
        yield b"data"  # pragma: no cover

    async def gone(message: Any) -> None:
        raise OSError("the client is gone")

    with pytest.raises(OSError, match="gone"):
        await EventStream(never(), close=lambda: closed.append(True))({}, None, gone)
    assert closed == [True]


async def test_leaving_while_the_body_is_read_is_no_server_error(caplog: pytest.LogCaptureFixture) -> None:
    state = GatewayState.create({})
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json"), (b"content-length", b"100")]
    scope: Any = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "query_string": b""}
    await create_app(state)(scope, receive, send)
    assert sent[0]["status"] == 499
    assert not caplog.records


# The engine fails.


def test_a_failure_in_the_middle_is_an_error_event(gateway: LiveGateway) -> None:
    gateway.decoder.fail(at_step=2)
    try:
        http = gateway.http
        events = read_events(http.post("/v1/chat/completions", json=chat()))
        with pytest.raises(openai.APIError, match="the engine failed on this request") as caught:
            list(gateway.client.chat.completions.create(model=MODEL, messages=SAY_HI, stream=True))
    finally:
        gateway.decoder.fail(at_step=None)
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert events[-1]["error"]["code"] == "engine_error"
    assert set(events[-1]["error"]) == {"message", "type", "param", "code"}
    assert "told to fail" not in f"{events}{caught.value}", "the engine's words are for its log"


def test_a_failure_before_the_first_token_has_its_status(gateway: LiveGateway) -> None:
    gateway.decoder.fail(at_step=0)
    try:
        with pytest.raises(openai.InternalServerError) as caught:
            gateway.client.chat.completions.create(model=MODEL, messages=SAY_HI, stream=True, n=2)
    finally:
        gateway.decoder.fail(at_step=None)
    assert caught.value.code == "engine_error"


# The pieces.


class Scripted:
    """A decoder whose one handle says what it is told to; for ends that a real engine should never come to."""

    def __init__(self, items: list[TokenChunk | Exception]) -> None:
        self.items = items
        self.aborts = 0
        self.info = FakeDecoder().info
        self.alive = True

    def submit(self, request: Any) -> Any:
        return self

    def load(self) -> Any: ...

    def close(self) -> None: ...

    def abort(self) -> None:
        self.aborts += 1

    async def __aiter__(self) -> Any:
        for item in self.items:
            if isinstance(item, Exception):
                raise item
            yield item


class NoTicket:
    on_abort = None
    aborted = False
    used_tokens: int | None = None

    def __init__(self) -> None:
        self.closed = 0

    def finish_one(self) -> None: ...

    def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("items", [[], [TokenChunk("x")], [TokenChunk("x"), TokenChunk("", finish_reason="abort")]])
async def test_a_sequence_that_ends_without_a_finish_is_an_error(items: list[Any], count: int) -> None:
    ticket: Any = NoTicket()
    generation = Generation(Scripted(items), [None] * count, ticket)  # type: ignore[list-item]
    with pytest.raises(Unavailable) as caught:
        [item async for item in generation.chunks()]
    assert caught.value.code == "engine_aborted"
    generation.close()
    generation.close()
    assert ticket.closed == 1


@pytest.mark.parametrize("count", [1, 2])
async def test_an_exception_of_the_engine_comes_through(count: int) -> None:
    ticket: Any = NoTicket()
    generation = Generation(Scripted([RuntimeError("bug")]), [None] * count, ticket)  # type: ignore[list-item]
    with pytest.raises(RuntimeError, match="bug"):
        [item async for item in generation.chunks()]
    generation.close()


async def test_a_request_that_was_aborted_before_it_was_submitted() -> None:
    admission = Admission(capacity=1)
    ticket = admission.admit(1)
    ticket.abort()
    decoder = FakeDecoder()
    with pytest.raises(Unavailable):
        Generation(decoder, [], ticket)
    assert decoder.submitted == []


def writer(*writers: Any, include_usage: bool = False) -> StreamWriter:
    return StreamWriter(
        response_id="id",
        object_name="o",
        created=1,
        model="m",
        include_usage=include_usage,
        continuous_usage=False,
        prompt_tokens=3,
        prompts=1,
        plan=DecodingPlan(),
        writers=list(writers),
        results=[ChoiceResult() for _ in writers],
    )


def test_hand_made_events_are_json() -> None:
    tricky = 'quote " backslash \\ newline \n emoji 🙂 nul \0 separator \u2028'
    out = writer(ChatChoiceWriter()).event(0, TokenChunk(tricky, num_tokens=1), last=False)
    opening, delta = out.decode().removesuffix("\n\n").split("\n\n")
    assert json.loads(opening.removeprefix("data: "))["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    event = json.loads(delta.removeprefix("data: "))
    assert event["choices"][0] == {"index": 0, "delta": {"content": tricky}, "logprobs": None, "finish_reason": None}
    assert {key: event[key] for key in ("id", "object", "created", "model")} == {
        "id": "id",
        "object": "o",
        "created": 1,
        "model": "m",
    }


def test_a_chunk_with_nothing_to_show_makes_no_event() -> None:
    assert writer(CompletionChoiceWriter()).event(0, TokenChunk("", num_tokens=2), last=False) == b""


def test_only_the_last_finish_carries_the_report() -> None:
    events = writer(ChatChoiceWriter(), ChatChoiceWriter())
    end = TokenChunk(
        "", num_tokens=2, finish_reason="stop", stats=GenerationStats("vanilla", steps=2, emitted_tokens=2)
    )
    assert b"decoding" not in events.event(0, end, last=False)
    assert b'"decoding":{"method":"vanilla"' in events.event(1, end, last=True)
