"""Where replicas put their counters and find each other's: Redis, or this process's memory with the same interface.

Nothing here runs on a request's path. A call that fails raises :class:`policy.shared.redis_client.StoreUnavailable`;
every call may be repeated.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from backends.types import DecodeCounters
from policy.shared.embedded_valkey import EmbeddedServer
from policy.shared.redis_client import RedisTarget, connect, unavailable_on_error
from policy.shared.shared_text import MemoryText, RedisText, SharedText
from policy.statistics.counters import Tally, as_json, copy_of, from_json, pack, unpack
from policy.statistics.epoch_book import EPOCH_S, RETAINED_EPOCHS

EPOCH_TTL_S = int(EPOCH_S * (RETAINED_EPOCHS + 30))
PRIOR_TTL_S = 90 * 86_400


class Register(NamedTuple):
    """The name of one value that only ``replica`` writes."""

    epoch: int
    replica: str
    key: str


@dataclass(frozen=True, slots=True)
class Prior:
    """Decayed sums of epochs up to and including ``epoch``; -1: nothing was ever folded in."""

    epoch: int = -1
    tallies: Mapping[str, Tally] = field(default_factory=dict)


class StatsStore(Protocol):
    """``describe`` names the store for people, without secrets. ``durable``: it outlives this process."""

    @property
    def describe(self) -> str: ...

    @property
    def durable(self) -> bool: ...

    @property
    def target(self) -> RedisTarget | None:
        """The server behind it, for others who need one; None: there is none."""
        ...

    async def write(self, replica: str, serial: int, epochs: Mapping[int, Mapping[str, DecodeCounters]]) -> None:
        """Set registers of ``replica``. ``serial`` grows with every call: an older write that arrives late (one whose
        connection hung, say) never replaces a newer one."""
        ...

    async def read(self, epochs: Sequence[int]) -> tuple[dict[Register, DecodeCounters], Prior]:
        """All registers of these epochs, of all replicas, and the prior."""
        ...

    async def replace_prior(self, before: int, prior: Prior) -> bool:
        """Set the prior, if it still ends with epoch ``before``; False: another replica was faster."""
        ...

    def shared_text(self, name: str) -> SharedText:
        """A text beside the statistics."""
        ...

    async def close(self) -> None: ...


class MemoryStore:
    """For a gateway without Redis, and for tests: the same behaviour, gone with the process."""

    durable = False
    target: RedisTarget | None = None

    def __init__(self, because: str = "asked for") -> None:
        self.describe = f"memory of this process, neither shared nor kept ({because})"
        self._registers: dict[Register, tuple[int, DecodeCounters]] = {}
        self._prior = Prior()
        self._texts: dict[str, MemoryText] = {}

    async def write(self, replica: str, serial: int, epochs: Mapping[int, Mapping[str, DecodeCounters]]) -> None:
        for epoch, values in epochs.items():
            for key, counters in values.items():
                register = Register(epoch, replica, key)
                if self._registers.get(register, (-1, None))[0] < serial:
                    self._registers[register] = serial, copy_of(counters)
        newest = max((register.epoch for register in self._registers), default=0)
        for register in [each for each in self._registers if each.epoch <= newest - RETAINED_EPOCHS]:
            del self._registers[register]

    async def read(self, epochs: Sequence[int]) -> tuple[dict[Register, DecodeCounters], Prior]:
        wanted = set(epochs)
        found = {each: copy_of(value) for each, (_, value) in self._registers.items() if each.epoch in wanted}
        return found, self._prior

    async def replace_prior(self, before: int, prior: Prior) -> bool:
        if self._prior.epoch != before:
            return False
        self._prior = prior
        return True

    def shared_text(self, name: str) -> SharedText:
        return self._texts.setdefault(name, MemoryText())

    async def close(self) -> None:
        """Nothing to give back."""


# A hash per epoch, a field per register, "serial counters" in it. Fields of one call go in together or not at all.
_WRITE = """
local serial = tonumber(ARGV[2])
for i = 3, #ARGV, 2 do
  local old = redis.call('HGET', KEYS[1], ARGV[i])
  if not old or tonumber(string.match(old, '^%d+')) < serial then
    redis.call('HSET', KEYS[1], ARGV[i], ARGV[2] .. ' ' .. ARGV[i + 1])
  end
