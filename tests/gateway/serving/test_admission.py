"""Places, 429 with Retry-After, and the drain."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from gateway.admission import MAX_RETRY_S, RETRY_WITHOUT_RATE_S, Admission, estimate_retry_after
from gateway.settings import GatewaySettings, is_loopback
from gateway.wire.errors import InvalidRequest, QueueFull, Unavailable
from telemetry.service import RequestTrace, Telemetry
from tests.support.fakes import PATIENCE_S, FakeDecoder, FakeHandle
from tests.support.live_gateway import MODEL, LiveGateway, running_gateway
from tests.support.paths import ROOT

SAY_HI: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("shortfall", "finished_at", "seconds"),
    [
        (1, [], RETRY_WITHOUT_RATE_S),
        (1, [10.0, 20.0], RETRY_WITHOUT_RATE_S),  # too long ago to tell
        (1, [90.0, 95.0, 100.0], 4),  # 3 in 10 s
        (6, [90.0, 95.0, 100.0], 20),
        (1, [99.9] * 50, 1),
        (1000, [99.0], MAX_RETRY_S),
        (1, [100.0], 1),  # a rate from one moment is capped at one a second
    ],
)
def test_retry_after(shortfall: int, finished_at: list[float], seconds: int) -> None:
    assert estimate_retry_after(shortfall, finished_at, now=100.0) == seconds


async def test_places_are_counted_and_given_back_once() -> None:
    admission = Admission(capacity=5)
    first, second = admission.admit(2), admission.admit(3)
    with pytest.raises(QueueFull):
        admission.admit(1)
    first.finish_one()
    assert admission.in_flight == 4
    first.finish_one()
    first.finish_one()
    first.close()
    first.close()
    assert admission.in_flight == 3
    second.close()
    assert admission.in_flight == 0
    second.finish_one()
    assert admission.in_flight == 0


async def test_what_can_never_fit_is_not_worth_a_retry() -> None:
    with pytest.raises(InvalidRequest, match="at most 5"):
        Admission(capacity=5).admit(6)


async def test_retry_after_follows_the_rate_of_completions() -> None:
    now = 0.0
    admission = Admission(capacity=2, clock=lambda: now)
    for _ in range(10):
        ticket = admission.admit(1)
        now += 2.0
        ticket.close()
    admission.admit(2)
    with pytest.raises(QueueFull) as caught:
        admission.admit(1)
    assert caught.value.headers == {"retry-after": "2"}


async def test_a_drain_of_an_idle_gateway_ends_at_once() -> None:
    admission = Admission(capacity=2)
    assert await admission.drain(timeout_s=1000) == 0
    with pytest.raises(Unavailable):
        admission.admit(1)


async def test_a_drain_waits_then_aborts() -> None:
    admission = Admission(capacity=4)
    quick, slow = admission.admit(1), admission.admit(2)
    slow.on_abort = slow.close
    drain = asyncio.ensure_future(admission.drain(timeout_s=0.05))
    await asyncio.sleep(0)
    quick.close()
    assert not drain.done()
    assert await drain == 1
    assert admission.in_flight == 0


# Against a running server.


@pytest.fixture
def gateway() -> Iterator[LiveGateway]:
    with running_gateway(GatewaySettings(max_concurrent=1, max_queue=2)) as live:
        yield live


class Background(threading.Thread):
    """A call that runs while the test does something else; ``outcome`` waits for it."""

    def __init__(self, call: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(daemon=True)
        self._call = lambda: call(*args, **kwargs)
        self._result: Any = None
        self.start()

    def run(self) -> None:
        try:
            self._result = self._call()
        except Exception as error:
            self._result = error

    @property
    def outcome(self) -> Any:
        self.join(PATIENCE_S)
        assert not self.is_alive()
        return self._result


def answer(gateway: LiveGateway, **fields: Any) -> Any:
    return gateway.client.chat.completions.create(model=MODEL, messages=SAY_HI, **fields)


def stream(gateway: LiveGateway) -> list[str]:
    """The data of every event."""
    http = gateway.http
    body = {"model": MODEL, "messages": SAY_HI, "stream": True}
    text = http.post("/v1/chat/completions", json=body).text
    return [event.removeprefix("data: ") for event in text.split("\n\n") if event]


def test_past_the_queue_it_is_429(gateway: LiveGateway) -> None:
    gateway.decoder.hold()
    waiting = [Background(answer, gateway), Background(answer, gateway, n=2)]
    gateway.decoder.wait_until(lambda fake: len(fake.submitted) == 3)
    with pytest.raises(openai.RateLimitError) as caught:
        answer(gateway)
    assert caught.value.code == "queue_full"
    assert caught.value.type == "rate_limit_error"
    assert caught.value.response.headers["retry-after"] == str(RETRY_WITHOUT_RATE_S)
    gateway.decoder.release()
    assert [len(each.outcome.choices) for each in waiting] == [1, 2]
    assert answer(gateway).choices[0].finish_reason == "stop", "the places are free again"


def test_a_refused_prompt_gives_its_place_back(gateway: LiveGateway) -> None:
    for _ in range(5):
        with pytest.raises(openai.BadRequestError, match="context"):
            gateway.client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x" * 999}])
    assert gateway.state.admission.in_flight == 0


def test_a_drain_lets_streams_finish_and_takes_nothing_new(gateway: LiveGateway) -> None:
    gateway.decoder.hold(at_step=1)
    running = Background(stream, gateway)
    gateway.decoder.wait_until(lambda fake: len(fake.submitted) == 1)
    assert gateway.loop is not None
    gateway.loop.call_soon_threadsafe(gateway.server.begin_drain)
    http = gateway.http
    refused = http.post("/v1/chat/completions", json={"model": MODEL, "messages": SAY_HI})
    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "1"
    assert refused.json()["error"]["code"] == "shutting_down"
    assert http.get("/readyz").status_code == 503
    assert http.get("/healthz").status_code == 200
    gateway.decoder.release()
    events = running.outcome
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["choices"][0]["finish_reason"] == "stop"
    gateway.thread.join(PATIENCE_S)
    assert not gateway.thread.is_alive(), "the server stops by itself after the drain"


def test_a_drain_that_runs_out_of_patience_ends_streams_with_a_typed_error() -> None:
    with running_gateway(GatewaySettings(drain_timeout_s=0.05)) as live:
        live.decoder.hold(at_step=1)
        streamed, plain = Background(stream, live), Background(answer, live, n=2)
        live.decoder.wait_until(lambda fake: len(fake.submitted) == 3)
        assert live.loop is not None
        live.loop.call_soon_threadsafe(live.server.begin_drain)
        events = streamed.outcome
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["error"]["code"] == "shutting_down"
        assert isinstance(plain.outcome, openai.InternalServerError)
        assert plain.outcome.status_code == 503
        assert plain.outcome.code == "shutting_down"


class Remembering(Telemetry):
    """Keeps what requests that are over were told."""

    def finish(self, request: RequestTrace) -> None:
        super().finish(request)
        outcomes.append(request.record.error)


outcomes: list[str | None] = []


@pytest.mark.parametrize("stuck", [False, True])
def test_what_a_second_signal_cuts_was_not_cut_by_its_client(stuck: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """``stuck``: the engine is in the middle of a step that lasts longer than the process."""
    outcomes.clear()
    if stuck:
        monkeypatch.setattr(FakeHandle, "wake", lambda _: None)
    decoder = FakeDecoder()
    decoder.hold(at_step=1)
    settings = GatewaySettings(drain_timeout_s=PATIENCE_S)
    with running_gateway(settings, decoder, telemetry=Remembering.off()) as live:
        body = {"model": MODEL, "messages": SAY_HI, "stream": True}
        with httpx.stream("POST", f"{live.url}/v1/chat/completions", json=body, timeout=PATIENCE_S) as response:
            lines = response.iter_lines()
            assert "assistant" in next(lines)
            for _ in range(2):
                live.server.handle_exit(signal.SIGTERM, None)
            live.thread.join(PATIENCE_S)
            assert not live.thread.is_alive(), "a second signal does not wait"
    assert outcomes == ["shutting_down"]


SERVER = """
from gateway.http.server import bind, run_server
from gateway.settings import GatewaySettings
from gateway.serving.call import ServedModel
from gateway.serving.state import GatewayState
from tests.support.fakes import FakeDecoder, FakeTokenizer

