"""How many sequences may be in the engine or wait for it, and what those past that are told."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Sequence

from gateway.wire.errors import InvalidRequest, QueueFull, shutting_down

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


class Places:
    """How many sequences something may hold, how many it does, and when recent ones finished."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.in_flight = 0
        self.finished_at: deque[float] = deque(maxlen=1024)

    @property
    def free(self) -> int:
        return self.capacity - self.in_flight


class Ticket:
    """The places that one request holds. Given back one by one as its sequences finish, the rest at :meth:`close`."""

    def __init__(self, admission: Admission, held: int, places: Sequence[Places]) -> None:
        self._admission = admission
        self._held = held
        self._places = places
        self.aborted = False
        self.on_abort: Callable[[], None] | None = None
        """Called when a drain runs out of patience with this request."""
        self.used_tokens: int | None = None
        """Tokens of prompts and answers so far; None: no backend has begun with it."""
        self.on_close: Callable[[], None] | None = None
        """Called once, when nothing more will happen with this request."""

    def finish_one(self) -> None:
        self._give_back(min(self._held, 1))

    def close(self) -> None:
        """Give back what is still held. Idempotent."""
        self._give_back(self._held)
        on_close, self.on_close = self.on_close, None
        if on_close is not None:
            on_close()

    def abort(self) -> None:
        """End the request; one whose sequences are not submitted yet finds out by ``aborted``."""
        self.aborted = True
        if self.on_abort is not None:
            self.on_abort()

    def _give_back(self, count: int) -> None:
        if count == 0:
            return
        self._held -= count
        self._admission.take_back(self, self._places, count, still_open=self._held > 0)


class Admission:
    """Counts places, refuses past capacity, and drains. Used from one event loop only: nothing here is locked."""

    def __init__(self, capacity: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.places = Places(capacity)
        self.draining = False
        self.aborted = False
        """What did not finish was cut by this replica, which goes."""
        self.drain_aborted = 0
        """Requests that were cut since a drain ran out of patience."""
        self._clock = clock
        self._open: set[Ticket] = set()
        self.idle = asyncio.Event()
        self.idle.set()

    @property
    def in_flight(self) -> int:
        return self.places.in_flight

    def admit(self, sequences: int, of: Places | None = None) -> Ticket:
        """Take places for all sequences of a request, of the gateway and of the backend that they go to.

        Raises QueueFull, Unavailable or InvalidRequest.
        """
        if self.draining:
            raise shutting_down()
        taken = [self.places] if of is None else [self.places, of]
        scarcest = min(taken, key=lambda places: places.free)
        capacity = min(places.capacity for places in taken)
        if sequences > capacity:
            raise InvalidRequest(
                f"The request asks for {sequences} sequences (prompts x n); this gateway holds at most "
                f"{capacity} at once. Split it.",
                param="n",
            )
        shortfall = sequences - scarcest.free
        if shortfall > 0:
            seconds = estimate_retry_after(shortfall, scarcest.finished_at, self._clock())
            raise QueueFull(
                f"All {scarcest.capacity} places are taken; try again in about {seconds} s.", retry_after_s=seconds
            )
        for places in taken:
            places.in_flight += sequences
        self.idle.clear()
        ticket = Ticket(self, sequences, taken)
        self._open.add(ticket)
        return ticket

    def take_back(self, ticket: Ticket, of: Sequence[Places], count: int, *, still_open: bool) -> None:
        """Called by tickets only."""
        for places in of:
            places.in_flight -= count
            places.finished_at.extend([self._clock()] * count)
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
        overdue = self.abort_all()
        await self._idle_within(ABORT_GRACE_S)
        return overdue

    def abort_all(self) -> int:
        """End what still runs; returns how many requests that were."""
        self.aborted = True
        overdue = list(self._open)
        self.drain_aborted += len(overdue)
        for ticket in overdue:
            ticket.abort()
        return len(overdue)

    async def _idle_within(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self.idle.wait()
        except TimeoutError:
            return False
        return True
