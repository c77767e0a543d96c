"""A call on a stack of its own that is large enough: a library that goes down by recursion takes the process with it
when the stack ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

STACK_BYTES = 64 << 20
"""Address space, of which memory is taken only as it is used; eight times what threads mostly have."""
_lock = threading.Lock()


def on_deep_stack(work: Callable[[], T]) -> T:
    """``work()`` in a thread made for it, whose end is waited for. Raises what it raises."""
    found: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            failed.append(error)

    # The size is a setting of the whole process, for threads to come.
    with _lock:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread = threading.Thread(target=run, name="grammar-compiler", daemon=True)
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if failed:
        raise failed[0]
    return found[0]
