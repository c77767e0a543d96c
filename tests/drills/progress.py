"""What demos and drills say while they wait, and that they do not wait for ever."""

from __future__ import annotations

import json
import queue
import re
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

PROGRESS_S = 10.0
START_S = 300.0
"""What a gateway gets to start: a model is loaded, and perhaps kernels compiled, beside whatever else runs here."""


def await_line(
    process: subprocess.Popen[str],
    pattern: str,
    say: Callable[[str], None],
    *,
    within_s: float = START_S,
    every_s: float = PROGRESS_S,
) -> re.Match[str]:
    """The first line of a process's output that holds ``pattern``. Tells every ``every_s`` that it still waits.

    What comes later is read and dropped, so that the process is never held up. Raises TimeoutError, and RuntimeError if
    the process ends first.
    """
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    began = time.monotonic()
    while (waited := time.monotonic() - began) < within_s:
        try:
            line = lines.get(timeout=min(every_s, within_s - waited))
        except queue.Empty:
            say(f"the gateway is starting, for {time.monotonic() - began:.0f} of at most {within_s:g} s")
            continue
        if line is None:
            raise RuntimeError("the gateway ended while it started")
        if found := re.search(pattern, line):
            return found
    raise TimeoutError(f"the gateway did not start within {within_s:g} s")


def ended(report: dict[str, Any], show: Callable[[dict[str, Any]], object], *, as_json: bool) -> int:
    """Tell a drill's report, as one JSON object or as ``show`` does; returns the exit status."""
    if as_json:
        print(json.dumps(report))
    else:
        show(report)
    return 1 if report["broken_promises"] else 0
