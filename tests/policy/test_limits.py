"""Limits of API keys: the arithmetic, the same in Redis's Lua, and the limiter over both. The server is real."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from policy.limits.arithmetic import (
    UNIT,
    Buckets,
    KeyLimits,
    Standing,
    admit,
    describe,
    duration,
    give_back,
    refilled,
    refusal,
)
from policy.limits.budgets import (
    BACKWARDS_MS,
    DAY_MS,
    Budgets,
    day_start,
    spend,
    unspend,
)
from policy.limits.budgets import at as budgets_at
from policy.limits.limiter import Grant, Limiter
from policy.limits.redis_buckets import LEASE_MS, LimitsUnavailable, Order, RedisLimits
from policy.shared.redis_client import parse_redis_url
from tests.support.valkey import ValkeyProcess

PATIENCE_S = 30.0
PER_MINUTE = st.none() | st.integers(1, 200) | st.just(1_000_000_000)
BUDGET = st.none() | st.none() | st.integers(1, 2_000)
BY_THE_MINUTE = st.builds(KeyLimits, PER_MINUTE, PER_MINUTE, st.none() | st.integers(1, 4))
LIMITS = st.builds(KeyLimits, PER_MINUTE, PER_MINUTE, st.none() | st.integers(1, 4), BUDGET, BUDGET)
LIMITED = LIMITS.filter(lambda limits: limits.any)
WAITS = st.integers(0, 70_000) | st.integers(0, 40 * DAY_MS) | st.integers(-2 * BACKWARDS_MS, 0)
"""Minutes, as limits by the minute need them; days, as budgets do; and clocks that are set back."""
STEPS = st.lists(
    st.tuples(st.integers(0, 70_000), st.sampled_from(["admit", "settle", "renew", "edit"]), st.integers(0, 300)),
    max_size=25,
)
LONG_STEPS = st.lists(
    st.tuples(WAITS, st.sampled_from(["admit", "admit", "settle", "renew", "edit"]), st.integers(0, 300)), max_size=25
)
MOMENTS = st.integers(1_000_000, 4_102_444_800_000)
"""Milliseconds, until 2100."""


@given(BY_THE_MINUTE, STEPS)
def test_no_window_holds_more_than_the_limit_and_nothing_is_refused_that_fits(limits: KeyLimits, steps: Any) -> None:
    """Against an account kept in fractions: what was taken never passes capacity plus refill, refusals are deserved."""
    now, buckets = 0, refilled(None, limits, 0)
    taken = 0
    for wait, _, tokens in steps:
        now += wait
        before = refilled(buckets, limits, now)
        buckets, standing = admit(before, limits, tokens, 0)
        if limits.tokens_per_minute is not None:
            assert before.tokens is not None
            if standing.granted:
                taken += tokens
                assert taken <= limits.tokens_per_minute * (1 + now / 60_000)
            elif limits.requests_per_minute is None:
                assert before.tokens < tokens * UNIT
        refused = refusal(limits, standing, tokens)
        assert (refused is None) == standing.granted
        if refused is not None and tokens <= (limits.tokens_per_minute or tokens):
            later = refilled(buckets, limits, now + round(refused.wait_s * 1000))
            assert admit(later, limits, tokens, 0)[1].granted, "after the time that it was told, it is let in"


@given(LIMITS, st.integers(0, 10**6), st.integers(0, 10**6))
def test_what_is_given_back_is_what_was_taken(limits: KeyLimits, tokens: int, used: int) -> None:
    full = refilled(None, limits, 0)
    taken, standing = admit(full, limits, tokens, 0)
    if standing.granted:
        assert give_back(taken, limits, tokens, 1) == full
        after = give_back(taken, limits, tokens - used).tokens
        if full.tokens is not None:
            assert after == min(full.tokens - used * UNIT, full.tokens)


def test_a_clock_that_goes_back_adds_nothing() -> None:
    limits = KeyLimits(requests_per_minute=60)
    buckets = Buckets(0, None, 10_000, limits)
    assert refilled(buckets, limits, 5_000) == buckets
    assert refilled(buckets, limits, 11_000).requests == UNIT


def test_headers_are_written_as_openai_writes_them() -> None:
    limits = KeyLimits(60, 1000)
    shown = describe(limits, Standing(True, 59 * UNIT, 1000 * UNIT - 90_000_000, 1))
    assert shown == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "1000",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "1m30s",
    }
    assert [duration(ms) for ms in (0, 20, 1500, 360_000)] == ["0ms", "20ms", "1.5s", "6m0s"]


def test_lua_and_python_agree(server: ValkeyProcess) -> None:
    """Any sequence of calls, with the same clock: the same grants and the same levels, to the last unit."""

    async def both(edits: list[KeyLimits], began: int, steps: Any, name: str) -> None:
        remote = RedisLimits(parse_redis_url(server.url))
        limits, now, buckets, leases = edits[0], began, None, dict[str, int]()
        budgets = Budgets()
        admitted: dict[str, tuple[KeyLimits, Standing]] = {}
        try:
            for number, (wait, what, tokens) in enumerate(steps):
                now += wait
                remote.now_ms = now
                if what == "admit":
                    leases = {lease: until for lease, until in leases.items() if until > now}
                    before, buckets = buckets, refilled(buckets, limits, now)
                    windows, budgets = budgets.windows(), budgets_at(budgets, limits, now)
                    buckets, expected = admit(buckets, limits, tokens, len(leases), budgets)
                    unchanged = before is not None and (before.since, windows) == (buckets.since, budgets.windows())
                    if unchanged and not expected.granted:
                        buckets = before  # a refusal writes nothing, which tells when the clock is set back
                    if expected.granted:
                        leases[str(number)] = now + LEASE_MS
                        admitted[str(number)] = limits, expected
                        budgets = spend(budgets, limits, tokens)
                    [found] = await remote.run([Order("admit", name, limits, [str(number)], tokens, 1)])
                    assert found == expected
                elif what == "edit":
                    limits = edits[tokens % len(edits)]
                elif what == "settle" and leases:
                    lease = next(iter(leases))
                    by, standing = admitted[lease]
                    known = standing.since if tokens % 2 else None
                    windows = standing.budgets.windows()
                    # The same lease twice: the second time is for nothing.
                    await remote.run([Order("settle", name, by, [lease], 100 - tokens, 1, known, windows)] * 2)
                    buckets = give_back(refilled(buckets, KeyLimits(), now), by, 100 - tokens, 1, known)
                    budgets = unspend(budgets, by, 100 - tokens, windows)
                    del leases[lease]
                elif what == "renew" and (alive := [lease for lease, until in leases.items() if until > now]):
                    await remote.run([Order("renew", name, limits, alive)])
                    leases = dict.fromkeys(alive, now + LEASE_MS)
        finally:
            await remote.close()

    count = iter(range(10**6))

    @settings(max_examples=100, suppress_health_check=list(HealthCheck))
    @given(st.lists(LIMITED, min_size=1, max_size=3), MOMENTS, LONG_STEPS)
    @example([KeyLimits(tokens_per_day=300)], 40 * DAY_MS + 1, [(0, "admit", 100), (-2, "admit", 100)])
    @example([KeyLimits(1, tokens_per_day=1)], DAY_MS - 1, [(0, "admit", 0), (1, "admit", 0), (-1, "admit", 0)])
    @example([KeyLimits(tokens_per_minute=10**9)], 10**6, [(0, "admit", 0), (LEASE_MS, "renew", 0), (-1, "admit", 0)])
    def run(edits: list[KeyLimits], began: int, steps: Any) -> None:
        asyncio.run(both(edits, began, steps, f"k{next(count)}"))

    run()


async def test_a_dead_replicas_streams_run_out(shared: RedisLimits) -> None:
    limits = KeyLimits(concurrent_streams=1)
    shared.now_ms = 1_000_000
    [first] = await shared.run([Order("admit", "k", limits, ["dead"])])
    [second] = await shared.run([Order("admit", "k", limits, ["b"])])
    assert first is not None
    assert second is not None
    assert (first.granted, second.granted) == (True, False)
    shared.now_ms += LEASE_MS // 2
    await shared.run([Order("renew", "k", limits, ["dead"])])
    shared.now_ms += LEASE_MS - 1
    [third] = await shared.run([Order("admit", "k", limits, ["c"])])
    assert third is not None
    assert not third.granted, "renewed, so still held"
    shared.now_ms += 1
    [fourth] = await shared.run([Order("admit", "k", limits, ["d"])])
    assert fourth is not None
    assert fourth.granted


@pytest.fixture
async def limiter(server: ValkeyProcess, shared: RedisLimits) -> AsyncIterator[Limiter]:
    made = Limiter(timeout_s=PATIENCE_S)
    await made.start(parse_redis_url(server.url))
    yield made
    await made.stop()


async def taken(limiter: Limiter, limits: KeyLimits, tokens: int = 1, key: str = "k") -> Grant:
    outcome = await limiter.admit(key, limits, tokens)
    assert isinstance(outcome, Grant), outcome
    return outcome


async def test_two_limiters_share_one_budget_under_a_race(server: ValkeyProcess, shared: RedisLimits) -> None:
    limits = KeyLimits(tokens_per_minute=1000)
    pair = [Limiter(timeout_s=PATIENCE_S) for _ in range(2)]
    for each in pair:
        await each.start(parse_redis_url(server.url))
    began = asyncio.get_running_loop().time()
    outcomes = await asyncio.gather(*(pair[n % 2].admit("k", limits, 25) for n in range(200)))
    refill = 1000 / 60 * (asyncio.get_running_loop().time() - began)
    grants = [each for each in outcomes if isinstance(each, Grant)]
    assert 40 <= len(grants) <= 40 + refill / 25 + 1
    refused = [each for each in outcomes if not isinstance(each, Grant)]
    assert all(standing.tokens is not None and standing.tokens < 25 * UNIT for _, standing in refused)
    for each in grants:
        each.settle(5)
        each.settle(25)
    for each in pair:
        await each.stop()
    [left] = await shared.run([Order("admit", "k", limits, ["x"], 0, 0)])
    assert left is not None
    assert left.tokens is not None
    assert left.tokens >= (1000 - 5 * len(grants)) * UNIT, "all but what was used came back, once"


SMALL = st.none() | st.integers(1, 6) | st.integers(100, 600)
BUDGETS = st.none() | st.none() | st.integers(1, 40)
EDITS = st.lists(
    st.builds(KeyLimits, SMALL, SMALL, st.none() | st.integers(1, 4), BUDGETS, BUDGETS).filter(
        lambda limits: limits.any
    ),
    min_size=1,
    max_size=3,
)
WHAT = st.sampled_from(["admit", "admit", "settle", "cancel", "edit"])
LIVES = st.lists(st.tuples(st.sampled_from([0, 0, 1, 8, 480, 86_400 * 8]), WHAT, st.integers(0, 9)), max_size=40)
"""(eighths of a second to wait, what to do, a number for it): exact in floating point."""


class Account:
    """What was let in since the limit was edited, less what was given back of that: kept in fractions."""

    def __init__(self) -> None:
        self.limit: int | None = None
        self.edited_at = self.taken = self.edits = 0.0

    def edit(self, limit: int | None, now: float) -> None:
        if limit != self.limit:
            self.limit, self.edited_at, self.taken, self.edits = limit, now, 0.0, self.edits + 1

    def take(self, amount: float, now: float) -> float:
        self.taken += amount
        if self.limit is not None:
            assert self.taken <= self.limit * (1 + (now - self.edited_at) / 60), (
                "more than the limit, whatever was edited"
            )
        return self.edits

    def give_back(self, amount: float, edits: float) -> None:
        self.taken -= amount if edits == self.edits else 0


async def live(limiter: Limiter, edits: list[KeyLimits], steps: Any, now: list[float], key: str) -> list[Any]:
    """What requests were told, by a limiter whose clock is ``now``."""
    told: list[Any] = []
    grants: list[tuple[Grant, float, float]] = []
    requests, tokens, limits = Account(), Account(), edits[0]
    for wait, what, number in steps:
        now[0] += wait / 8
        if limiter._remote is not None:
            limiter._remote.now_ms = round(now[0] * 1000)
        requests.edit(limits.requests_per_minute, now[0])
        tokens.edit(limits.tokens_per_minute, now[0])
        if what == "admit":
            told.append(
                (limiter.refused_anyway(key, limits) is not None, outcome := await limiter.admit(key, limits, number))
            )
            if isinstance(outcome, Grant):
                grants.append((outcome, requests.take(1, now[0]), tokens.take(number, now[0])))
                if limits.tokens_per_day is not None:
                    assert outcome.standing.budgets.day.tokens <= limits.tokens_per_day
                    assert outcome.standing.budgets.day.start_ms == day_start(round(now[0] * 1000))
                told[-1] = told[-1][0], outcome.standing
            assert told[-1][0] is False or not isinstance(outcome, Grant), "what is refused early, would be anyway"
        elif what == "edit":
            limits = edits[number % len(edits)]
        elif grants:
            grant, requests_at, tokens_at = grants.pop(number % len(grants))
            if what == "cancel":
                grant.cancel()
                requests.give_back(1, requests_at)
                tokens.give_back(grant.tokens, tokens_at)
            else:
                grant.settle(number)
                tokens.give_back(max(grant.tokens - number, 0), tokens_at)
            # Orders are carried out in order: now the settlement is done, before time goes on.
            (await taken(limiter, KeyLimits(concurrent_streams=10**6), key="other")).settle(0)
    for grant, *_ in grants:
        grant.cancel()
    return told


def test_redis_and_memory_agree_and_no_edit_lets_more_in(server: ValkeyProcess) -> None:
    """Admissions, edits, settlements and cancellations in any order: the two decide alike, and within the limit."""

    def without_marks(told: list[Any]) -> list[Any]:
        # The marks are moments of either's clock.
        return [
            (
                early,
                replace(each, since=(0, 0))
                if isinstance(each, Standing)
                else (each[0], replace(each[1], since=(0, 0))),
            )
            for early, each in told
        ]

    async def both(edits: list[KeyLimits], steps: Any, key: str) -> None:
        now = [1000.0]
        here = await live(Limiter(clock=lambda: now[0], wall_clock=lambda: now[0]), edits, steps, now, key)
        now = [1000.0]
        shared = Limiter(clock=lambda: now[0], wall_clock=lambda: now[0], timeout_s=PATIENCE_S)
        await shared.start(parse_redis_url(server.url))
        assert shared._remote is not None
        shared._remote._lease_ms = 10**9
        try:
            there = await live(shared, edits, steps, now, key)
        finally:
            await shared.stop()
        assert shared.decided_locally == 0
        assert without_marks(here) == without_marks(there)

    count = iter(range(10**6))

    @settings(max_examples=150, suppress_health_check=list(HealthCheck))
    @given(EDITS, LIVES)
    def run(edits: list[KeyLimits], steps: Any) -> None:
        asyncio.run(both(edits, steps, f"both{next(count)}"))

    run()


@pytest.mark.parametrize("where", ["redis", "memory"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (KeyLimits(tokens_per_minute=1_000_000), KeyLimits(requests_per_minute=2, tokens_per_minute=1_000_000)),
        (KeyLimits(requests_per_minute=600), KeyLimits(requests_per_minute=2)),
        (KeyLimits(requests_per_minute=600), KeyLimits(requests_per_minute=600, tokens_per_minute=2)),
        (KeyLimits(tokens_per_minute=600), KeyLimits(tokens_per_minute=2)),
    ],
    ids=["requests added", "requests lowered", "tokens added", "tokens lowered"],
)
async def test_streams_that_end_do_not_undo_an_edit(
    server: ValkeyProcess, shared: RedisLimits, where: str, before: KeyLimits, after: KeyLimits
) -> None:
    now = [1000.0]
    limiter = Limiter(clock=lambda: now[0], timeout_s=PATIENCE_S)
    if where == "redis":
        await limiter.start(parse_redis_url(server.url))
        assert limiter._remote is not None
        limiter._remote.now_ms = 1_000_000
    streams = [await taken(limiter, before) for _ in range(5)]
    for _ in range(2):
        await taken(limiter, after)
    streams[0].cancel()
    for each in streams[1:]:
        each.settle(0)
    for _ in range(3):
        assert isinstance(await limiter.admit("k", after, 1), tuple)
    await limiter.stop()


async def test_a_request_that_never_began_is_given_back_to_a_key_without_tokens(limiter: Limiter) -> None:
    limits = KeyLimits(requests_per_minute=2)
    assert limiter._remote is not None
    limiter._remote.now_ms = 1_000_000
    for _ in range(5):
        (await taken(limiter, limits)).cancel()
    first = await taken(limiter, limits)
    await taken(limiter, limits)
    assert isinstance(await limiter.admit("k", limits, 1), tuple)
    first.settle(1)
    assert isinstance(await limiter.admit("k", limits, 1), tuple), "one that was answered has been used"


async def test_a_client_that_leaves_while_it_waits_takes_nothing(limiter: Limiter, shared: RedisLimits) -> None:
    limits = KeyLimits(tokens_per_minute=100, concurrent_streams=1)
    waiting = asyncio.create_task(limiter.admit("k", limits, 100))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    (await taken(limiter, limits, 100)).cancel()
    await taken(limiter, limits, 100)


async def test_a_key_out_of_requests_is_known_until_the_next_or_until_one_is_given_back() -> None:
    now = [100.0]
    limiter, limits = Limiter(clock=lambda: now[0]), KeyLimits(requests_per_minute=2, tokens_per_minute=100)
    assert limiter.refused_anyway("k", limits) is None
    first = await taken(limiter, limits)
    assert isinstance(await limiter.admit("k", limits, 1000), tuple), "too many tokens: a smaller one may well fit"
    assert limiter.refused_anyway("k", limits) is None
    await taken(limiter, limits)
    assert limiter.refused_anyway("k", limits) is None, "not known before it was refused"
    assert isinstance(await limiter.admit("k", limits, 1), tuple)
    now[0] += 10.0
    found = limiter.refused_anyway("k", limits)
    assert found is not None and found[0].limit == "requests" and found[0].wait_s == pytest.approx(20.0)
    assert limiter.refused_anyway("other", limits) is None
    now[0] += 20.0
    assert limiter.refused_anyway("k", limits) is None
    second = await taken(limiter, limits)
    assert isinstance(await limiter.admit("k", limits, 1), tuple)
    assert limiter.refused_anyway("k", limits) is not None
    second.cancel()
    assert limiter.refused_anyway("k", limits) is None
    await taken(limiter, limits)
    assert isinstance(await limiter.admit("k", limits, 1), tuple)
    assert limiter.refused_anyway("k", KeyLimits(requests_per_minute=50)) is None, "the key's limits were edited"
    first.settle(1)


async def test_without_limits_nothing_is_asked(limiter: Limiter, server: ValkeyProcess) -> None:
    limiter._remote = None  # would fail if it were asked
    grant = await taken(limiter, KeyLimits())
    grant.settle(10**9)
    assert limiter._outbox == []


async def test_while_redis_is_away_each_replica_holds_the_limits_itself(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    server = ValkeyProcess(tmp_path_factory.mktemp("valkey")).start()
    limits = KeyLimits(requests_per_minute=10, tokens_per_minute=1_000_000, concurrent_streams=3)
    limiter = Limiter()
    await limiter.start(parse_redis_url(server.url))
    try:
        held = await taken(limiter, limits, 10)
        for _ in range(5):
            (await taken(limiter, limits)).cancel()
        server.kill()
        more = await taken(limiter, limits)
        assert (more.local, limiter.health.ok) == (True, False)
        assert limiter.as_dict()["error"]
        await taken(limiter, limits)
        refused = await limiter.admit("k", limits, 1)
        assert not isinstance(refused, Grant)
        assert refused[0].limit == "streams", "the stream of before counts, and no bucket is new"
        held.settle(3)
        await taken(limiter, limits)
        server.start()
        back = asyncio.get_running_loop().time() + PATIENCE_S
        while not limiter.health.ok and asyncio.get_running_loop().time() < back:  # noqa: ASYNC110 - by its own timer
            await asyncio.sleep(0.05)
        again = await limiter.admit("k", limits, 1)
        assert not isinstance(again, Grant), "its streams were made known to the server, which had lost everything"
        more.settle(1)
        assert not (await taken(limiter, limits)).local
    finally:
        await limiter.stop()
        server.kill()


async def test_a_silent_redis_costs_one_timeout() -> None:
    """A server that takes the connection and says nothing; the next request does not wait at all."""

    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(mute, "127.0.0.1", 0)
    limiter = Limiter(timeout_s=0.05)
    await limiter.start(parse_redis_url(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"))
    try:
        asked = 0
        original = limiter._ask

        async def counting(order: Order) -> Standing | None:
            nonlocal asked
            asked += limiter.health.ok
            return await original(order)

        limiter._ask = counting  # type: ignore[method-assign]
        limits = KeyLimits(requests_per_minute=2)
        outcomes = [await limiter.admit("k", limits, 1) for _ in range(3)]
        assert [isinstance(each, Grant) for each in outcomes] == [True, True, False]
        assert asked == 1
        assert limiter.health.error == "no answer within 0.05 s"
    finally:
        await limiter.stop()
        server.close()


async def test_what_redis_refuses_is_told(tmp_path_factory: pytest.TempPathFactory) -> None:
    nobody = RedisLimits(parse_redis_url("redis://127.0.0.1:1"))
    with pytest.raises(LimitsUnavailable, match="ConnectionError"):
        await nobody.run([])
    await nobody.close()
