"""One small text that all replicas share, changed by compare-and-swap: what the alerts of a fleet are agreed on with.

Nothing here runs on a request's path. A call that fails raises :class:`policy.shared.redis_client.StoreUnavailable`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from policy.shared.redis_client import unavailable_on_error

TTL_S = 30 * 86_400


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


_LOAD_TEXT = "return {redis.call('GET', KEYS[1]) or '', redis.call('TIME')}"
_SWAP_TEXT = """
if (redis.call('GET', KEYS[1]) or '') ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[2], 'EX', ARGV[3])
return 1
"""


class RedisText:
    """A key in Redis. The clock is the server's."""

    def __init__(self, client: Any, key: str) -> None:
        self._client = client
        self._key = key

    async def load(self) -> tuple[str, float]:
        with unavailable_on_error():
            text, (seconds, micros) = await self._client.eval(_LOAD_TEXT, 1, self._key)
        return str(text), int(seconds) + int(micros) / 1e6

    async def swap(self, before: str, after: str) -> bool:
        with unavailable_on_error():
            return bool(await self._client.eval(_SWAP_TEXT, 1, self._key, before, after, TTL_S))
