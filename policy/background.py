"""Work beside the requests: tasks that go on until they are ended, and calls that may never come back."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

logger = logging.getLogger("gateway")

T = TypeVar("T")

AGAIN_S = 0.5
PATIENCE_S = 5.0
CALL_PATIENCE_S = 2.0


async def cancel_and_wait(*tasks: asyncio.Task[None], again_s: float = AGAIN_S, patience_s: float = PATIENCE_S) -> None:
    """Cancel ``tasks`` until they have ended, for at most ``patience_s``. What they raised is logged.

    Once is not enough: what a task waits for may swallow it. Python 3.11's ``asyncio.wait_for`` gives its result and
    drops a cancellation that comes in the same turn of the loop, and every command of redis-py goes through one.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + patience_s
    left = {task for task in tasks if not task.done()}
    while left and loop.time() < end:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=min(again_s, max(end - loop.time(), 0.0)))
    for task in tasks:
        if not task.done():
            logger.error("%s did not end within %g s; it is left behind", task.get_name(), patience_s)
        elif not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s had failed: %s", task.get_name(), type(error).__name__)


def cancelled() -> bool:
    """Whether the running task was told to end, also if that was swallowed."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def pause(seconds: float) -> None:
    """Sleep between two rounds of a loop, or end it if it was cancelled meanwhile and did not notice."""
    if cancelled():
        raise asyncio.CancelledError
    await asyncio.sleep(seconds)


def in_daemon_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """The result of ``work`` in a thread of its own, which nobody waits for when the process ends.

    For what may hang for ever, such as a file on a network. (The threads of ``asyncio.to_thread`` are joined.)
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():  # whoever asked has left
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result: T | None = None
        error: BaseException | None = None
        try:
            result = work()
        except BaseException as raised:
            error = raised
        with suppress(RuntimeError):  # the loop has been closed meanwhile
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name=getattr(work, "__name__", "work"), daemon=True).start()
    return future


class PatientCall(Generic[T]):
    """A call that may hang, such as reading a file on a network, made again and again, but never twice at a time.

    Used from one event loop. ``clock`` in seconds.
    """

    def __init__(
        self, work: Callable[[], T], *, clock: Callable[[], float] = time.monotonic, patience_s: float = CALL_PATIENCE_S
    ) -> None:
        self._work = work
        self._clock = clock
        self._patience_s = patience_s
        self._under_way: asyncio.Future[T] | None = None
        self._since = 0.0

    async def __call__(self) -> T:
        """The result of this call, or of an earlier one that comes back only now.

        Raises what the call raises, and TimeoutError if it takes longer than ``patience_s``. It then goes on.
        """
        if self._under_way is None:
            self._under_way, self._since = in_daemon_thread(self._work), self._clock()
            # Told to the next call; at the end of all there may be none.
            self._under_way.add_done_callback(lambda future: future.cancelled() or future.exception())
        future = self._under_way
        done, _ = await asyncio.wait((future,), timeout=self._patience_s)
        if not done:
            raise TimeoutError(f"no answer for {self._clock() - self._since:.0f} s")
        self._under_way = None
        return future.result()

    @property
    def hangs_s(self) -> float | None:
        """For how long the call under way has kept its caller waiting; None if that is not longer than it may."""
        waited = self._clock() - self._since
        return waited if self._under_way is not None and waited >= self._patience_s else None
