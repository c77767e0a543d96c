"""The buckets of API keys in Redis, where all replicas share them. The arithmetic is that of
``policy.limits.arithmetic``, in Lua.

Of each key: a hash with the levels, and a sorted set of the requests in progress (leases) by the time at which they run
out. The time is the server's, so replicas' clocks don't matter. A script runs as a whole or not at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from redis.exceptions import RedisError

from policy.limits.arithmetic import UNIT, KeyLimits, Since, Standing
from policy.limits.budgets import BACKWARDS_MS, DAY_MS, Budgets, Spent, Windows
from policy.shared.redis_client import RedisTarget, connect, reason

LEASE_MS = 20_000
"""A replica that dies holds its streams for this long, and the tokens they had taken for good: those refill anyway."""
OWED_S = 86_400
"""For how long it is known which requests without Redis were told to it; a lost answer makes them be told again."""

# ARGV: what to do, now in ms ("": the server's), the three limits (0: none), ms of a lease, tokens, requests, the two
# marks of the admission ("": not known), the budgets of a day and of a month (0: none), the windows in which the
# admission was ("": not known, so that of now), leases. The arithmetic is explained in policy.limits.arithmetic and
# policy.limits.budgets.
# No key has a time to live: a server that is short of memory evicts by that first, and a bucket that is gone is a full
# one. An API key leaves one small hash; the leases of a key that nobody uses any more are those of dead replicas.
_SCRIPT = f"""
local unit = {UNIT}
local now = tonumber(ARGV[2])
if not now then
  local t = redis.call('TIME')
  now = tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
end
local rpm, tpm, most = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local ttl, tokens, requests = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])

-- First of all, what is over goes: also because a script that has deleted is not refused for want of memory later on.
if ARGV[1] ~= 'settle' and ARGV[1] ~= 'owe' then redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now) end

if ARGV[1] == 'renew' then
  for i = 15, #ARGV do redis.call('ZADD', KEYS[2], now + ttl, ARGV[i]) end
  redis.call('PERSIST', KEYS[2])
  return 1
end

local owing = ARGV[1] == 'owe'
local settling = owing or ARGV[1] == 'settle'
if owing then
  if redis.call('SADD', KEYS[3], ARGV[15]) == 0 then return 0 end
  redis.call('EXPIRE', KEYS[3], {OWED_S})
elseif settling and redis.call('ZREM', KEYS[2], ARGV[15]) == 0 then return 0 end
if settling and tokens == 0 and requests == 0 then return 1 end

local kept = redis.call('HMGET', KEYS[1], 'requests', 'tokens', 'at', 'rpm', 'tpm', 'rsince', 'tsince',
  'dstart', 'dused', 'mstart', 'mused')
local function number(text) return tonumber(text or '') end
local before = number(kept[3]) or now
local at, elapsed = math.max(before, now), math.max(now - before, 0)
local function refilled(level, was, wanted, since)
  was, since = number(was) or 0, number(since) or 0
  local limit = wanted > 0 and not settling and wanted or was
  if limit == 0 then return 0, 0, since end
  if limit ~= was then since = math.max(at, since + 1) end
  level = was > 0 and math.min(was * unit, (number(level) or was * unit) + elapsed * was) or limit * unit
  return math.min(limit * unit, level), limit, since
end
local r, rlimit, rsince = refilled(kept[1], kept[4], rpm, kept[6])
local t, tlimit, tsince = refilled(kept[2], kept[5], tpm, kept[7])

local perday, permonth = tonumber(ARGV[11]), tonumber(ARGV[12])
local today = math.floor(now / {DAY_MS})
-- The day of the month, from 1 on: "days from civil" backwards, with years that begin in March.
local z = (today + 719468) % 146097
local y = math.floor((z - math.floor(z / 1460) + math.floor(z / 36524) - math.floor(z / 146096)) / 365)
local doy = z - (365 * y + math.floor(y / 4) - math.floor(y / 100))
local dom = doy - math.floor((153 * math.floor((5 * doy + 2) / 153) + 2) / 5) + 1
local function window(start, used, limit, begins)
  start, used = number(start) or 0, number(used) or 0
  local held = now < start and start <= now + {BACKWARDS_MS}
  if limit == 0 or settling or held or start == begins then return start, used end
  return begins, 0
end
local dstart, dused = window(kept[8], kept[9], perday, today * {DAY_MS})
local mstart, mused = window(kept[10], kept[11], permonth, (today - dom + 1) * {DAY_MS})

local function save()
  local function text(value) return string.format('%.0f', value) end
  redis.call('HSET', KEYS[1], 'requests', rlimit > 0 and text(r) or '', 'tokens', tlimit > 0 and text(t) or '',
    'at', text(at), 'rpm', text(rlimit), 'tpm', text(tlimit), 'rsince', text(rsince), 'tsince', text(tsince),
    'dstart', text(dstart), 'dused', text(dused), 'mstart', text(mstart), 'mused', text(mused))
  redis.call('PERSIST', KEYS[1])
end

