"""What goes on beside the requests always ends: cancellations that get lost, calls and files that never come back."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from backends.types import DecodeCounters
from gateway.auth.access import Access, open_keys
from gateway.serving.controller import Controller
from policy.background import PatientCall, cancel_and_wait, pause
from policy.config.watched_file import FileWatch, WatchedFile, read_regular
from policy.runtime import PolicyRuntime
from policy.shared.redis_client import parse_redis_url
from policy.statistics.store import EmbeddedStore, MemoryStore
from tests.gateway.serving.test_controller_background import wait_until
from tests.support.access_helpers import entry, new_key, write_keys
from tests.support.live_gateway import running_gateway

GOOD = b"version: 1\ndefaults: {heads: 2}\n"
BETTER = b"version: 1\ndefaults: {heads: 3}\n"
PATIENCE_S = 30.0


async def swallowed(begun: asyncio.Event) -> None:
    """As ``asyncio.wait_for`` of Python 3.11 does when its result is there in the same turn."""
    begun.set()
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        return


async def test_a_cancellation_that_is_swallowed_is_said_again() -> None:
    begun = asyncio.Event()

    async def loop() -> None:
        await swallowed(begun)
        await asyncio.Event().wait()

    task = asyncio.create_task(loop())
    await begun.wait()
    await cancel_and_wait(task, again_s=0.01)
    assert task.cancelled()


async def test_a_loop_sees_that_it_was_cancelled_before_it_sleeps() -> None:
    begun, rounds = asyncio.Event(), 0

    async def loop() -> None:
        nonlocal rounds
        while True:
            rounds += 1
            await swallowed(begun)
            await pause(0)

    task = asyncio.create_task(loop())
    await begun.wait()
    await cancel_and_wait(task, again_s=PATIENCE_S, patience_s=PATIENCE_S)
    assert (task.cancelled(), rounds) == (True, 1)


async def test_what_can_not_be_ended_is_left_behind(caplog: pytest.LogCaptureFixture) -> None:
    begun, free = asyncio.Event(), asyncio.Event()

    async def deaf() -> None:
        while not free.is_set():
            await swallowed(begun)

    task = asyncio.create_task(deaf(), name="deaf work")
    await begun.wait()
    await cancel_and_wait(task, again_s=0.01, patience_s=0.05)
    assert "deaf work did not end" in caplog.text
    free.set()
    await cancel_and_wait(task)
    assert task.done()


async def test_what_a_task_raised_does_not_stop_the_others_from_being_ended(caplog: pytest.LogCaptureFixture) -> None:
    async def failing() -> None:
        raise ValueError("something secret")

    waiting, failed = asyncio.create_task(pause(PATIENCE_S)), asyncio.create_task(failing())
    await asyncio.sleep(0)
    await cancel_and_wait(failed, waiting)
    assert waiting.cancelled()
    assert "ValueError" in caplog.text


async def test_a_controller_stops_although_its_store_swallows_the_cancellation() -> None:
    begun = asyncio.Event()

    class Swallowing(MemoryStore):
        async def read(self, epochs: Any) -> Any:
            await swallowed(begun)
            return await super().read(epochs)

    store = Swallowing()

    async def opened() -> MemoryStore:
        return store

    controller = Controller(PolicyRuntime.from_text(GOOD), open_store=opened, replica="r")
    await controller.background.start({})
    await begun.wait()
    controller.statistics.add_own({"m|chat|high|policy": DecodeCounters(steps=7)}, 0.0, 0.0)
    async with asyncio.timeout(PATIENCE_S):
        await controller.background.stop()
    assert sum(each.steps for _, each in store._registers.values()) == 7, "and its last second is written"


async def test_an_embedded_server_is_ended_beside_the_loop() -> None:
    """Whoever waits for its data to be on disk, it isn't the loop."""
    turned = threading.Event()

    class Slow:
        shared_folder_taken, folder = False, Path()

        def stop(self) -> None:
            assert turned.wait(PATIENCE_S), "the loop stood still"

    store = EmbeddedStore(Slow(), parse_redis_url("redis://127.0.0.1:1"))  # type: ignore[arg-type]
    closing = asyncio.create_task(store.close())
    await asyncio.sleep(0)
    turned.set()
    await closing


