"""What a Redis may do to limits: become a replica behind its address, run out of memory, refuse with many words."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from backends.types import DecodeCounters
from gateway.auth.access import Access
from gateway.auth.keyfile import KeySet
from policy.config.watched_file import WatchedFile
from policy.limits.arithmetic import KeyLimits
from policy.limits.limiter import Grant, Limiter
from policy.limits.redis_buckets import LimitsUnavailable, Order, RedisLimits
from policy.shared.embedded_valkey import EmbeddedServer
from policy.shared.redis_client import StoreUnavailable, connect, parse_redis_url
from policy.statistics.store import RedisStore
from tests.policy.test_policy_store import KEY, ValkeyProcess

PATIENCE_S = 30.0
LIMITS = KeyLimits(requests_per_minute=5)
EVICTING = ("--maxmemory", "4mb", "--maxmemory-samples", "64", "--maxmemory-policy")


class Forwarder:
    """One address before several servers. ``port`` is where *new* connections lead; old ones stay where they are."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.opened = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.opened += 1
        there = await asyncio.open_connection("127.0.0.1", self.port)
        for source, sink in ((reader, there[1]), (there[0], writer)):
            task = asyncio.create_task(self._copy(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()


async def command(server: ValkeyProcess, *words: Any) -> Any:
    client: Any = connect(parse_redis_url(server.url))
    try:
        return await client.execute_command(*words)
    finally:
        await client.aclose()


async def until(condition: Callable[[], Any], patience_s: float = PATIENCE_S) -> None:
    async with asyncio.timeout(patience_s):
        while not await condition():  # noqa: ASYNC110 - nothing there tells
            await asyncio.sleep(0.02)


@pytest.fixture
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., ValkeyProcess]]:
    started: list[ValkeyProcess] = []

    def start(*options: str) -> ValkeyProcess:
        started.append(ValkeyProcess(tmp_path_factory.mktemp("valkey"), options).start())
        return started[-1]

    yield start
    for each in started:
        each.kill()


@pytest.fixture
async def limiters() -> AsyncIterator[Callable[..., Any]]:
    started: list[Limiter] = []

    async def start(url: str, timeout_s: float = PATIENCE_S) -> Limiter:
        started.append(Limiter(timeout_s=timeout_s))
        await started[-1].start(parse_redis_url(url))
        return started[-1]

    yield start
    for each in started:
        await each.stop()


async def test_a_new_master_behind_the_same_address_is_found(servers: Any, limiters: Any) -> None:
    """The old master lives on as a replica: it answers, reads, and refuses every write."""
    first, second = (servers("--repl-diskless-sync-delay", "0") for _ in range(2))
    await command(second, "REPLICAOF", "127.0.0.1", first.port)
    forwarder = Forwarder(first.port)
    url = await forwarder.start()
    limiter = await limiters(url)
    store = RedisStore(parse_redis_url(url))
    try:
        assert not (await limiter.admit("k", LIMITS, 1)).local
        await store.write("r", 1, {7: {KEY: DecodeCounters(steps=3)}})

        async def copied() -> bool:
            return "{medusa}:1:limits:k" in await command(second, "KEYS", "*")

        await until(copied)
        opened = forwarder.opened
        await command(second, "REPLICAOF", "NO", "ONE")
        await command(first, "REPLICAOF", "127.0.0.1", second.port)
        forwarder.port = second.port
        assert (await limiter.admit("k", LIMITS, 1)).local, "the write that finds out is decided here"
        assert "read-only replica" in limiter.health.error

        async def shared_again() -> bool:
            return limiter.health.ok

        await until(shared_again, patience_s=5.0)
        assert not (await limiter.admit("k", LIMITS, 1)).local
        with pytest.raises(StoreUnavailable, match="read-only replica"):
            await store.write("r", 2, {7: {KEY: DecodeCounters(steps=4)}})
        await store.write("r", 3, {7: {KEY: DecodeCounters(steps=5)}})
        assert forwarder.opened > opened
        assert int(await command(second, "HGET", "{medusa}:1:limits:k", "requests")) < 4 * 60_000
        assert (await store.read([7]))[0]
    finally:
        await store.close()
        await forwarder.stop()


async def test_a_server_that_takes_no_writes_is_not_well(servers: Any) -> None:
    """It answers a ping; that says nothing of whether limits can be shared there."""
    master, replica = servers(), servers()
    await command(replica, "REPLICAOF", "127.0.0.1", master.port)
    remote = RedisLimits(parse_redis_url(replica.url))
    with pytest.raises(LimitsUnavailable, match="read-only replica"):
        await remote.run([])
    await remote.close()


async def fill(server: ValkeyProcess) -> None:
    """Statistics and more of them, with a day to live: 8,000 keys of 700 bytes into 4 MB."""
    client: Any = connect(parse_redis_url(server.url))
    for start in range(0, 8000, 500):
        pipeline = client.pipeline(transaction=False)
        for number in range(start, start + 500):
            pipeline.set(f"pad{number}", "x" * 700, ex=86_400)
        await pipeline.execute(raise_on_error=False)
    await client.aclose()


