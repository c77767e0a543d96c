"""The gateways that are compared: programs of their own, stopped by a signal while it isn't their turn."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

_TIMEOUT_S = 10.0
_END_S = 20.0


def without_telemetry() -> dict[str, str]:
    return {"OTEL_SDK_DISABLED": "true"}


def with_telemetry(endpoint: str, export_every_s: float, stretch: float) -> dict[str, str]:
    """Every request traced, spans and metrics exported. ``stretch``: seconds that pass for one in which the gateway may
    run; intervals are of the latter.
    """
    every_ms = str(round(export_every_s * stretch * 1000))
    return {
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
        "OTEL_EXPORTER_OTLP_TIMEOUT": str(round(_TIMEOUT_S * stretch)),
        "OTEL_TRACES_SAMPLER": "always_on",
        "OTEL_BSP_SCHEDULE_DELAY": every_ms,
        "OTEL_METRIC_EXPORT_INTERVAL": every_ms,
    }


class Contestant:
    """A running gateway, stopped (SIGSTOP) but for its turns, so that it takes nothing from the others.

    ``command`` is that of ``serve`` or of a program that prints the same greeting. Raises RuntimeError, with what the
    program said, when it ends instead.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            command, env={**inherited, **environment}, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )
        assert self._process.stdout is not None
        greeting = self._process.stdout.readline()
        found = re.search(r"http://[^\s/]+", greeting)
        if found is None:
            self._end()
            said = self._said()
            self.close()
            raise RuntimeError(f"a gateway to be measured did not start: {said}")
        self.url = found.group()
        self._process.send_signal(signal.SIGSTOP)

    def turn(self, seconds: float) -> float:
        """Let it run for ``seconds``; those that it really got."""
        began = time.perf_counter()
        self._process.send_signal(signal.SIGCONT)
        time.sleep(seconds)
        self._process.send_signal(signal.SIGSTOP)
        return time.perf_counter() - began

    def cpu_s(self) -> float | None:
        """CPU time of all its threads since it began; None where there is no ``/proc``."""
        try:
            stat = Path(f"/proc/{self._process.pid}/stat").read_text()
        except OSError:
            return None
        fields = stat.rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """Idempotent."""
        self._end()
        self._errors.close()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _end(self) -> None:
        with suppress(ProcessLookupError):
            self._process.terminate()
            self._process.send_signal(signal.SIGCONT)
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _said(self) -> str:
        self._errors.seek(0)
        return self._errors.read()[-2000:].decode(errors="replace").strip()

    def __enter__(self) -> Contestant:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
