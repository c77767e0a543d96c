"""How many sequences may be in the engine or wait for it, and what those past that are told."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Sequence

from gateway.errors import InvalidRequest, QueueFull, shutting_down

RATE_WINDOW_S = 30.0
RETRY_WITHOUT_RATE_S = 5
MAX_RETRY_S = 60
ABORT_GRACE_S = 5.0


def estimate_retry_after(shortfall: int, finished_at: Sequence[float], now: float) -> int:
    """Whole seconds until ``shortfall`` more sequences have probably finished, from when recent ones did.

    ``finished_at`` is ascending. Between 1 and :data:`MAX_RETRY_S`; :data:`RETRY_WITHOUT_RATE_S` when nothing
    finished lately.
    """
    recent = [moment for moment in finished_at if moment > now - RATE_WINDOW_S]
    if not recent:
        return RETRY_WITHOUT_RATE_S
    per_second = len(recent) / max(now - recent[0], 1.0)
    return min(max(math.ceil(shortfall / per_second), 1), MAX_RETRY_S)


class Ticket:
    """The places that one request holds. Given back one by one as its sequences finish, the rest at :meth:`close`."""

    def __init__(self, admission: Admission, places: int) -> None:
        self._admission = admission
        self._held = places
        self.aborted = False
        self.on_abort: Callable[[], None] | None = None
        """Called when a drain runs out of patience with this request."""

    def finish_one(self) -> None:
        self._give_back(min(self._held, 1))

    def close(self) -> None:
        """Give back what is still held. Idempotent."""
        self._give_back(self._held)

    def abort(self) -> None:
        """End the request; one whose sequences are not submitted yet finds out by ``aborted``."""
        self.aborted = True
        if self.on_abort is not None:
            self.on_abort()

    def _give_back(self, places: int) -> None:
        if places == 0:
            return
        self._held -= places
        self._admission.take_back(self, places, still_open=self._held > 0)


class Admission:
    """Counts places, refuses past capacity, and drains. Used from one event loop only: nothing here is locked."""

    def __init__(self, capacity: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.capacity = capacity
        self.in_flight = 0
        self.draining = False
        self._clock = clock
        self._open: set[Ticket] = set()
        self._finished_at: deque[float] = deque(maxlen=1024)
        self.idle = asyncio.Event()
        self.idle.set()

    def admit(self, sequences: int) -> Ticket:
        """Take places for all sequences of a request. Raises QueueFull, Unavailable or InvalidRequest."""
        if self.draining:
            raise shutting_down()
        if sequences > self.capacity:
            raise InvalidRequest(
                f"The request asks for {sequences} sequences (prompts x n); this gateway holds at most "
                f"{self.capacity} at once. Split it.",
                param="n",
            )
        shortfall = self.in_flight + sequences - self.capacity
        if shortfall > 0:
            seconds = estimate_retry_after(shortfall, self._finished_at, self._clock())
            raise QueueFull(
                f"All {self.capacity} places are taken; try again in about {seconds} s.", retry_after_s=seconds
            )
        self.in_flight += sequences
        self.idle.clear()
        ticket = Ticket(self, sequences)
        self._open.add(ticket)
        return ticket

    def take_back(self, ticket: Ticket, places: int, *, still_open: bool) -> None:
        """Called by tickets only."""
        self.in_flight -= places
        self._finished_at.extend([self._clock()] * places)
        if not still_open:
            self._open.discard(ticket)
        if self.in_flight == 0:
            self.idle.set()

    async def drain(self, timeout_s: float) -> int:
        """Take nothing new, let what runs finish for ``timeout_s``, then abort the rest; returns how many requests
        were aborted. They end with a typed error, not in silence."""
        self.draining = True
        if await self._idle_within(timeout_s):
            return 0
        overdue = list(self._open)
        for ticket in overdue:
            ticket.abort()
        await self._idle_within(ABORT_GRACE_S)
        return len(overdue)

    async def _idle_within(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self.idle.wait()
        except TimeoutError:
            return False
        return True
