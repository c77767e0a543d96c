"""Real collectors: oteltap (OTLP over HTTP, in this process) and rotel (over gRPC, a program of its own)."""

from __future__ import annotations

import asyncio
import re
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.fakes import PATIENCE_S
from tests.support.ports import free_port


def value_of(value: Any) -> Any:
    """An OTLP AnyValue as Python knows it."""
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [value_of(each) for each in value.array_value.values]
    return None if kind is None else getattr(value, kind)


def attributes_of(holder: Any) -> dict[str, Any]:
    return {each.key: value_of(each.value) for each in holder.attributes}


class HttpCollector:
    """Everything that was received so far. Its own thread and loop, so that tests of any kind can wait for it."""

    def __init__(self) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        self.spans: list[Any] = []
        self.metrics: list[Any] = []
        self._changed = threading.Condition()
        self._loop = asyncio.new_event_loop()
        self._started, self._stopped = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(),), daemon=True)

    def wait(self, ready: Callable[[HttpCollector], bool], what: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: ready(self), PATIENCE_S), f"the collector never got {what}"

    def trace(self, trace_id: str, spans: int) -> list[Any]:
        """The spans of a trace, as soon as there are so many of them."""

        def found() -> list[Any]:
            return [span for span in self.spans if span.trace_id.hex() == trace_id]

        self.wait(lambda _: len(found()) >= spans, f"{spans} spans of {trace_id}")
        return found()

    def __enter__(self) -> HttpCollector:
        self._thread.start()
        assert self._started.wait(PATIENCE_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(PATIENCE_S)

    async def _run(self) -> None:
        from oteltap import OtelTapHttpProtobufReceiver, OtelTapHttpProtobufReceiverSettings

        settings = OtelTapHttpProtobufReceiverSettings(http_port=int(self.url.rsplit(":", 1)[1]))
        async with OtelTapHttpProtobufReceiver(settings) as receiver:
            taking = [
                asyncio.create_task(self._take(receiver.stream_traces(), self.spans)),
                asyncio.create_task(self._take(receiver.stream_metrics(), self.metrics)),
            ]
            self._started.set()
            await self._stopped.wait()
            for task in taking:
                task.cancel()

    async def _take(self, stream: Any, into: list[Any]) -> None:
        async for each in stream:
            with self._changed:
                into.append(each)
                self._changed.notify_all()


@contextmanager
def rotel() -> Iterator[tuple[str, Callable[[str], str]]]:
    """The gRPC endpoint of a running agent, and what waits until its log matches a pattern and gives the log so far."""
    import rotel as package

    program = Path(package.__file__).parent / "rotel-agent"
    grpc, http = free_port(), free_port()
    command = [
        *(str(program), "start"),
        *("--otlp-grpc-endpoint", f"127.0.0.1:{grpc}", "--otlp-http-endpoint", f"127.0.0.1:{http}"),
        *("--exporter", "blackhole", "--debug-log", "traces", "--debug-log-verbosity", "detailed"),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines: list[str] = []
    changed = threading.Condition()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with changed:
                lines.append(line)
                changed.notify_all()

    def wait_for(pattern: str) -> str:
        with changed:
            found = changed.wait_for(lambda: re.search(pattern, "".join(lines)) is not None, PATIENCE_S)
            assert found, f"{pattern} is not in what rotel got:\n{''.join(lines)[-4000:]}"
            return "".join(lines)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", grpc), timeout=1).close()
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < deadline, "".join(lines)
                threading.Event().wait(0.02)
        yield f"http://127.0.0.1:{grpc}", wait_for
    finally:
        process.terminate()
        process.wait(PATIENCE_S)
        reader.join(PATIENCE_S)
