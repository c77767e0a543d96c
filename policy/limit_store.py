"""The buckets of API keys in Redis, where all replicas share them. The arithmetic is that of ``policy.limits``, in Lua.

Of each key: a hash with the levels, and a sorted set of the requests in progress (leases) by the time at which they run
out. The time is the server's, so replicas' clocks don't matter. A script runs as a whole or not at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from redis.exceptions import RedisError

from policy.limits import UNIT, KeyLimits, Standing
from policy.redis_client import RedisTarget, connect

LEASE_MS = 20_000
"""A replica that dies holds its streams for this long, and the tokens they had taken for good: those refill anyway."""

# ARGV: what to do, now in ms ("": the server's), the three limits (0: none), ms of a lease, tokens, requests, leases.
# An empty field is a limit that the key had not when it was written: such a bucket begins full.
_SCRIPT = f"""
local unit = {UNIT}
local now = tonumber(ARGV[2])
if not now then
  local t = redis.call('TIME')
  now = tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
end
local rpm, tpm, most = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local ttl, tokens, requests = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])

if ARGV[1] == 'renew' then
  for i = 9, #ARGV do redis.call('ZADD', KEYS[2], now + ttl, ARGV[i]) end
  redis.call('PEXPIRE', KEYS[2], ttl)
  return 1
end

local kept = redis.call('HMGET', KEYS[1], 'requests', 'tokens', 'at')
local at = tonumber(kept[3] or '') or now
local elapsed = math.max(now - at, 0)
local function refilled(text, limit)
  local level = tonumber(text or '') or limit * unit
  return math.min(limit * unit, level + elapsed * limit)
end
local r, t = refilled(kept[1], rpm), refilled(kept[2], tpm)
at = math.max(at, now)

local function save()
  r, t = math.min(r, rpm * unit), math.min(t, tpm * unit)
  local function text(level, limit) return limit > 0 and string.format('%.0f', level) or '' end
  redis.call('HSET', KEYS[1], 'requests', text(r, rpm), 'tokens', text(t, tpm), 'at', string.format('%.0f', at))
  -- Kept until both buckets would be full anyway.
  local full = 0
  if rpm > 0 then full = math.max(full, (rpm * unit - r) / rpm) end
  if tpm > 0 then full = math.max(full, (tpm * unit - t) / tpm) end
  redis.call('PEXPIRE', KEYS[1], string.format('%.0f', math.ceil(full) + 60000))
end

if ARGV[1] == 'settle' then
  local held = redis.call('ZREM', KEYS[2], ARGV[9])
  if held == 1 and (tokens ~= 0 or requests ~= 0) then
    r, t = r + requests * unit, t + tokens * unit
    save()
  end
  return held
end

redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
local streams = redis.call('ZCARD', KEYS[2])
local fits = (most == 0 or streams < most) and (rpm == 0 or r >= unit) and (tpm == 0 or t >= tokens * unit)
if fits then
  r, t, streams = r - unit, t - tokens * unit, streams + 1
  save()
  if most > 0 or tpm > 0 then
    redis.call('ZADD', KEYS[2], now + ttl, ARGV[9])
    redis.call('PEXPIRE', KEYS[2], ttl)
  end
end
return {{fits and 1 or 0, r, t, streams}}
"""


class LimitsUnavailable(Exception):
    """Redis did not answer as it should. What the calls did is unknown."""


@dataclass(frozen=True, slots=True)
class Order:
    """One call of the script. ``tokens`` and ``requests`` are taken by "admit" and given back by "settle"."""

    what: str
    key: str
    limits: KeyLimits
    leases: Sequence[str]
    tokens: int = 0
    requests: int = 0


class RedisLimits:
    """Any Redis or Valkey that knows EVAL. ``now_ms`` replaces the server's clock in tests."""

    def __init__(self, target: RedisTarget, lease_ms: int = LEASE_MS) -> None:
        # Any: redis-py's commands are typed as "awaitable or not" for both of its clients.
        self._client: Any = connect(target)
        self._prefix = f"{{{target.namespace}}}:1:limits"
        self._lease_ms = lease_ms
        self.now_ms: int | None = None
        self.describe = str(target)

    async def run(self, orders: Sequence[Order]) -> list[Standing | None]:
        """Carry out ``orders``, in this order, in one round trip: a standing for each "admit", None for the others.

        Each of them is atomic; they are not so together. Raises :class:`LimitsUnavailable`.
        """
        try:
            pipeline = self._client.pipeline(transaction=False)
            for order in orders:
                names = f"{self._prefix}:{order.key}", f"{self._prefix}:{order.key}:leases"
                limits = order.limits
                pipeline.eval(
                    _SCRIPT,
                    2,
                    *names,
                    order.what,
                    "" if self.now_ms is None else self.now_ms,
                    limits.requests_per_minute or 0,
                    limits.tokens_per_minute or 0,
                    limits.concurrent_streams or 0,
                    self._lease_ms,
                    order.tokens,
                    order.requests,
                    *order.leases,
                )
            answers = await (pipeline.execute() if orders else self._client.ping())
        except (RedisError, OSError, TimeoutError) as error:
            raise LimitsUnavailable(f"{type(error).__name__}: {error}") from error
        if not orders:
            return []
        return [
            _standing(order.limits, answer) if order.what == "admit" else None
            for order, answer in zip(orders, answers, strict=True)
        ]

    async def close(self) -> None:
        await self._client.aclose()


def _standing(limits: KeyLimits, answer: Sequence[int]) -> Standing:
    granted, requests, tokens, streams = answer
    return Standing(
        bool(granted),
        None if limits.requests_per_minute is None else requests,
        None if limits.tokens_per_minute is None else tokens,
        streams,
    )
