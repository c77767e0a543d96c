"""A real server on a random loopback port, in a thread, over a :class:`FakeDecoder`."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import httpx
import openai

from gateway.http.server import GatewayServer, bind, url_of
from gateway.serving.call import ServedModel
from gateway.serving.state import GatewayState
from gateway.serving.targets import Backends
from gateway.settings import GatewaySettings
from tests.support.fakes import PATIENCE_S, FakeDecoder, FakeTokenizer
from tests.support.grammars import tiny_grammars

T = TypeVar("T")
MODEL = "fake-model"


@dataclass
class LiveGateway:
    """What a test needs to know of a running gateway."""

    url: str
    decoder: FakeDecoder
    tokenizer: FakeTokenizer
    state: GatewayState
    server: GatewayServer
    thread: threading.Thread
    loop: asyncio.AbstractEventLoop | None = None
    opened: ExitStack = field(default_factory=ExitStack)

    @cached_property
    def client(self) -> openai.OpenAI:
        """The official client, without its retries: tests want to see the first answer."""
        client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="unused", max_retries=0, timeout=PATIENCE_S)
        return self.opened.enter_context(client)

    def async_client(self) -> openai.AsyncOpenAI:
        """A new one, for the loop of the test; to be closed there."""
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="unused", max_retries=0, timeout=PATIENCE_S)

    @cached_property
    def http(self) -> httpx.Client:
        """A bare client, for what the official one would refuse to send. Safe to share between threads."""
        return self.opened.enter_context(httpx.Client(base_url=self.url, timeout=PATIENCE_S))

    def in_loop(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the server's own loop and wait for it."""
        assert self.loop is not None
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(PATIENCE_S)

    def wait_idle(self) -> None:
        """Until every place is given back."""

        async def idle() -> None:
            await self.state.admission.idle.wait()

        self.in_loop(idle())


@contextmanager
def running_gateway(
    settings: GatewaySettings | None = None,
    decoder: FakeDecoder | None = None,
    backends: Backends | None = None,
    more_sockets: Sequence[socket.socket] = (),
    **state_fields: Any,
) -> Iterator[LiveGateway]:
    """Serve until the block ends; then a drain must leave no sequence behind. ``backends``: instead of ``decoder``."""
    decoder = decoder or FakeDecoder()
    tokenizer = FakeTokenizer()
    state = GatewayState.create(
        backends or {decoder.info.name: ServedModel(decoder, tokenizer, tiny_grammars())}, settings
    )
    if state_fields:
        state = replace(state, **state_fields)
    ready = threading.Event()
    bound = bind("127.0.0.1", 0)
    url = url_of(bound)
    server = GatewayServer(state, on_ready=ready.set)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound, *more_sockets]}, daemon=True)
    thread.start()
    assert ready.wait(PATIENCE_S), "the server did not start"
    live = LiveGateway(url, decoder, tokenizer, state, server, thread, loop=server._loop)
    try:
        yield live
    finally:
        live.opened.close()
        if thread.is_alive():
            decoder.release()
            assert live.loop is not None
            live.loop.call_soon_threadsafe(server.begin_drain)
            thread.join(PATIENCE_S)
        assert not thread.is_alive(), "the server did not stop"
        decoder.check_integrity()
        assert state.admission.in_flight == 0
