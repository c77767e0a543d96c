"""Receivers of alerts for tests and demos: a webhook that can fail, and Debian's real Alertmanager."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx

from tests.support.fakes import PATIENCE_S
from tests.support.ports import free_port


class Webhook:
    """A server on a free loopback port that keeps what it is posted: (path, headers, JSON).

    ``answers``: statuses to give first, before all is 200.
    """

    def __init__(self, *answers: int) -> None:
        self.received: list[tuple[str, dict[str, str], Any]] = []
        self.attempts: list[float] = []
        self._answers = list(answers)
        self._changed = threading.Condition()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with owner._changed:
                    status = owner._answers.pop(0) if owner._answers else 200
                    owner.attempts.append(time.monotonic())
                    if status == 200:
                        headers = {name.lower(): value for name, value in self.headers.items()}
                        owner.received.append((self.path, headers, body))
                    owner._changed.notify_all()
                self.send_response(status)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Not on the screen."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Webhook:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def wait(self, count: int, patience_s: float = PATIENCE_S) -> list[Any]:
        """The bodies, as soon as there are ``count`` of them."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.received) >= count, patience_s), self.received
            return [body for _, _, body in self.received]


@contextmanager
def running_alertmanager(program: Path, folder: Path, webhook_url: str) -> Iterator[str]:
    """Debian's Alertmanager, which passes on what it gets to a webhook without waiting. Its URL."""
    folder.mkdir(parents=True, exist_ok=True)
    route = {"receiver": "hook", "group_by": ["..."], "group_wait": "0s", "group_interval": "1s"}
    receivers = [{"name": "hook", "webhook_configs": [{"url": webhook_url, "send_resolved": True}]}]
    (folder / "config.json").write_text(json.dumps({"route": route, "receivers": receivers}))
    port = free_port()
    command = [str(program), f"--config.file={folder / 'config.json'}", f"--storage.path={folder / 'data'}"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--cluster.listen-address="]
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        wait_for_http(f"http://127.0.0.1:{port}/-/ready", process, folder / "log")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def wait_for_http(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until the program answers."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            if httpx.get(url, trust_env=False).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
