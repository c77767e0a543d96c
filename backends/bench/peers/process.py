"""A worker: a child process that does one thing at a time, and nothing (SIGSTOP) while it is not its turn."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

_END_S = 5.0


class WorkerFailed(Exception):
    """A worker that died, hung or refused; the message is one line that says which."""


class WorkerProcess:
    """With what it starts itself in one process group, so that all of it sleeps and ends together."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Raises OSError when the program can't be started."""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, order: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Its answer. It is awake for it, and asleep afterwards. Raises :class:`WorkerFailed`; it is ended then."""
        if self._process.returncode is not None:
            raise WorkerFailed("it ended before, together with another contestant of its program")
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            line = self._lines.get(timeout=timeout_s)
            answer = json.loads(line) if line else None
        except queue.Empty:
            raise self._ended(f"no answer within {timeout_s:g} s") from None
        except (OSError, ValueError):
            answer = None
        if not isinstance(answer, dict):
            raise self._ended("it ended, or answered no JSON")
        self._signal(signal.SIGSTOP)
        if not answer.get("ok"):
            raise self._ended(str(answer.get("error")))
        return answer

    def close(self) -> None:
        """Idempotent. Ends it and all that it has started."""
        if self._process.returncode is None:  # else it has ended, and the rest of its group with it
            with suppress(OSError):
                assert self._process.stdin is not None
                self._process.stdin.close()
            self._signal(signal.SIGCONT)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
            self._signal(signal.SIGKILL)
            self._process.wait()
        self._reader.join()
        self._errors.close()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _ended(self, reason: str) -> WorkerFailed:
        self._signal(signal.SIGKILL)
        status = self._process.wait()
        said = [line for line in self._said().splitlines() if line.strip()]
        last = f"; its last words: {said[-1].strip()[:300]}" if said else ""
        return WorkerFailed(f"{' '.join(reason.split())[:400]} (exit status {status}){last}")

    def _said(self) -> str:
        self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, self._errors.tell() - 4000))
        return self._errors.read().decode(errors="replace")
