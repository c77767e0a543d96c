"""Which store keeps the statistics: Redis, an embedded server, or this process's memory."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from platformdirs import user_state_dir

from policy.shared.embedded_valkey import EmbeddedServer, EmbeddedUnavailable
from policy.shared.redis_client import parse_redis_url
from policy.statistics.store import EmbeddedStore, MemoryStore, RedisStore, StatsStore

logger = logging.getLogger(__name__)

OpenStore = Callable[[], Awaitable[StatsStore]]


async def memory_store() -> StatsStore:
    return MemoryStore()


def store_opener(url: str | None, folder: Path | None = None) -> OpenStore:
    """What opens the store that an operator named: a Redis URL, "memory", or None for an embedded server.

    Raises ValueError for a URL that can't be used. ``folder`` is where the embedded server keeps its data.
    """
    if url == "memory":
        return memory_store
    if url is not None:
        target = parse_redis_url(url)

        async def redis_store() -> StatsStore:
            return RedisStore(target)

        return redis_store

    async def embedded_store() -> StatsStore:
        server = EmbeddedServer(folder or Path(user_state_dir("medusa-gateway")) / "valkey")
        try:
            # In a thread: it waits for a process to start, or for a stale one to end.
            target = await asyncio.to_thread(server.start)
        except EmbeddedUnavailable as error:
            logger.warning("statistics are kept in memory only: %s", error)
            return MemoryStore(because=str(error))
        return EmbeddedStore(server, target)

    return embedded_store
