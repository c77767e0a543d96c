"""Ends that come whatever hangs, and say what that was.

A process that stays after SIGTERM blocks a rollout, and one that is killed leaves no word about why.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from collections.abc import Callable, Coroutine, Iterable
from types import FrameType
from typing import Any

logger = logging.getLogger("gateway")


async def stopped(what: str, stop: Coroutine[Any, Any, None], within_s: float) -> bool:
    """Run ``stop`` to its end, but no longer than that; what it raises is logged, since others are to be stopped too.

    The work that hangs is left behind, even if it does not heed its cancellation.
    """
    task = asyncio.ensure_future(stop)
    await asyncio.wait({task}, timeout=within_s)
    if not task.done():
        logger.error("%s did not stop within %g s and is left behind, at %s", what, within_s, place_of(task))
        task.cancel()
        return False
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("%s failed while it stopped", what, exc_info=error)
    return True


def exit_within(seconds: float, loop: asyncio.AbstractEventLoop | None, leave: Callable[[int], Any] = os._exit) -> None:
    """End the process that much later, if it has not ended by itself. ``loop``: whose tasks are then named."""

    def end() -> None:
        logger.critical(
            "the process did not end within %g s and is ended now; still there: %s",
            seconds,
            "; ".join([*_tasks(() if loop is None else asyncio.all_tasks(loop)), *_threads()]),
        )
        sys.stderr.flush()
        leave(1)

    timer = threading.Timer(seconds, end)
    # So that a process that ends earlier does not wait for it.
    timer.daemon = True
    timer.start()


def place_of(task: asyncio.Task[Any]) -> str:
    """Where a task waits: the functions that wait for one another, the innermost last, with its file and line."""
    waiting: Any = task.get_coro()
    frames: list[FrameType] = []
    while waiting is not None:
        frame = getattr(waiting, "cr_frame", None) or getattr(waiting, "gi_frame", None)
        if frame is not None:
            frames.append(frame)
        waiting = getattr(waiting, "cr_await", None) or getattr(waiting, "gi_yieldfrom", None)
    return " > ".join([*(each.f_code.co_qualname for each in frames[:-1]), *(_place(each) for each in frames[-1:])])


def _tasks(tasks: Iterable[asyncio.Task[Any]]) -> list[str]:
    return [f"task {task.get_name()} at {place_of(task)}" for task in tasks if not task.done()]


def _threads() -> list[str]:
    """Daemons too: nobody waits for those when a process ends, but an engine's is waited for before that."""
    frames = sys._current_frames()
    return [
        f"thread {thread.name} at {_place(frames[thread.ident])}"
        for thread in threading.enumerate()
        if thread.ident in frames and thread is not threading.current_thread()
    ]


def _place(frame: FrameType) -> str:
    code = frame.f_code
    return f"{code.co_qualname} ({code.co_filename}:{frame.f_lineno})"
