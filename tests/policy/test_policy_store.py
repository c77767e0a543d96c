"""The stores: one suite over memory and a real server, and the ways to reach a server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backends.types import DecodeCounters
from policy.shared.redis_client import RedisTarget, StoreUnavailable, connect, parse_redis_url, with_password
from policy.statistics.aggregate import Statistics, fold
from policy.statistics.counters import Tally
from policy.statistics.epoch_book import EPOCH_S, EpochBook
from policy.statistics.store import MemoryStore, Prior, RedisStore, Register, StatsStore
from policy.statistics.syncing import READ_EPOCHS, StoreSync
from tests.support.ports import free_port
from tests.support.valkey import ValkeyProcess

KEY = "m|code|greedy|policy"
PATIENCE_S = 20.0


@pytest.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[StatsStore]:
    if request.param == "memory":
        made: StatsStore = MemoryStore()
    else:
        running: ValkeyProcess = request.getfixturevalue("server")
        client: Any = connect(parse_redis_url(running.url))
        await client.flushall()
        await client.aclose()
        made = RedisStore(parse_redis_url(running.url))
    yield made
    await made.close()


def counted(steps: int, hits: int = 0) -> DecodeCounters:
    return DecodeCounters(steps=steps, emitted_tokens=2 * steps, attempts=[steps], hits=[[hits, 0]])


async def test_registers_come_back_as_they_were(store: StatsStore) -> None:
    await store.write("a", 1, {7: {KEY: counted(3, 2), "other": counted(1)}, 8: {KEY: counted(5)}})
    await store.write("b", 1, {8: {KEY: counted(10)}})
    registers, prior = await store.read([6, 7, 8])
    assert registers == {
        Register(7, "a", KEY): counted(3, 2),
        Register(7, "a", "other"): counted(1),
        Register(8, "a", KEY): counted(5),
        Register(8, "b", KEY): counted(10),
    }
    assert prior == Prior()
    assert (await store.read([7]))[0].keys() == {Register(7, "a", KEY), Register(7, "a", "other")}


async def test_writing_again_changes_nothing_and_an_older_write_never_wins(store: StatsStore) -> None:
    await store.write("a", 2, {7: {KEY: counted(9)}})
    for _ in range(3):
        await store.write("a", 2, {7: {KEY: counted(9)}})
    # Serial 1 hung in some connection while 2 went through.
    await store.write("a", 1, {7: {KEY: counted(4)}})
    assert (await store.read([7]))[0] == {Register(7, "a", KEY): counted(9)}


async def test_the_prior_is_replaced_by_one_replica_only(store: StatsStore) -> None:
    first = Prior(7, {KEY: Tally({"steps": 2.5}, [2.0], [[1.25, 0.0]])})
    assert await store.replace_prior(-1, first)
    assert not await store.replace_prior(-1, Prior(8, {}))
    assert (await store.read([]))[1] == first
    assert await store.replace_prior(7, Prior(9, {}))
    assert (await store.read([]))[1] == Prior(9, {})


async def test_two_replicas_see_each_other_and_count_nothing_twice(store: StatsStore) -> None:
    first, second = Statistics("a"), Statistics("b")
    syncs = StoreSync(first, store), StoreSync(second, store)
    for second_of_day in range(40):
        now = 1000.0 + second_of_day
        first.add_own({KEY: counted(3)}, now, now)
        second.add_own({KEY: counted(4)}, now, now)
        for each in syncs:
            for _ in range(2):
                assert await each.sync(now, now)
    assert await syncs[0].sync(1040.0, 1040.0)
    for statistics in (first, second):
        seen = statistics.window.trailing(("m", "code"), "policy", 1040.0, least_s=600, least_steps=0, most_s=600)
        # Each starts with what was in the store then, which is no news: the first second of the other.
        assert seen.steps in (40 * 7, 40 * 7 - 3)
    registers, _ = await store.read(range(100, 105))
    assert sum(each.steps for each in registers.values()) == 40 * 7


async def test_a_starting_replica_takes_over_prior_and_recent_epochs(store: StatsStore) -> None:
    first = Statistics("a")
    sync = StoreSync(first, store)
    priors: set[int] = set()
    for second in range(100):
        now = 1000.0 + second
        first.add_own({KEY: counted(10, 8)}, now, now)
        await sync.sync(now, now)
        priors.add((await store.read([]))[1].epoch)
    assert len(priors - {-1}) >= 5, "folded again and again, not once"
    registers, prior = await store.read(range(100, 110))
    assert prior.epoch == 106
    assert 690 <= prior.tallies[KEY].steps <= 700, "all closed epochs, each once, decayed by next to nothing"
    late = Statistics("late")
    assert await StoreSync(late, store).sync(5.0, 1100.0)
    (estimate,) = late._estimates.values()
    assert 450 <= estimate.slow.steps <= 500, "200 of the prior, and the three epochs that it doesn't hold yet"
    assert late.window.names == [], "what is minutes old says nothing of the last five seconds"
    # A year later the epochs are gone; the prior is not.
    registers = {}
    assert fold(prior, registers, 200, 0.5, 1e9).tallies[KEY].steps == prior.tallies[KEY].steps / 2


def test_folding_takes_each_epoch_once_and_forgets_in_bounds() -> None:
    registers = {Register(epoch, "a", KEY): counted(100) for epoch in range(10)}
    prior = fold(Prior(), registers, 5, 1.0, 1e9)
    assert (prior.epoch, prior.tallies[KEY].steps) == (5, 600)
    again = fold(prior, registers, 7, 0.5, 1e9)
    assert again.tallies[KEY].steps == 300 + 200
    assert fold(prior, registers, 9, 1.0, 250).tallies[KEY].steps == pytest.approx(250)


def test_the_book_owes_what_was_not_confirmed() -> None:
    book = EpochBook()
    book.add(KEY, counted(1), 1000.0)
    owed = book.unstored()
    book.add(KEY, counted(2), 1001.0)  # counted while the write was under way
    book.stored({number: version for number, (version, _) in owed.items()})
    assert book.unstored()[100][1] == {KEY: counted(3)}
    book.stored({100: book.unstored()[100][0]})
    assert book.unstored() == {}
    assert not book.compare(100, {KEY: counted(3)})
    assert book.compare(100, {}), "the store has lost it"
    assert book.unstored()[100][1] == {KEY: counted(3)}
    book.add(KEY, counted(1), 1000.0 + 200 * EPOCH_S)
    assert book.epochs == [300], "half an hour is kept"
    assert book.total() == {KEY: counted(4)}, "but the total is for ever"


class BrokenStore(MemoryStore):
    broken = True

    async def write(self, *args: Any) -> None:
        if self.broken:
            raise StoreUnavailable("told to fail")
        await super().write(*args)


async def test_an_outage_is_survived_and_caught_up() -> None:
    store, statistics = BrokenStore(), Statistics("a")
    sync = StoreSync(statistics, store)
    for second in range(300):
        statistics.add_own({KEY: counted(2)}, second, second)
        assert not await sync.sync(second, second)
    assert (sync.health.ok, sync.health.failures, sync.health.error) == (False, 300, "told to fail")
    assert statistics.book.total()[KEY].steps == 600
    store.broken = False
    assert await sync.sync(300, 300)
    registers, _ = await store.read(range(31))
    assert sum(each.steps for each in registers.values()) == 600
    assert (sync.health.ok, sync.health.failures) == (True, 0)


async def test_a_store_that_lost_its_memory_is_told_again() -> None:
    statistics, lost = Statistics("a"), MemoryStore()
    sync = StoreSync(statistics, lost)
    for second in range(100):
        statistics.add_own({KEY: counted(2)}, second, second)
        assert await sync.sync(second, second)
    lost._registers.clear()
    for second in range(100, 112):
        assert await sync.sync(second, second)
    registers, _ = await lost.read(range(-READ_EPOCHS, 20))
    assert sum(each.steps for each in registers.values()) == 200
    assert sync.rewritten_epochs == 10


async def test_foreign_values_are_left_alone(server: ValkeyProcess) -> None:
    target = parse_redis_url(f"{server.url}?namespace=other")
    client: Any = connect(target)
    await client.hset("{other}:1:epoch:5", mapping={"x|k": "1 not json", "y": "", "z|k": '1 {"steps":"many"}'})
    await client.set("{other}:1:prior", "12 broken")
    store = RedisStore(target)
    assert await store.read([5]) == ({}, Prior(12))
    await store.close()
    await client.aclose()


async def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    store = RedisStore(parse_redis_url(f"redis://127.0.0.1:{free_port()}"))
    with pytest.raises(StoreUnavailable):
        await store.read([1])
    with pytest.raises(StoreUnavailable):
        await store.write("a", 1, {1: {KEY: counted(1)}})
    await store.close()


async def round_trip(url: str) -> None:
    store = RedisStore(parse_redis_url(url))
    await store.write("a", 1, {7: {KEY: counted(3)}, 8: {KEY: counted(1)}})
    assert len((await store.read([7, 8]))[0]) == 2
    assert await store.replace_prior(-1, Prior(7, {KEY: Tally({"steps": 3.0})}))
    await store.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., ValkeyProcess]]:
    started: list[ValkeyProcess] = []

    def begin(*options: str, config: str | None = None) -> ValkeyProcess:
        folder = tmp_path / str(len(started))
        folder.mkdir()
        started.append(ValkeyProcess(folder, options, config).start())
        return started[-1]

    yield begin
    for process in started:
        process.kill()


async def test_a_password(start: Callable[..., ValkeyProcess]) -> None:
    server = start("--requirepass", "se/cret@1")
    await round_trip(f"redis://:se%2Fcret%401@127.0.0.1:{server.port}/0")
    with pytest.raises(StoreUnavailable, match=r"(?i)auth"):
        await round_trip(server.url)


async def test_a_unix_socket(start: Callable[..., ValkeyProcess], tmp_path: Path) -> None:
    start("--unixsocket", str(tmp_path / "s"))
    await round_trip(f"unix://{tmp_path}/s")


async def test_a_cluster(start: Callable[..., ValkeyProcess]) -> None:
    server = start("--cluster-enabled", "yes", "--cluster-port", str(free_port()))
    client: Any = connect(parse_redis_url(server.url))
    await client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
    deadline = time.monotonic() + PATIENCE_S
    while "cluster_state:ok" not in str(await client.execute_command("CLUSTER", "INFO")):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
    await client.aclose()
    await round_trip(f"redis+cluster://127.0.0.1:{server.port}")


async def test_sentinel(start: Callable[..., ValkeyProcess]) -> None:
    master = start()
    sentinel = start("--sentinel", config=f"sentinel monitor main 127.0.0.1 {master.port} 1\n")
    await round_trip(f"redis+sentinel://127.0.0.1:{free_port()},127.0.0.1:{sentinel.port}/main")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://h", "redis://h:6379/0"),
        ("redis://user:pw@h:1/3", "redis://h:1/3"),
        ("rediss://h:1", "rediss://h:1/0"),
        ("redis://[::1]:7/2", "redis://[::1]:7/2"),
        ("unix:///run/x.sock?db=2", "unix:///run/x.sock"),
        ("redis+sentinel://:pw@a:1,b/main/2", "redis+sentinel://a:1,b:26379/main"),
        ("rediss+cluster://a:1,b:2", "rediss+cluster://a:1,b:2/0"),
    ],
)
def test_urls(url: str, shown: str) -> None:
    target = parse_redis_url(url)
    assert str(target) == shown
    assert "pw" not in repr(target)


def test_everything_in_a_url() -> None:
    assert parse_redis_url("rediss+sentinel://u:p%40@a:1,b:2/main/4?namespace=blue&sentinel_password=s") == RedisTarget(
        "sentinel",
        tls=True,
        hosts=(("a", 1), ("b", 2)),
        username="u",
        password="p@",
        db=4,
        service="main",
        namespace="blue",
        options=(("sentinel_password", "s"),),
    )


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("localhost:6379", "one of these forms"),
        ("http://h", "one of these forms"),
        ("redis://h:port", "is not host:port"),
        ("redis://h/x", "db must be a number"),
        ("redis://h/1/2", "too much after the host"),
        ("redis+sentinel://h:1", "names the service"),
        ("redis+cluster://h/1", "no databases but 0"),
        ("redis://h?timeout=1", "takes no 'timeout'"),
        ("redis://h?namespace=a b", "namespace must be"),
        ("unix://x", "three slashes"),
    ],
)
def test_urls_that_cannot_be_used(url: str, told: str) -> None:
    with pytest.raises(ValueError, match=told) as caught:
        parse_redis_url(url.replace("://", "://u:secret@", 1) if "h" in url and "unix" not in url else url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "redis://h:1/2",
        "redis://u@h:1",
        "rediss://h?namespace=blue",
        "redis://[::1]:7/2",
        "redis+sentinel://a:1,b:2/main/4?sentinel_password=s",
        "redis+cluster://a:1,b:2",
    ],
)
def test_a_password_apart_from_the_url(url: str) -> None:
    password = "a@b:c/d?e#f%41 g$(X)"
    assert parse_redis_url(with_password(url, password)) == replace(parse_redis_url(url), password=password)


def test_a_password_in_the_url_counts() -> None:
    assert with_password("redis://:own@h", "other") == "redis://:own@h"
    assert with_password("no url", "other") == "no url", "left to the parser to refuse"
    with pytest.raises(ValueError, match="takes no password"):
        with_password("unix:///run/x.sock", "other")


def test_tls_is_checked() -> None:
    client: Any = connect(parse_redis_url("rediss://h:1?ssl_ca_certs=/ca.pem"))
    options = client.connection_pool.connection_kwargs
    assert (options["ssl_cert_reqs"], options["ssl_check_hostname"], options["ssl_ca_certs"]) == (
        "required", True, "/ca.pem",
    )  # fmt: skip
