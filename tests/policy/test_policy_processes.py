"""Two gateway processes' statistics on one real server, with kills: what each counted is in its own book on disk.

Run as a program, this file is such a process: it counts, syncs and keeps its book until SIGTERM.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from backends.types import DecodeCounters
from policy.shared.embedded_valkey import EmbeddedServer, end_stale_server
from policy.shared.redis_client import parse_redis_url
from policy.statistics.aggregate import Statistics
from policy.statistics.epoch_book import epoch_of
from policy.statistics.store import EmbeddedStore, RedisStore, StatsStore
from policy.statistics.syncing import StoreSync
from tests.support.paths import ROOT

KEY = "m|code|greedy|policy"
SYNC_EVERY_S = 0.2
COUNT_EVERY_S = 0.01
PATIENCE_S = 30.0


async def work(url: str, book: Path) -> None:
    """A byte in ``book`` for every step that is counted; on SIGTERM a last sync, and a report beside the book."""
    statistics = Statistics(book.stem)
    store = RedisStore(parse_redis_url(url))
    sync = StoreSync(statistics, store)
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    file = os.open(book, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    async def count() -> None:
        while not stopping.is_set():
            counters = DecodeCounters(steps=1, emitted_tokens=2, vanilla_us=20, spent_us=10, attempts=[1], hits=[[1]])
            statistics.add_own({KEY: counters}, time.monotonic(), time.time())
            os.write(file, b".")
            await asyncio.sleep(COUNT_EVERY_S)

    counting = asyncio.create_task(count())
    failures = 0
    while not stopping.is_set():
        failures += not await sync.sync(time.monotonic(), time.time())
        await asyncio.sleep(SYNC_EVERY_S)
    await counting
    await sync.sync(time.monotonic(), time.time())
    report = {
        "own": statistics.book.total()[KEY].steps,
        "others": sum(value.steps for value in statistics._seen.values()),
        "failures": failures,
        "rewritten": sync.rewritten_epochs,
    }
    book.with_suffix(".json").write_text(json.dumps(report))
    await store.close()


class Replica:
    def __init__(self, url: str, book: Path) -> None:
        self.book = book
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.policy.test_policy_processes", url, str(book)], cwd=ROOT
        )

    @property
    def counted(self) -> int:
        return self.book.stat().st_size if self.book.exists() else 0

    def stop(self) -> dict[str, int]:
        self.process.terminate()
        assert self.process.wait(PATIENCE_S) == 0
        return json.loads(self.book.with_suffix(".json").read_text())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[Callable[[str, str], Replica]]:
    started: list[Replica] = []

    def start(url: str, name: str) -> Replica:
        started.append(Replica(url, tmp_path / f"{name}.book"))
        return started[-1]

    yield start
    for each in started:
        each.kill()


def stored(url: str) -> dict[str, int]:
    """Steps in the server by replica, over all epochs that tests can have reached."""

    async def read() -> dict[str, int]:
        store: StatsStore = RedisStore(parse_redis_url(url))
        now = epoch_of(time.time())
        registers, _ = await store.read(range(now - 30, now + 2))
        await store.close()
        found: dict[str, int] = {}
        for register, counters in registers.items():
            found[register.replica] = found.get(register.replica, 0) + counters.steps
            assert counters.emitted_tokens == 2 * counters.steps
            assert counters.hits == [[counters.steps]]
        return found

    return asyncio.run(read())


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_one_of_two_is_killed(tmp_path: Path, replicas: Callable[[str, str], Replica]) -> None:
    from tests.support.valkey import ValkeyProcess

    server = ValkeyProcess(tmp_path).start()
    try:
        a, b = replicas(server.url, "a"), replicas(server.url, "b")
        wait_until(lambda: all(stored(server.url).get(name, 0) > 100 for name in "ab"))
        a.kill()
        counted = a.counted
        left = stored(server.url)["a"]
        assert counted - 1.0 / COUNT_EVERY_S <= left <= counted, "lost: at most its last second"
        after = b.counted
        wait_until(lambda: b.counted > after + 100)
        report = b.stop()
        assert report["others"] == left, "the survivor has seen all that was left of the other"
        assert report["own"] == b.counted
        assert stored(server.url) == {"a": left, "b": b.counted}
    finally:
        server.kill()


@pytest.mark.parametrize("durable", [False, True], ids=["comes back empty", "comes back with an older state"])
def test_the_server_is_killed_under_load(
    tmp_path: Path, replicas: Callable[[str, str], Replica], durable: bool
) -> None:
    """Whatever the server remembers, and whichever writes it had taken without saying so: the sums agree."""
    from tests.support.valkey import ValkeyProcess

    options = ("--appendonly", "yes", "--appendfsync", "everysec") if durable else ()
    server = ValkeyProcess(tmp_path, options).start()
    try:
        a, b = replicas(server.url, "a"), replicas(server.url, "b")
        for _ in range(2):
            before = a.counted + b.counted
            wait_until(lambda before=before: a.counted + b.counted > before + 200)
            server.kill()
            down = a.counted, b.counted
            wait_until(lambda down=down: a.counted > down[0] + 50 and b.counted > down[1] + 50)
            server.start()
        wait_until(lambda: all(stored(server.url).get(name, 0) > 200 for name in "ab"))
        reports = a.stop(), b.stop()
        assert all(report["failures"] > 0 for report in reports), "the outage was noticed"
        assert [report["own"] for report in reports] == [a.counted, b.counted]
        assert stored(server.url) == {"a": a.counted, "b": b.counted}, "nothing lost, nothing twice"
    finally:
        server.kill()


def test_an_embedded_server_keeps_the_prior_and_cleans_up_after_a_kill(tmp_path: Path) -> None:
    folder = tmp_path / "state with a space"
    first = EmbeddedServer(folder)
    target = first.start()
    assert first.pid is not None

    async def count(server: EmbeddedServer, prefix: str) -> int:
        store = EmbeddedStore(server, target)
        statistics = Statistics(prefix)
        sync = StoreSync(statistics, store)
        for second in range(60):
            statistics.add_own({KEY: DecodeCounters(steps=5)}, second, 1000.0 + second)
            assert await sync.sync(second, 1000.0 + second)
        assert store.durable
        _, prior = await store.read([])
        await store.close()
        return round(prior.tallies[KEY].steps)

    assert asyncio.run(count(first, "a")) in range(130, 152)
    assert first.pid is None
    # The next one is left behind, as by a SIGKILL of its gateway: its lock is gone, its process is not.
    second = EmbeddedServer(folder)
    target = second.start()
    orphan = second.pid
    assert second._lock is not None
    second._lock.close()
    third = EmbeddedServer(folder)
    target = third.start()
    assert third.stale_ended == orphan
    assert not Path(str(second._temporary[0])).exists(), "its socket is gone too"

    async def prior_steps() -> float:
        store = EmbeddedStore(third, target)
        _, prior = await store.read([])
        # While this one lives, another works beside it.
        fourth = EmbeddedServer(folder)
        beside = EmbeddedStore(fourth, fourth.start())
        assert (fourth.shared_folder_taken, beside.durable) == (True, False)
        assert "temporary folder" in beside.describe
        assert await beside.read([]) == ({}, type(prior)())
        await beside.close()
        await store.close()
        return prior.tallies[KEY].steps

    assert round(asyncio.run(prior_steps())) in range(130, 152), "kept over a stop, an orphan and a start"
    second.stop()


def test_only_an_own_server_is_ended(tmp_path: Path) -> None:
    """The pid in the file may be anybody's by now."""
    bystander = subprocess.Popen(["sleep", "60"], cwd=tmp_path)
    try:
        (tmp_path / "pid").write_text(f"{bystander.pid} /nowhere/socket\n")
        assert end_stale_server(tmp_path) is None
        assert bystander.poll() is None
        (tmp_path / "pid").write_text("nonsense")
        assert end_stale_server(tmp_path) is None
        assert not (tmp_path / "pid").exists()
    finally:
        bystander.kill()
        bystander.wait()


if __name__ == "__main__":
    asyncio.run(work(sys.argv[1], Path(sys.argv[2])))
