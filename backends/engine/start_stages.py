"""What a start does, told line by line: what begins, about how long it takes, and in the end how long it took.

Imports nothing heavy: the first line comes before torch is imported.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from backends.types import START_LOG

start_log = logging.getLogger(START_LOG)


@dataclass(slots=True)
class StartStages:
    """Seconds by stage, in the order of their beginnings. A stage within another is not counted twice."""

    clock: Callable[[], float] = time.monotonic
    began: float = field(init=False)
    _seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.began = self.clock()

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self._seconds.setdefault(name, 0.0)
        before = sum(self._seconds.values())
        began = self.clock()
        try:
            yield
        finally:
            inner = sum(self._seconds.values()) - before
            self._seconds[name] += self.clock() - began - inner

    def told(self) -> str:
        """For example "12.3 s: importing 3.1, converting 4.2, loading 1.9, measuring 3.1"."""
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self._seconds.items())
        return f"{self.clock() - self.began:.1f} s" + (f": {parts}" if parts else "")


def tell(line: str) -> None:
    """On the console or in the log, unless only errors are asked for."""
    start_log.info(line)
