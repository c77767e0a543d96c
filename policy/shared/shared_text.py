"""One small text that all replicas share, changed by compare-and-swap: what the alerts of a fleet are agreed on with.

Nothing here runs on a request's path. A call that fails raises :class:`policy.statistics.store.StoreUnavailable`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol


class SharedText(Protocol):
    async def load(self) -> tuple[str, float]:
        """The text ("" if there is none) and the store's wall clock, in seconds: one clock for all replicas."""
        ...

    async def swap(self, before: str, after: str) -> bool:
        """Set it, if it is still ``before``; False: another replica was faster."""
        ...


class MemoryText:
    """Of this process only."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._text = ""
        self._clock = clock

    async def load(self) -> tuple[str, float]:
        return self._text, self._clock()

    async def swap(self, before: str, after: str) -> bool:
        if self._text != before:
            return False
        self._text = after
        return True