end
redis.call('EXPIRE', KEYS[1], ARGV[1])
return 1
"""
_REPLACE_PRIOR = """
local old = redis.call('GET', KEYS[1])
local epoch = old and tonumber(string.match(old, '^-?%d+')) or -1
if epoch ~= tonumber(ARGV[1]) then return 0 end
redis.call('SET', KEYS[1], ARGV[2], 'EX', ARGV[3])
return 1
"""


class RedisStore:
    """Any Redis or Valkey that knows EVAL. All keys share one hash tag, so they lie on one node of a cluster."""

    def __init__(self, target: RedisTarget, *, durable: bool = True, describe: str | None = None) -> None:
        # Any: redis-py's commands are typed as "awaitable or not" for both of its clients.
        self._client: Any = connect(target)
        self.target: RedisTarget | None = target
        self._prefix = f"{{{target.namespace}}}:1"
        self.describe = describe or str(target)
        self.durable = durable

    async def write(self, replica: str, serial: int, epochs: Mapping[int, Mapping[str, DecodeCounters]]) -> None:
        if not epochs:
            return
        with unavailable_on_error():
            pipeline = self._client.pipeline(transaction=False)
            for epoch, values in epochs.items():
                fields = [text for key, value in values.items() for text in (f"{replica}|{key}", pack(value))]
                pipeline.eval(_WRITE, 1, self._epoch_key(epoch), EPOCH_TTL_S, serial, *fields)
            await pipeline.execute()

    async def read(self, epochs: Sequence[int]) -> tuple[dict[Register, DecodeCounters], Prior]:
        with unavailable_on_error():
            pipeline = self._client.pipeline(transaction=False)
            pipeline.get(f"{self._prefix}:prior")
            for epoch in epochs:
                pipeline.hgetall(self._epoch_key(epoch))
            prior, *hashes = await pipeline.execute()
        found: dict[Register, DecodeCounters] = {}
        for epoch, values in zip(epochs, hashes, strict=True):
            for name, text in values.items():
                replica, _, key = name.partition("|")
                counters = _counters(text)
                if counters is not None:
                    found[Register(epoch, replica, key)] = counters
        return found, _prior(prior)

    async def replace_prior(self, before: int, prior: Prior) -> bool:
        text = f"{prior.epoch} {json.dumps({key: as_json(value) for key, value in prior.tallies.items()})}"
        with unavailable_on_error():
            return bool(await self._client.eval(_REPLACE_PRIOR, 1, f"{self._prefix}:prior", before, text, PRIOR_TTL_S))

    def shared_text(self, name: str) -> SharedText:
        return RedisText(self._client, f"{self._prefix}:text:{name}")

    async def close(self) -> None:
        await self._client.aclose()

    def _epoch_key(self, epoch: int) -> str:
        return f"{self._prefix}:epoch:{epoch}"


class EmbeddedStore(RedisStore):
    """A store that owns its server."""

    def __init__(self, server: EmbeddedServer, target: RedisTarget) -> None:
        what = "embedded Valkey" if not server.shared_folder_taken else "embedded Valkey in a temporary folder"
        super().__init__(target, durable=not server.shared_folder_taken, describe=f"{what} ({server.folder})")
        self._server = server

    async def close(self) -> None:
        await super().close()
        # In a thread: it waits for the server's data to be on disk.
        await asyncio.to_thread(self._server.stop)


def _counters(text: str) -> DecodeCounters | None:
    """None for what another version of the gateway, or another program, wrote there."""
    try:
        return unpack(text.partition(" ")[2])
    except (ValueError, TypeError, AttributeError):
        return None


def _prior(text: str | None) -> Prior:
    if text is None:
        return Prior()
    epoch, _, values = text.partition(" ")
    try:
        return Prior(int(epoch), {key: from_json(value) for key, value in json.loads(values).items()})
    except (ValueError, TypeError, KeyError, AttributeError):
        return Prior(int(epoch) if epoch.lstrip("-").isdigit() else -1)
