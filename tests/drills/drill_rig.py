"""What the drill is driven on: gateway replicas, a Redis, a way to cut one from it, and a real haproxy before them.

Everything listens on loopback, needs no root, and lives in processes that :class:`Rig` ends again.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx

from backends.engine.loading import DEMO_HEADS
from backends.models.demo import prepare_demo_model
from tests.support.debian import find
from tests.support.paths import ROOT
from tests.support.ports import free_port
from tests.support.valkey import ValkeyProcess

PATIENCE_S = 60.0
START_S = 180.0
"""What a replica gets to load: it shares the machine with the others, the load, and whatever else is there."""
MODEL = "drill"

_HAPROXY = """\
global
    maxconn 2000
defaults
    mode http
    timeout connect 1s
    timeout client 60s
    timeout server 60s
    timeout http-request 5s
    # Longer than a check's interval: a replica on a busy machine is slow, which is no reason to take it out.
    timeout check 5s
    # A request that no replica has begun to answer may go to another; one that was begun never.
    option http-buffer-request
    option redispatch 1
    retries 3
    retry-on conn-failure empty-response 503
frontend drill
    bind 127.0.0.1:{port}
    default_backend replicas
backend replicas
    balance leastconn
    option httpchk GET /readyz
    default-server check inter 200ms fall 1 rise 1
    http-response set-header x-served-by %s
{servers}
"""
_ENGINE = """\
version: 1
backends:
  - {{name: engine, kind: engine, {model}, serves: {name}, dtype: float32, threads: 1, max_running: 16}}
"""


class RedisProxy:
    """A TCP proxy to Redis that can be cut: connections break, and new ones are closed at once."""

    def __init__(self, target: int) -> None:
        self.port = free_port()
        self.is_cut = False
        self._target = target
        self._open: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    def cut(self) -> None:
        self.is_cut = True
        for writer in self._open:
            writer.transport.abort()

    def heal(self) -> None:
        self.is_cut = False

    async def stop(self) -> None:
        self.cut()
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            if self.is_cut:
                return
            there, back = await asyncio.open_connection("127.0.0.1", self._target)
            self._open.add(back)
            try:
                async with asyncio.TaskGroup() as both:
                    both.create_task(_copy(reader, back))
                    both.create_task(_copy(there, writer))
            finally:
                self._open.discard(back)
                back.close()
        except (OSError, ExceptionGroup):
            pass
        finally:
            self._open.discard(writer)
            writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while received := await reader.read(65_536):
        writer.write(received)
        await writer.drain()
    raise ConnectionResetError("one side is done, so both are")


def model_fields(engine: str) -> str:
    """What a backends file says of a drill's engine: "tiny", "demo" (the demo model with its heads), or a folder."""
    if engine == "demo":
        return f"model: {prepare_demo_model()}, heads: {DEMO_HEADS}"
    return f"model: {'tiny-random' if engine == 'tiny' else engine}"


class Replica:
    """One gateway process. Started again after its end, it has the same name and port and a new identity."""

    def __init__(self, name: str, engine: str, redis: int, folder: Path) -> None:
        self.name = name
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.proxy = RedisProxy(redis)
        self.process: subprocess.Popen[bytes] | None = None
        self.identity = ""
        self._log = folder / f"{name}.log"
        redis_url = f"redis://127.0.0.1:{self.proxy.port}/0"
        if engine == "fake":
            self._command = [sys.executable, "-m", "tests.drills.drill_rig", str(self.port), redis_url]
        else:
            config = folder / "backends.yaml"
            config.write_text(_ENGINE.format(model=model_fields(engine), name=MODEL))
            self._command = [sys.executable, "-m", "gateway", "serve", "--backends", str(config)]
            self._command += ["--port", str(self.port), "--redis-url", redis_url]

    def launch(self) -> None:
        with open(self._log, "ab") as log:
            self.process = subprocess.Popen(self._command, cwd=ROOT, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    async def ready(self, client: httpx.AsyncClient) -> None:
        assert self.process is not None
        deadline = time.monotonic() + START_S
        while True:
            try:
                if (await client.get(f"{self.url}/readyz")).status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"replica {self.name} did not start:\n{self.last_words()}")
            await asyncio.sleep(0.05)
        self.identity = (await self.stats(client))["health"]["replica"]

    async def stats(self, client: httpx.AsyncClient) -> dict[str, Any]:
        return (await client.get(f"{self.url}/admin/stats")).json()

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def last_words(self) -> str:
        """The end of its log."""
        return self._log.read_text(errors="replace")[-2000:]

    async def ended(self) -> int:
        assert self.process is not None
        return await asyncio.to_thread(self.process.wait, PATIENCE_S)


