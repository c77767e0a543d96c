"""What a soak is driven on: replicas whose clock can be made to jump, and an upstream. As a program it is a replica."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.drills.drill_rig import Replica
from tests.support.paths import ROOT

JUMP_S = 7200.0
BACKENDS = """\
version: 1
backends:
  - {{name: engine, kind: engine, {model}, serves: {name}, dtype: float32, threads: 1, max_running: 8}}
  - name: far
    kind: openai
    url: http://127.0.0.1:{port}/v1
    serves: {remote}
    upstream_model: {name}
    timeouts: {{first_byte: 2s, between_bytes: 2s}}
    breaker: {{failures: 3, open: 1s}}
    health: {{every: 1s, timeout: 1s}}
"""


def launch_upstream(port: int, folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.drills.drill_rig", str(port), "memory"]
    with open(folder / "upstream.log", "ab") as log:
        return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)


def replica_of(name: str, redis: int, folder: Path) -> Replica:
    replica = Replica(name, "fake", redis, folder)
    replica._command = [sys.executable, "-m", "tests.drills.soak_rig", "serve"]
    replica._command += ["--backends", str(folder / "backends.yaml"), "--policy", str(folder / "policy.yaml")]
    replica._command += ["--api-keys", str(folder / "keys.yaml"), "--port", str(replica.port)]
    replica._command += ["--redis-url", f"redis://127.0.0.1:{replica.proxy.port}/0"]
    return replica


async def end(replica: Replica) -> None:
    if replica.process is not None and replica.process.poll() is None:
        replica.signal(signal.SIGKILL)
        await replica.ended()


def with_a_clock_that_jumps(argv: list[str]) -> int:
    """A gateway whose wall clock goes :data:`JUMP_S` forth at a SIGUSR1, and back at the next."""
    offset, real = [0.0], time.time
    # Before anything of the gateway is imported: its parts take the clock as a default.
    time.time = lambda: real() + offset[0]
    signal.signal(signal.SIGUSR1, lambda *_: offset.__setitem__(0, JUMP_S - offset[0]))
    from gateway.cli import main as gateway

    return gateway(argv)


if __name__ == "__main__":
    sys.exit(with_a_clock_that_jumps(sys.argv[1:]))
