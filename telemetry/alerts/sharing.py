"""Keeps a replica's copy of the fleet's board in step with the store, and works on alone while the store is away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from policy.shared.redis_client import StoreUnavailable
from policy.shared.shared_text import SharedText
from telemetry.alerts.fleet import Board, decode, encode, own_part, rejoined

_ATTEMPTS = 8

Edit = Callable[[Board, float], Board]
"""A pure change of the board at a time; it may be tried several times, on newer boards."""


class BoardUnavailable(Exception):
    """The store does not answer, so the fleet can't be told."""


class SharedBoard:
    """``board`` is what was last known; ``shared``: whether the store agreed."""

    def __init__(self, text: SharedText, replica: str, wall_clock: Callable[[], float]) -> None:
        self.board = Board()
        self.shared = False
        self._text = text
        self._replica = replica
        self._wall_clock = wall_clock
        self.ahead_s = 0.0
        """How far the store's clock is ahead of this machine's."""
        self._alone = False
        self._editing = asyncio.Lock()

    @property
    def now(self) -> float:
        """The store's clock, as far as it is known."""
        return self._wall_clock() + self.ahead_s

    async def edit(self, change: Edit) -> Board:
        """Change the fleet's board; only this replica's own part of it while the store is away."""
        async with self._editing:
            try:
                self.board = await self._edit_shared(change)
            except StoreUnavailable:
                if not self._alone:
                    self.board = own_part(self.board, self._replica)
                self._alone, self.shared = True, False
                self.board = change(self.board, self.now)
            else:
                self._alone, self.shared = False, True
            return self.board

    async def edit_shared(self, change: Edit) -> Board:
        """The same, but raises :class:`BoardUnavailable` rather than work alone."""
        async with self._editing:
            try:
                self.board = await self._edit_shared(change)
            except StoreUnavailable as error:
                raise BoardUnavailable(str(error)) from error
            self._alone, self.shared = False, True
            return self.board

    async def _edit_shared(self, change: Edit) -> Board:
        for _ in range(_ATTEMPTS):
            text, now = await self._text.load()
            self.ahead_s = now - self._wall_clock()
            before = decode(text)
            after = change(rejoined(before, self.board) if self._alone else before, now)
            if after == before or await self._text.swap(text, encode(after)):
                return after
        raise StoreUnavailable("other replicas change the alerts all the time")
