"""Cost tables in Redis, so that a replica on a machine of the same kind starts with one. Only texts pass through here.

Used at an engine's start and then every few minutes, where waiting is allowed: with a connection of its own each time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from redis.exceptions import RedisError

from policy.shared.redis_client import TIMEOUT_S, RedisTarget, connect, reason

TTL_S = 30 * 86_400


class RedisCostStore:
    """See :class:`backends.cost.stores.CostStore`. Call where no event loop runs: before it starts, or in a thread."""

    def __init__(self, target: RedisTarget) -> None:
        self._target = target

    def __str__(self) -> str:
        return str(self._target)

    def load(self, key: str) -> str | None:
        return self._ask(lambda client: client.get(self._key(key)))

    def save(self, key: str, text: str) -> None:
        self._ask(lambda client: client.set(self._key(key), text, ex=TTL_S))

    def _key(self, key: str) -> str:
        # The same hash tag as the statistics', see policy.statistics.store.
        return f"{{{self._target.namespace}}}:1:cost:{key}"

    def _ask(self, call: Callable[[Any], Awaitable[Any]]) -> Any:
        async def ask() -> Any:
            client: Any = connect(self._target)
            try:
                async with asyncio.timeout(2 * TIMEOUT_S):
                    return await call(client)
            finally:
                await client.aclose()

        try:
            return asyncio.run(ask())
        except (RedisError, UnicodeDecodeError) as error:
            raise OSError(reason(error)) from error
