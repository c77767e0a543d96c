"""A server that answers as a script says, byte by byte: for upstreams that no well-behaved server would be."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.support.fakes import PATIENCE_S

HANG = b"HANG"
"""In a script: say nothing more until the client leaves."""
MODELS = b'{"object":"list","data":[{"id":"theirs","max_model_len":77}]}'

Script = list[Any]
"""Pieces to send, as bytes. A ``threading.Event`` among them is waited for."""


def answer(status: int, body: bytes, kind: str = "application/json", extra: str = "") -> Script:
    head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n{extra}\r\n"
    return [head.encode() + body]


def stream(*pieces: bytes | threading.Event, ended: bool = True) -> Script:
    """A chunked event stream of ``pieces``; ``ended`` false: the connection breaks after the last."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    chunks = [
        each if isinstance(each, threading.Event) or each == HANG else b"%x\r\n%b\r\n" % (len(each), each)
        for each in pieces
    ]
    return [head, *chunks, *([b"0\r\n\r\n"] if ended else [])]


def event(content: str | None = None, finish: str | None = None, **extra: Any) -> bytes:
    delta = {} if content is None else {"content": content}
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return b"data: " + json.dumps({"id": "x", "model": "theirs", "choices": [choice], **extra}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
GOOD = stream(event("Hel"), event("lo"), event(None, "stop"), DONE)


@dataclass
class ScriptedUpstream:
    """``script`` is played for every POST; ``health`` for every GET. ``requests``: bodies and headers so far."""

    url: str = ""
    script: Callable[[], Script] = lambda: GOOD
    health: Callable[[], Script] = lambda: answer(200, MODELS)
    requests: list[tuple[dict[str, Any], dict[str, str]]] = field(default_factory=list)
    left: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    """Released for every client that left while the script said HANG."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                lines = head.split("\r\n")
                headers = {
                    name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:] if line)
                }
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                if lines[0].startswith("GET"):
                    script = self.health()
                else:
                    self.requests.append((json.loads(body), headers))
                    script = self.script()
                for piece in script:
                    if isinstance(piece, threading.Event):
                        await asyncio.to_thread(piece.wait, PATIENCE_S)
                        continue
                    if piece == HANG:
                        await reader.read()
                        self.left.release()
                        return
                    writer.write(piece)
                    await writer.drain()
                if not script or not (script[-1].endswith(b"0\r\n\r\n") or b"content-length" in script[0]):
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def wait_left(self) -> None:
        assert self.left.acquire(timeout=PATIENCE_S), "the request was not cancelled upstream"


@contextmanager
def scripted_upstream() -> Iterator[ScriptedUpstream]:
    upstream = ScriptedUpstream()
    ready = threading.Event()
    stopping: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def main() -> None:
        server = await asyncio.start_server(upstream.serve, "127.0.0.1", 0)
        upstream.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        stop = asyncio.Event()
        stopping.append((asyncio.get_running_loop(), stop))
        ready.set()
        await stop.wait()
        server.close()

    thread = threading.Thread(target=asyncio.run, args=(main(),), daemon=True)
    thread.start()
    assert ready.wait(PATIENCE_S)
    try:
        yield upstream
    finally:
        loop, stop = stopping[0]
        loop.call_soon_threadsafe(stop.set)
        thread.join(PATIENCE_S)
