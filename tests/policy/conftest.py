"""A real Redis for each module that asks for it, emptied for each test that wants limits in it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from policy.limits.redis_buckets import RedisLimits
from policy.shared.redis_client import connect, parse_redis_url
from tests.support.valkey import ValkeyProcess


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyProcess]:
    server = ValkeyProcess(tmp_path_factory.mktemp("valkey")).start()
    yield server
    server.kill()


@pytest.fixture
async def shared(server: ValkeyProcess) -> AsyncIterator[RedisLimits]:
    target = parse_redis_url(server.url)
    client: Any = connect(target)
    await client.flushall()
    await client.aclose()
    made = RedisLimits(target)
    yield made
    await made.close()
