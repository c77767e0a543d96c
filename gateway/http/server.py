"""Runs the app under uvicorn: binds, says where it listens, and drains on SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Callable, Coroutine
from functools import partial
from types import FrameType
from typing import Any

import uvicorn

from gateway.admission import ABORT_GRACE_S
from gateway.http.app import create_app
from gateway.http.collector import spare_the_collector
from gateway.http.protocol import protocol_for
from gateway.http.stopping import exit_within, stopped
from gateway.serving.state import GatewayState
from telemetry.logs import line_for

logger = logging.getLogger("gateway")

UNWIND_S = 5.0
"""What connections get to finish writing after the drain, before uvicorn cancels them."""
LIFESPAN_S = 13.0
"""What the app gets to stop. Its parts are bounded one by one before that, see ``app.STOP_S``."""
FORCED_S = 5.0
"""The same after a second signal."""
EXIT_S = 19.0
"""What the process gets from the end of the drain to its own. Less than Kubernetes gives it (docs/kubernetes.md)."""


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that doesn't listen yet: a taken port is known before a model is loaded. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    bound.set_inheritable(False)
    return bound


def url_of(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def greeting(url: str, model: str, *, keyed: bool = False) -> str:
    """What is printed when the gateway is ready: the URL, and a line to try it with."""
    body = {
        "model": model,
        "stream": True,
        "messages": [{"role": "user", "content": "Write a Python function that reverses a string."}],
    }
    key = ' -H "authorization: Bearer $API_KEY"' if keyed else ""
    return (
        f"medusa-gateway serves {model} at {url}/v1\n"
        f"try it:  curl -N {url}/v1/chat/completions -H 'content-type: application/json'{key} -d '{json.dumps(body)}'"
    )


class GatewayServer(uvicorn.Server):
    """uvicorn's server, with a drain before its shutdown.

    uvicorn closes its listener first and then waits. Here the listener stays open while streams finish, so that
    ``/readyz`` and new requests get a 503 that a load balancer understands instead of a refused connection. A second
    signal stops waiting. ``on_start`` is called once the app has started, just before it takes connections.
    ``bounded_exit``: the process is ended, whatever hangs, :data:`EXIT_S` after the drain.
    """

    def __init__(
        self,
        state: GatewayState,
        *,
        on_start: Callable[[], None] | None = None,
        on_ready: Callable[[], None] | None = None,
        access_log: bool = False,
        bounded_exit: bool = False,
    ) -> None:
        config = uvicorn.Config(
            create_app(state),
            http=protocol_for(state.settings),
            lifespan="on",
            ws="none",
            log_level="info" if access_log else "warning",
            access_log=access_log,
            # Its lines go where all others go, in the same form.
            log_config=None,
            server_header=False,
            timeout_graceful_shutdown=int(UNWIND_S),
        )
        super().__init__(config)
        self._gateway = state
        self._on_start = on_start
        self._on_ready = on_ready
        self._bounded_exit = bounded_exit
        self._loop: asyncio.AbstractEventLoop | None = None
        self._asked_to_end = False
        self._draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        if self._on_start is not None:
            self.lifespan.startup = partial(_then, self.lifespan.startup, self._on_start)  # type: ignore[method-assign]
        await super().startup(sockets)
        if self._on_ready is not None and self.started:
            self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by the signal. Not passed on to uvicorn: it would raise the signal again after a clean exit."""
        if self._asked_to_end or self._gateway.admission.draining or self._loop is None or not self.started:
            if self._loop is not None:
                # Before the loop sees that it is to end: clients and records are told who cut the answers.
                self._loop.call_soon_threadsafe(self._gateway.admission.abort_all)
            self.should_exit = True
            self.force_exit = True
            self._bound_exit(0.0)
        else:
            self._asked_to_end = True
            # From here as well: a loop that hangs does not even begin to drain.
            self._bound_exit(self._gateway.settings.drain_timeout_s + ABORT_GRACE_S)
            self._loop.call_soon_threadsafe(self.begin_drain)

    def begin_drain(self) -> None:
        """Drain, then shut down. Idempotent; call from the server's own loop."""
        if self._draining is None:
            self._draining = asyncio.ensure_future(self._drain())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._bound_exit(0.0)
        stop_app, self.lifespan.shutdown = self.lifespan.shutdown, _later  # type: ignore[method-assign]
        await super().shutdown(sockets)
        # uvicorn leaves this out after a second signal; what limits and receivers are owed is to be written all the
        # same.
        await stopped("the app", stop_app(), FORCED_S if self.force_exit else LIFESPAN_S)
        # What is left of it is cancelled with the loop: that was told just now, and needs no traceback.
        self.lifespan.shutdown_failed = True

    def _bound_exit(self, drain_s: float) -> None:
        if self._bounded_exit:
            exit_within(drain_s + EXIT_S, self._loop)

    async def _drain(self) -> None:
        try:
            await self._wait_for_answers()
        except Exception:
            logger.exception("draining failed; the process ends without it")
        self.should_exit = True

    async def _wait_for_answers(self) -> None:
        timeout_s = self._gateway.settings.drain_timeout_s
        if running := self._gateway.admission.in_flight:
            logger.warning("draining: %d sequences may run for up to %g s more", running, timeout_s)
        aborted = await self._gateway.admission.drain(timeout_s)
        if aborted:
            logger.warning("drain timeout: %d requests were aborted", aborted)


async def _then(first: Callable[[], Coroutine[Any, Any, None]], then: Callable[[], None]) -> None:
    await first()
    then()


async def _later() -> None: ...


def run_server(
    state: GatewayState,
    bound: socket.socket,
    *more: socket.socket,
    on_start: Callable[[], None] | None = None,
    access_log: bool = False,
    bounded_exit: bool = False,
) -> None:
    """Serve until a signal and a drain end it. Closes the sockets; leaves the decoders to the caller.

    ``more``: a further socket, on which the same app answers: that of the admin port. ``on_start``: what to do just
    before connections are taken. ``bounded_exit``: the caller has nothing to do afterwards but to end the process soon;
    it is ended if that takes too long.
    """
    model = next(iter(state.backends.models), "none")

    def announce() -> None:
        spare_the_collector()
        lines = greeting(url_of(bound), model, keyed=state.access.keys is not None).splitlines()
        for line in [*lines, *(f"admin routes: {url_of(each)}/admin" for each in more)]:
            print(line_for(logging.INFO, line), flush=True)

    server = GatewayServer(
        state, on_start=on_start, on_ready=announce, access_log=access_log, bounded_exit=bounded_exit
    )
    server.run(sockets=[bound, *more])
