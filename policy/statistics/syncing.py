"""Between a replica's statistics and the store, about once a second. What fails is tried again and lost by nobody."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from backends.types import DecodeCounters
from policy.shared.redis_client import StoreUnavailable
from policy.statistics.aggregate import Statistics, fold
from policy.statistics.epoch_book import EPOCH_S, epoch_of
from policy.statistics.store import MemoryStore, Prior, Register, StatsStore

READ_EPOCHS = 12
"""Two minutes: what a starting replica takes over, and how long a closed epoch waits at most to be folded."""
RECENT_EPOCHS = 3
"""The epochs that may still change while all replicas are in touch."""
CLOSED_AFTER = 3
"""Epochs until the prior takes one in. A replica that brings one later is in the statistics but not in the prior."""
PRIOR_HALF_LIFE_S = 6 * 3600.0
PRIOR_MOST_STEPS = 5_000_000.0
"""Only a bound: the half-life is to decide how long the prior remembers, also of a busy class. A replica that starts
from it weighs it as a few hundred steps (``policy.statistics.estimate``)."""


@dataclass(frozen=True, slots=True)
class StoreHealth:
    """``ok`` None: not tried yet. ``since``: when ``ok`` last changed. ``failures``: in a row.

    ``remote``: a server that may be away, rather than this process's memory.
    """

    store: str
    ok: bool | None = None
    durable: bool = False
    since: float = 0.0
    failures: int = 0
    error: str | None = None
    remote: bool = True


class StoreSync:
    """One replica's side. Calls must not overlap."""

    def __init__(self, statistics: Statistics, store: StatsStore) -> None:
        self._statistics = statistics
        self._store = store
        self._serial = 0
        self._all_read_in: int | None = None
        self._suspect = True
        self.health = StoreHealth(store.describe, durable=store.durable, remote=not isinstance(store, MemoryStore))
        self.rewritten_epochs = 0
        self.last_s: float | None = None
        """How long the last round with the store took, if it was answered."""

    async def sync(self, now: float, wall_time: float) -> bool:
        """Write what is owed, read what is new. False, and health that says why, when the store is unavailable."""
        began = time.perf_counter()
        try:
            await self._write()
            await self._read(now, epoch_of(wall_time))
            self.last_s = time.perf_counter() - began
        except StoreUnavailable as error:
            self._suspect = True
            self._note(False, now, str(error))
            return False
        self._note(True, now, None)
        return True

    async def flush(self) -> bool:
        """Only the writing, for the end of a process."""
        try:
            await self._write()
        except StoreUnavailable:
            return False
        return True

    async def _write(self) -> None:
        owed = self._statistics.book.unstored()
        if not owed:
            return
        self._serial += 1
        epochs = {number: values for number, (_, values) in owed.items()}
        await self._store.write(self._statistics.replica, self._serial, epochs)
        self._statistics.book.stored({number: version for number, (version, _) in owed.items()})

    async def _read(self, now: float, epoch: int) -> None:
        # More when there is a new epoch and after any failure; else only the epochs that may have changed.
        new_epoch, suspect = self._all_read_in != epoch, self._suspect
        count = READ_EPOCHS if new_epoch or suspect else RECENT_EPOCHS
        # One ahead: another replica's clock may be a little fast.
        numbers = set(range(epoch - count + 1, epoch + 2))
        if suspect:
            # A store that was away may have come back with less than it had: all that is owed is compared.
            numbers |= set(self._statistics.book.epochs)
        registers, prior = await self._store.read(sorted(numbers))
        recent = {each: value for each, value in registers.items() if each.epoch > epoch - READ_EPOCHS}
        self._statistics.add_fleet(recent, prior, now)
        self._compare(registers, numbers)
        if new_epoch:
            self._statistics.forget_before(epoch - READ_EPOCHS)
            await self._fold(prior, recent, epoch - CLOSED_AFTER)
        self._all_read_in, self._suspect = epoch, False

    def _compare(self, registers: Mapping[Register, DecodeCounters], numbers: Iterable[int]) -> None:
        mine: dict[int, dict[str, DecodeCounters]] = {number: {} for number in numbers}
        for register, value in registers.items():
            if register.replica == self._statistics.replica:
                mine[register.epoch][register.key] = value
        book = self._statistics.book
        self.rewritten_epochs += sum(book.compare(number, values) for number, values in mine.items())

    async def _fold(self, prior: Prior, registers: Mapping[Register, DecodeCounters], until: int) -> None:
        if not any(prior.epoch < each.epoch <= until for each in registers):
            return
        elapsed = (until - prior.epoch) * EPOCH_S if prior.epoch >= 0 else 0.0
        decay = 0.5 ** (elapsed / PRIOR_HALF_LIFE_S)
        folded = fold(prior, registers, until, decay, PRIOR_MOST_STEPS)
        # False: another replica was faster, and the next reading shows what it made.
        await self._store.replace_prior(prior.epoch, folded)

    def _note(self, ok: bool, now: float, error: str | None) -> None:
        before = self.health
        self.health = StoreHealth(
            store=before.store,
            ok=ok,
            durable=before.durable,
            since=now if ok != before.ok else before.since,
            failures=0 if ok else before.failures + 1,
            error=error,
            remote=before.remote,
        )