@pytest.mark.parametrize("policy", ["volatile-ttl", "noeviction"])
async def test_limits_outlive_a_server_that_is_short_of_memory(servers: Any, limiters: Any, policy: str) -> None:
    server = servers(*EVICTING, policy)
    first = await limiters(server.url)
    streams = KeyLimits(concurrent_streams=1)
    for _ in range(5):
        assert isinstance(await first.admit("k", LIMITS, 1), Grant)
    assert isinstance(await first.admit("s", streams, 1), Grant)
    await fill(server)
    assert (int((await command(server, "INFO", "stats"))["evicted_keys"]) > 0) == (policy == "volatile-ttl")
    second = await limiters(server.url)
    for key, limits in (("k", LIMITS), ("s", streams)):
        assert isinstance(await second.admit(key, limits, 1), tuple), "429, as before"
    assert second.decided_locally == 0
    left = await command(server, "KEYS", "{medusa}:1:limits:*")
    assert {"{medusa}:1:limits:k", "{medusa}:1:limits:k:leases", "{medusa}:1:limits:s:leases"} <= set(left)
    assert second.evicts_by is None
    assert isinstance(await second.admit("new", LIMITS, 1), Grant)
    assert (second.decided_locally, second.health.ok) == (0, True), "limits need no more room than they have"


async def test_a_lease_that_is_over_leaves_nothing(servers: Any, limiters: Any) -> None:
    """No key of limits has a time to live, so what is over must be gone by itself."""
    server = servers()
    limiter = await limiters(server.url)
    for key in "abc":
        (await limiter.admit(key, LIMITS, 1)).settle(1)
    await limiter.admit("d", LIMITS, 1)
    left = {name.rpartition("limits:")[2] for name in await command(server, "KEYS", "*")}
    assert left == {"a", "b", "c", "d", "d:leases"}


@pytest.mark.parametrize(("policy", "maxmemory", "told"), [
    ("allkeys-lru", "4mb", "allkeys-lru"),
    ("volatile-ttl", "4mb", None),
    ("noeviction", "4mb", None),
    ("allkeys-lru", "0", None),
])  # fmt: skip
async def test_a_server_that_may_forget_limits_is_told(
    servers: Any, limiters: Any, policy: str, maxmemory: str, told: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    server = servers("--maxmemory", maxmemory, "--maxmemory-policy", policy)
    limiter = await limiters(server.url)
    await limiter.admit("k", LIMITS, 1)
    await limiter._look()
    assert limiter.evicts_by == told
    keys = WatchedFile(lambda content, name: KeySet((), "1"), b"", "keys")
    assert [policy in each for each in Access(keys, limiter=limiter).problems()] == [True] * (told is not None)
    assert ("may forget limits" in caplog.text) == (told is not None)


def test_the_embedded_server_spares_what_has_no_time_to_live(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path)
    target = server.start()

    async def policy() -> str | None:
        remote = RedisLimits(target)
        try:
            return await remote.evicts_by()
        finally:
            await remote.close()

    try:
        assert asyncio.run(policy()) is None
    finally:
        server.stop()


async def test_an_error_is_told_without_its_script(servers: Any) -> None:
    server = servers("--maxmemory", "1", "--maxmemory-policy", "noeviction")
    remote = RedisLimits(parse_redis_url(server.url))
    await remote.run([Order("admit", "k", LIMITS, ["a"], 1, 1)])
    await command(server, "RENAME", "{medusa}:1:limits:k:leases", "{medusa}:1:limits:other")
    with pytest.raises(LimitsUnavailable) as caught:
        await remote.run([Order("admit", "other", LIMITS, ["a"], 1, 1)])
    assert str(caught.value) == ("ResponseError: WRONGTYPE Operation against a key holding the wrong kind of value")
    await remote.close()
    store = RedisStore(parse_redis_url(server.url))
    with pytest.raises(StoreUnavailable, match="command not allowed") as refused:
        await store.write("r", 1, {7: {KEY: DecodeCounters(steps=3)}})
    assert "local" not in str(refused.value) and len(str(refused.value)) < 200
    await store.close()


async def test_nobody_is_left_with_an_answer_that_no_one_wants(caplog: pytest.LogCaptureFixture) -> None:
    """Admissions that were given up, whose connection then breaks: asyncio has nothing to complain about."""
    closing = asyncio.Event()

    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await closing.wait()
        writer.close()

    server = await asyncio.start_server(mute, "127.0.0.1", 0)
    complaints: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    limiter = Limiter(timeout_s=0.02)
    await limiter.start(parse_redis_url(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"))
    asked = [asyncio.create_task(limiter.admit("k", KeyLimits(tokens_per_minute=9), 1)) for _ in range(3)]
    leaving = asyncio.create_task(limiter.admit("k", KeyLimits(tokens_per_minute=9), 1))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.gather(*asked, leaving, return_exceptions=True)
    closing.set()
    await limiter.stop()
    del asked, leaving
    import gc

    gc.collect()
    await asyncio.sleep(0)
    assert complaints == []
    server.close()