decoder = FakeDecoder()
decoder.hold(at_step=1)
models = {decoder.info.name: ServedModel(decoder, FakeTokenizer())}
run_server(GatewayState.create(models, GatewaySettings(drain_timeout_s=0.2)), bind("127.0.0.1", 0))
decoder.check_integrity()
print("clean")
"""


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_the_exit_is_clean(signal_number: int) -> None:
    root = ROOT
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
    )
    try:
        assert process.stdout is not None
        announced = process.stdout.readline()
        url = announced.split()[-1]
        assert announced.startswith("medusa-gateway serves fake-model at http://127.0.0.1:")
        assert "curl -N http://127.0.0.1:" in process.stdout.readline()
        body = {"model": MODEL, "messages": SAY_HI, "stream": True}
        with httpx.stream("POST", f"{url}/chat/completions", json=body, timeout=PATIENCE_S) as response:
            lines = response.iter_lines()
            assert "assistant" in next(lines)
            process.send_signal(signal_number)
            rest = [line for line in lines if line]
        assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "shutting_down"
        assert rest[-1] == "data: [DONE]"
        assert process.wait(PATIENCE_S) == 0
        assert process.stdout.read() == "clean\n"
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("example.org", False),
        ("", False),
    ],
)
def test_loopback(host: str, local: bool) -> None:
    assert is_loopback(host) is local