async def test_a_call_that_hangs_is_made_once_and_its_result_taken_late() -> None:
    now, calls, free = [100.0], 0, threading.Event()

    def work() -> int:
        nonlocal calls
        calls += 1
        assert free.wait(PATIENCE_S)
        return calls

    call = PatientCall(work, clock=lambda: now[0], patience_s=0.02)
    assert call.hangs_s is None
    for waited in (3.0, 7.0):
        with pytest.raises(TimeoutError):
            await call()
        now[0] = 100.0 + waited
        assert (call.hangs_s, calls) == (waited, 1)
    free.set()
    call._patience_s = PATIENCE_S
    assert (await call(), call.hangs_s) == (1, None)
    assert await call() == 2


# Files.


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "policy.yaml"
    path.write_bytes(GOOD)
    return path


def replace_by_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def test_a_fifo_is_refused_by_name_and_a_file_again_is_taken(path: Path) -> None:
    runtime = PolicyRuntime.open(path)
    replace_by_fifo(path)
    assert [runtime.poll(1.0), runtime.poll(2.0)] == ["settling", "rejected"]
    assert runtime.status.rejection is not None
    assert "is a FIFO; it must be a regular file" in runtime.status.rejection.problems[0]
    path.unlink()
    (path.parent / "real").write_bytes(BETTER)
    path.symlink_to("real")
    assert [runtime.poll(3.0), runtime.poll(4.0)] == ["settling", "accepted"]


def test_nothing_starts_with_what_is_no_file(path: Path, tmp_path: Path) -> None:
    replace_by_fifo(path)
    for each in (PolicyRuntime.open, open_keys):
        with pytest.raises(OSError, match="is a FIFO"):
            each(path)
    with pytest.raises(OSError, match="is a folder"):
        read_regular(tmp_path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        with pytest.raises(OSError, match=r"is a socket|No such device"):
            read_regular(tmp_path / "socket")
    with pytest.raises(OSError, match="is a device"):
        read_regular(Path("/dev/null"))


@pytest.fixture
def stuck() -> Iterator[threading.Event]:
    """Set: reading goes on."""
    free = threading.Event()
    yield free
    free.set()


def hang(file: WatchedFile[Any], watch: FileWatch[Any] | None, free: threading.Event) -> threading.Event:
    """Make every further reading of ``file`` hang; what comes back is set once one does."""
    hangs, read = threading.Event(), file._read

    def reading(path: Path) -> bytes:
        hangs.set()
        free.wait()
        return read(path)

    file._read = reading
    assert watch is not None
    watch._poll._patience_s = 0.05
    return hangs


async def test_that_a_file_hangs_is_logged_once_and_so_is_its_end(
    path: Path, stuck: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    file = PolicyRuntime.open(path)
    watch = FileWatch(file, time.monotonic)
    hang(file, watch, stuck)
    with caplog.at_level(logging.WARNING, "gateway"):
        assert [await watch.poll() for _ in range(3)] == ["hangs"] * 3
        assert watch.hangs
        stuck.set()
        watch._poll._patience_s = PATIENCE_S
        assert await watch.poll() == "unchanged"
    said = [record.getMessage() for record in caplog.records]
    version = file.status.version
    assert said == [
        f"{path} can't be read, its file system hangs; {version} stays in force",
        f"{path} can be read again",
    ]


def test_files_that_hang_are_told_and_keep_no_gateway_from_ending(
    path: Path, tmp_path: Path, stuck: threading.Event
) -> None:
    """``running_gateway`` fails if the server has not ended in time, which joins the default executor's threads."""
    write_keys(tmp_path / "keys", entry("alice", new_key()))
    controller = Controller(PolicyRuntime.open(path))
    access = Access(open_keys(tmp_path / "keys"), local=False)
    hangs = [hang(controller.policy, controller.background.file, stuck)]
    assert access.keys is not None
    hangs.append(hang(access.keys, access._file, stuck))
    with running_gateway(controller=controller, access=access) as live:
        for each in hangs:
            assert each.wait(PATIENCE_S)

        def told() -> list[str]:
            return [each for each in live.http.get("/healthz").json()["degraded"] if "can't be read for" in each]

        wait_until(lambda: len(told()) == 2)
        assert [each.split(" can't")[0] for each in told()] == ["the policy file", "the key file"]


async def test_a_file_that_answers_again_is_taken(path: Path, stuck: threading.Event) -> None:
    runtime = PolicyRuntime.open(path)
    watch = FileWatch(runtime, lambda: 0.0)
    hangs = hang(runtime, watch, stuck)
    path.write_bytes(BETTER)  # noqa: ASYNC240 - nothing else runs
    assert await watch.poll() == "hangs"
    assert hangs.is_set()
    stuck.set()
    watch._poll._patience_s = PATIENCE_S
    assert [await watch.poll(), await watch.poll()] == ["settling", "accepted"]
    assert watch.problem("the policy file") is None
