"""What the engine can do without: drafts, statistics, calibration. None of it may cost anybody an answer.

Verified tokens don't hang on these parts, so what one of them raises is caught here, in one place: logged, counted, and
done without. A part that takes time to fail is left alone for a while (:meth:`OptionalPart.ready`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import TracebackType

log = logging.getLogger(__name__)

LOG_EVERY_S = 60.0
FIRST_REST, LONGEST_REST = 64, 4096
"""How often in a row a part that failed isn't asked; doubles while it goes on failing."""


class OptionalPart:
    """``with part:`` ends quietly at what is raised inside; ``failures`` counts how often it was."""

    def __init__(self, name: str, clock: Callable[[], float]) -> None:
        self.name, self.failures = name, 0
        self._clock = clock
        self._rest, self._next_rest = 0, FIRST_REST
        self._logged_at: float | None = None
        self._unlogged = 0

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if error is None:
            self._next_rest = FIRST_REST
            return False
        if not isinstance(error, Exception):
            return False
        self.failures += 1
        self._rest, self._next_rest = self._next_rest, min(2 * self._next_rest, LONGEST_REST)
        self._log(error)
        return True

    @property
    def rests(self) -> bool:
        return self._rest > 0

    def ready(self) -> bool:
        """Whether to ask it again; every no brings the next yes nearer."""
        if self._rest:
            self._rest -= 1
            return False
        return True

    def _log(self, error: Exception) -> None:
        now = self._clock()
        if self._logged_at is not None and now - self._logged_at < LOG_EVERY_S:
            self._unlogged += 1
            return
        more = f" (and {self._unlogged} time(s) more since this was last said)" if self._unlogged else ""
        self._logged_at, self._unlogged = now, 0
        log.error("%s failed, the engine goes on without%s", self.name, more, exc_info=error)


class OptionalParts:
    """The parts of one engine; a drafter that is neither ``heads`` nor ``lookup`` has one of its own.

    ``heads``: their guesses; ``planning`` of drafts; ``lookup``; ``pace``: whether a request that is late goes on
    drafting; ``judging``: what gate and sequences learn; ``counting``: statistics, samples, calibration.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.heads = OptionalPart("asking the heads", clock)
        self.planning = OptionalPart("planning drafts", clock)
        self.lookup = OptionalPart("looking up", clock)
        self.pace = OptionalPart("watching deadlines", clock)
        self.judging = OptionalPart("judging drafts", clock)
        self.counting = OptionalPart("counting", clock)
        self._clock = clock
        self._by_name = {name: part for name, part in vars(self).items() if isinstance(part, OptionalPart)}

    def of_drafter(self, name: str) -> OptionalPart:
        """The part that answers for a drafter."""
        part = self._by_name.get(name)
        if part is None:
            part = self._by_name[name] = OptionalPart(f"drafting by {name}", self._clock)
        return part

    def failures(self) -> dict[str, int]:
        """How often each part has failed so far, by its name. Safe from any thread."""
        return {name: part.failures for name, part in self._by_name.items()}
