"""Answers while the model is being loaded: the process is there, and what it waits for.

A model may take minutes. A port that refuses connections meanwhile looks like a crash to whoever watches it, and says
nothing to those who ask. This runs in threads of its own, before there is an event loop, on the sockets that the real
server takes over afterwards: who connects in between waits in the socket's queue and is answered by that one.
"""

from __future__ import annotations

import logging
import re
import socket
import threading
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec

from backends.types import START_LOG
from gateway.wire.errors import Unavailable
from gateway.wire.responses import Health

RETRY_S = 5
CLIENT_PATIENCE_S = 5.0
MOST_AT_ONCE = 64
"""Connections that are held at a time; more are closed unanswered. Real clients are served after the start."""

_FOLDERS = re.compile(r"\S*/")


class Starting:
    """Answers on ``sockets`` from :meth:`open` until :meth:`close`, which leaves them open and listening.

    ``/healthz`` (and ``/health``) say 200, everything else 503 with what is being done, as the log of the start has it.
    """

    def __init__(self, sockets: Sequence[socket.socket]) -> None:
        self._sockets = sockets
        self._progress = _Progress()
        self._servers: list[_Server] = []
        self._threads: list[threading.Thread] = []

    def open(self) -> None:
        logging.getLogger(START_LOG).addHandler(self._progress)
        for each in self._sockets:
            server = _Server(each, self._progress)
            thread = threading.Thread(target=server.serve_forever, args=(0.05,), name="starting", daemon=True)
            self._servers.append(server)
            self._threads.append(thread)
            thread.start()

    def close(self) -> None:
        """Stop answering. Idempotent; whoever is being answered gets his answer."""
        logging.getLogger(START_LOG).removeHandler(self._progress)
        for server in self._servers:
            server.shutdown()
        for thread in self._threads:
            thread.join()
        self._servers, self._threads = [], []


class _Progress(logging.Handler):
    """Keeps the last line of the start's log, without folders: anybody may read it."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.doing = "starting"

    def emit(self, record: logging.LogRecord) -> None:
        self.doing = _FOLDERS.sub("", record.getMessage())


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, bound: socket.socket, progress: _Progress) -> None:
        super().__init__(bound.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        # So that a client that has left again leaves nobody waiting for the next.
        bound.setblocking(False)
        self.socket = bound
        self.progress = progress
        self._places = threading.BoundedSemaphore(MOST_AT_ONCE)
        self.server_activate()

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that left or was too slow is nothing to tell."""


class _Handler(BaseHTTPRequestHandler):
    """One answer a connection; what is sent in a body is left unread."""

    protocol_version = "HTTP/1.1"
    timeout = CLIENT_PATIENCE_S

    def _answer(self) -> None:
        assert isinstance(self.server, _Server)
        doing = self.server.progress.doing
        if self.path.partition("?")[0] in ("/healthz", "/health"):
            status, body = HTTPStatus.OK, msgspec.json.encode(Health("starting", [doing]))
        else:
            error = Unavailable(f"The server is starting and takes no requests yet: {doing}.", code="starting")
            status, body = HTTPStatus.SERVICE_UNAVAILABLE, error.body()
        self.send_response_only(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.send_header("connection", "close")
        if status is not HTTPStatus.OK:
            self.send_header("retry-after", str(RETRY_S))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_OPTIONS = do_PATCH = _answer

    def log_message(self, format: str, *args: Any) -> None:
        """Not where the log goes; and who asks during a start is no news."""