class Rig:
    """Use with ``async with``. ``url`` is that of the balancer."""

    def __init__(self, folder: Path, engine: str, replicas: int) -> None:
        # Known before anything is started: whoever can't have a balancer should not wait for engines.
        self._haproxy = find("haproxy")
        self.folder = folder
        # Written to the log at once: what a restart must not lose is what Redis has confirmed.
        self.redis = ValkeyProcess(folder, ("--appendonly", "yes", "--appendfsync", "everysec"))
        self.replicas = [Replica(f"r{i}", engine, self.redis.port, folder) for i in range(replicas)]
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = httpx.AsyncClient(timeout=10.0, trust_env=False)
        self._balancer: subprocess.Popen[bytes] | None = None
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Rig:
        self._stack.push_async_callback(self._end)
        try:
            await asyncio.to_thread(self.redis.start)
            for replica in self.replicas:
                await replica.proxy.start()
                replica.launch()
            self._launch_balancer()
            await asyncio.gather(*(replica.ready(self.client) for replica in self.replicas))
            for replica in self.replicas:
                await self.balanced(replica)
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._stack.aclose()

    def _launch_balancer(self) -> None:
        servers = "\n".join(f"    server {each.name} 127.0.0.1:{each.port}" for each in self.replicas)
        config = self.folder / "haproxy.cfg"
        config.write_text(_HAPROXY.format(port=self.port, servers=servers))
        with open(self.folder / "haproxy.log", "ab") as log:
            command = [str(self._haproxy), "-db", "-f", str(config)]
            self._balancer = subprocess.Popen(command, stdout=log, stderr=log)

    async def balanced(self, replica: Replica) -> None:
        """Until the balancer sends requests to ``replica``: with one connection it is reached within a few."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            answered = await self.client.get(f"{self.url}/healthz")
            if answered.headers.get("x-served-by") == replica.name:
                return
            if time.monotonic() > deadline:
                raise RuntimeError(f"the balancer never chose {replica.name}")
            await asyncio.sleep(0.02)

    async def _end(self) -> None:
        await self.client.aclose()
        running = [each.process for each in self.replicas if each.process is not None]
        for process in running:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            await asyncio.to_thread(process.wait)
        if self._balancer is not None:
            self._balancer.kill()
            await asyncio.to_thread(self._balancer.wait)
        for replica in self.replicas:
            await replica.proxy.stop()
        self.redis.kill()


def fake_replica(port: int, redis_url: str) -> None:
    """A whole gateway over the fake engine of the tests: starts within a second, and is slow enough to be hit."""
    from gateway.http.server import bind, run_server
    from gateway.serving.call import ServedModel
    from gateway.serving.controller import Controller
    from gateway.serving.state import GatewayState
    from gateway.serving.statistics_store import store_opener
    from policy.runtime import PolicyRuntime
    from tests.support.fakes import FakeDecoder, FakeTokenizer

    decoder = FakeDecoder(name=MODEL, natural_length=100, step_s=0.005)
    controller = Controller(PolicyRuntime.embedded(time.time()), open_store=store_opener(redis_url))
    state = GatewayState.create({MODEL: ServedModel(decoder, FakeTokenizer())}, None, controller)
    run_server(state, bind("127.0.0.1", port))


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    fake_replica(int(sys.argv[1]), sys.argv[2])