if settling then
  local given = tokens
  local function same(limit, was, since, mark) return limit == was and (number(mark) or since) == since end
  if not same(rpm, rlimit, rsince, ARGV[9]) then requests = math.min(requests, 0) end
  if not same(tpm, tlimit, tsince, ARGV[10]) then tokens = math.min(tokens, 0) end
  local function less(used, limit, start, mark)
    if limit == 0 or start ~= (number(mark) or start) then return used end
    return math.max(used - given, 0)
  end
  -- Nobody may have asked here since the window began.
  if owing and perday > 0 and number(ARGV[13]) > dstart then dstart, dused = number(ARGV[13]), 0 end
  if owing and permonth > 0 and number(ARGV[14]) > mstart then mstart, mused = number(ARGV[14]), 0 end
  dused, mused = less(dused, perday, dstart, ARGV[13]), less(mused, permonth, mstart, ARGV[14])
  if owing or tpm == 0 then tokens = 0 end
  if requests ~= 0 or given ~= 0 then
    r, t = math.min(r + requests * unit, rlimit * unit), math.min(t + tokens * unit, tlimit * unit)
    save()
  end
  return 1
end

local streams = redis.call('ZCARD', KEYS[2])
local fits = (most == 0 or streams < most) and (rpm == 0 or r >= unit) and (tpm == 0 or t >= tokens * unit)
  and (perday == 0 or dused + tokens <= perday) and (permonth == 0 or mused + tokens <= permonth)
if fits then
  if perday > 0 then dused = dused + tokens end
  if permonth > 0 then mused = mused + tokens end
  streams = streams + 1
  if rpm > 0 then r = r - unit end
  if tpm > 0 then t = t - tokens * unit end
  redis.call('ZADD', KEYS[2], now + ttl, ARGV[15])
  redis.call('PERSIST', KEYS[2])
end
-- A refusal changes nothing but, after an edit, what is counted by, and the windows.
if fits or rsince ~= number(kept[6]) or tsince ~= number(kept[7]) or dstart ~= (number(kept[8]) or 0)
  or mstart ~= (number(kept[10]) or 0) then save() end
local budgets = perday > 0 or permonth > 0
if perday == 0 then dstart, dused = 0, 0 end
if permonth == 0 then mstart, mused = 0, 0 end
return {{fits and 1 or 0, r, t, streams, rsince, tsince, dstart, dused, mstart, mused, budgets and now or 0}}
"""


class LimitsUnavailable(Exception):
    """Redis did not answer as it should. What the calls did is unknown."""


@dataclass(frozen=True, slots=True)
class Order:
    """One call of the script. ``tokens`` and ``requests`` are taken by "admit" and given back by "settle", which
    names limits, ``since`` and ``windows`` of its admission. "owe" takes from budgets what a request has used that was
    admitted without Redis (``tokens`` negative); like a settlement it counts once, however often it is carried out."""

    what: str
    key: str
    limits: KeyLimits
    leases: Sequence[str]
    tokens: int = 0
    requests: int = 0
    since: Since | None = None
    windows: Windows | None = None


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
                names = [f"{self._prefix}:{order.key}{what}" for what in ("", ":leases", ":owed")]
                limits = order.limits
                pipeline.eval(
                    _SCRIPT,
                    3,
                    *names,
                    order.what,
                    "" if self.now_ms is None else self.now_ms,
                    limits.requests_per_minute or 0,
                    limits.tokens_per_minute or 0,
                    limits.concurrent_streams or 0,
                    self._lease_ms,
                    order.tokens,
                    order.requests,
                    *(order.since or ("", "")),
                    limits.tokens_per_day or 0,
                    limits.tokens_per_month or 0,
                    *(order.windows or ("", "")),
                    *order.leases,
                )
            # With no order this only asks whether there is a server that takes writes.
            answers = await (pipeline.execute() if orders else self._client.delete(f"{self._prefix}-probe"))
        except (RedisError, OSError, TimeoutError) as error:
            raise LimitsUnavailable(reason(error)) from error
        if not orders:
            return []
        return [
            _standing(order.limits, answer) if order.what == "admit" else None
            for order, answer in zip(orders, answers, strict=True)
        ]

    async def evicts_by(self) -> str | None:
        """The server's ``maxmemory-policy``, if it may make room by forgetting limits; None: not, or it doesn't say."""
        try:
            told = await self._client.info("memory")
        except (RedisError, OSError, TimeoutError):
            return None
        # A cluster may tell of every node.
        for node in [told, *(each for each in told.values() if isinstance(each, dict))]:
            policy = str(node.get("maxmemory_policy", ""))
            if policy.startswith("allkeys") and node.get("maxmemory") != 0:
                return policy
        return None

    async def close(self) -> None:
        await self._client.aclose()


def _standing(limits: KeyLimits, answer: Sequence[int]) -> Standing:
    granted, requests, tokens, streams, rsince, tsince, dstart, dused, mstart, mused, at_ms = answer
    return Standing(
        bool(granted),
        None if limits.requests_per_minute is None else requests,
        None if limits.tokens_per_minute is None else tokens,
        streams,
        (rsince, tsince),
        Budgets(Spent(dstart, dused), Spent(mstart, mused), at_ms),
    )
