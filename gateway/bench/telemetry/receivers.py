"""Where exporters send to: a receiver that takes everything and forgets it, and a hole that takes and never answers."""

from __future__ import annotations

import multiprocessing
import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

_ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/x-protobuf\r\ncontent-length: 0\r\n\r\n"
_PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True)
class Received:
    exports: int = 0
    bytes: int = 0


class Receiver:
    """The bench's side of a receiver process."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe
        self.url = f"http://127.0.0.1:{pipe.recv()}"

    def received(self) -> Received:
        """So far, of all exporters."""
        self._pipe.send("received")
        if not self._pipe.poll(_PATIENCE_S):
            raise RuntimeError("the receiver of exports does not answer")
        return Received(*self._pipe.recv())


@contextmanager
def receiver() -> Iterator[Receiver]:
    """OTLP over HTTP/1.1 with keep-alive, in a process of its own: reads each export whole, and answers 200."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_receive, args=(theirs,), daemon=True)
    process.start()
    try:
        yield Receiver(ours)
    finally:
        process.terminate()
        process.join()


@contextmanager
def black_hole() -> Iterator[str]:
    """Takes connections and never says a word."""
    with socket.socket() as hole:
        hole.bind(("127.0.0.1", 0))
        hole.listen(512)
        yield f"http://127.0.0.1:{hole.getsockname()[1]}"


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    exports = 0
    bytes = 0


class _Exports(socketserver.StreamRequestHandler):
    """One exporter's connection. Not ``http.server``: its parsing would take a multiple of the CPU time."""

    def handle(self) -> None:
        server = cast(_Server, self.server)
        while self.rfile.readline():
            length = 0
            while (line := self.rfile.readline()) not in (b"\r\n", b""):
                name, _, value = line.partition(b":")
                if name.lower() == b"content-length":
                    length = int(value)
            self.rfile.read(length)
            self.wfile.write(_ANSWER)
            server.exports += 1
            server.bytes += length


def _receive(pipe: Any) -> None:
    with _Server(("127.0.0.1", 0), _Exports) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 3600}, daemon=True).start()
        pipe.send(server.server_address[1])
        while pipe.recv():
            pipe.send((server.exports, server.bytes))
