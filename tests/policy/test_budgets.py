"""Budgets of a day and a month: the calendar, races over replicas, outages, and what a client is told.

That Lua and Python count alike is shown in test_limits.py, with all other limits.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st

from policy.limits.arithmetic import KeyLimits, Standing, admit, describe, refilled, refusal
from policy.limits.budgets import (
    DAY_MS,
    Budgets,
    Spent,
    at,
    day_start,
    exceeded,
    higher,
    month_start,
    renewal,
    renews_in_ms,
    spend,
    unspend,
)
from policy.limits.limiter import Grant, Limiter, LimitsHealth
from policy.limits.redis_buckets import Order, RedisLimits
from policy.shared.redis_client import parse_redis_url
from tests.support.valkey import ValkeyProcess

PATIENCE_S = 30.0
MOMENTS = st.integers(1_000_000, 4_102_444_800_000)
DAILY = KeyLimits(tokens_per_day=1_000)
BOTH = KeyLimits(tokens_per_day=1_000, tokens_per_month=3_000)


@given(MOMENTS)
def test_windows_are_days_and_months_of_utc(now_ms: int) -> None:
    moment = datetime.fromtimestamp(now_ms / 1000, UTC)
    today = moment.replace(hour=0, minute=0, second=0, microsecond=0)
    assert day_start(now_ms) == today.timestamp() * 1000
    assert month_start(now_ms) == today.replace(day=1).timestamp() * 1000
    budgets = at(Budgets(), BOTH, now_ms)
    first = (today.replace(day=28) + (today.replace(day=2) - today.replace(day=1)) * 4).replace(day=1)
    assert now_ms + renews_in_ms(budgets, "month") == first.timestamp() * 1000
    assert renewal(budgets, "month") == first.isoformat().replace("+00:00", "Z")
    assert 0 < renews_in_ms(budgets, "day") <= DAY_MS


@given(MOMENTS, st.lists(st.tuples(st.integers(0, 3 * DAY_MS), st.integers(0, 600), st.integers(0, 900)), max_size=30))
def test_no_day_and_no_month_holds_more_than_its_budget(now_ms: int, steps: list[tuple[int, int, int]]) -> None:
    """By an account of each day and month; everything that is refused would have passed one of them."""
    budgets, days, months = Budgets(), dict[int, int](), dict[int, int]()
    for wait, tokens, used in steps:
        now_ms += wait
        day, month = day_start(now_ms), month_start(now_ms)
        budgets = at(budgets, BOTH, now_ms)
        _, standing = admit(refilled(None, BOTH, now_ms), BOTH, tokens, 0, budgets)
        fits = days.get(day, 0) + tokens <= 1_000 and months.get(month, 0) + tokens <= 3_000
        assert standing.granted == fits
        if not standing.granted:
            refused = refusal(BOTH, standing, tokens)
            assert refused is not None and refused.limit in ("day", "month")
            later = at(budgets, BOTH, now_ms + round(refused.wait_s * 1000))
            assert not exceeded(later, BOTH, tokens), "after the time that it was told, it is let in"
            continue
        budgets = spend(budgets, BOTH, tokens)
        assert standing.budgets == budgets
        # What was used may be more than what was taken: it counts all the same.
        budgets = unspend(budgets, BOTH, tokens - used, budgets.windows())
        days[day], months[month] = days.get(day, 0) + used, months.get(month, 0) + used


def test_what_was_taken_yesterday_is_not_given_back_today() -> None:
    yesterday = at(Budgets(), BOTH, 40 * DAY_MS)
    taken = spend(yesterday, BOTH, 500)
    today = spend(at(taken, BOTH, 41 * DAY_MS), BOTH, 100)
    after = unspend(today, BOTH, 400, taken.windows())
    assert (after.day.tokens, after.month.tokens) == (100, 200), "the month is the same one"


def test_a_clock_that_is_set_back_over_midnight_begins_no_new_day() -> None:
    after_midnight = spend(at(Budgets(), DAILY, 40 * DAY_MS + 1), DAILY, 900)
    assert at(after_midnight, DAILY, 40 * DAY_MS - 1).day == after_midnight.day
    assert at(after_midnight, DAILY, 38 * DAY_MS).day == Spent(38 * DAY_MS), "it was wrong before"


def test_the_later_window_and_the_higher_count_are_known() -> None:
    one, other = Budgets(Spent(DAY_MS, 5), Spent(0, 9), 7), Budgets(Spent(2 * DAY_MS, 1), Spent(0, 8))
    assert higher(one, other) == Budgets(Spent(2 * DAY_MS, 1), Spent(0, 9), 7)


def test_headers_name_the_budget() -> None:
    budgets = Budgets(Spent(40 * DAY_MS, 1_100), Spent(), 40 * DAY_MS + 1_000)
    assert describe(DAILY, Standing(True, None, None, 1, budgets=budgets)) == {
        "x-ratelimit-limit-tokens-per-day": "1000",
        "x-ratelimit-remaining-tokens-per-day": "0",
        "x-ratelimit-reset-tokens-per-day": "1439m59s",
    }


async def used(shared: RedisLimits, limits: KeyLimits = DAILY) -> int:
    [standing] = await shared.run([Order("admit", "k", limits, ["look"], 0, 0)])
    assert standing is not None
    return standing.budgets.day.tokens


async def test_replicas_share_one_budget_under_a_race_to_the_token(server: ValkeyProcess, shared: RedisLimits) -> None:
    pair = [Limiter(timeout_s=PATIENCE_S) for _ in range(2)]
    for each in pair:
        await each.start(parse_redis_url(server.url))
    outcomes = await asyncio.gather(*(pair[n % 2].admit("k", DAILY, 30) for n in range(100)))
    grants = [each for each in outcomes if isinstance(each, Grant)]
    assert len(grants) == 33, "a budget does not refill: 33 times 30, and not one more"
    for number, each in enumerate(grants):
        each.cancel() if number % 3 == 0 else each.settle(10)
        each.settle(30)
    for each in pair:
        await each.stop()
    assert await used(shared) == 22 * 10, "all that was not used came back, once"


async def test_what_is_used_without_redis_is_told_when_it_is_back(server: ValkeyProcess, shared: RedisLimits) -> None:
    limiter = Limiter(timeout_s=PATIENCE_S)
    await limiter.start(parse_redis_url(server.url))
    first = await limiter.admit("k", DAILY, 300)
    assert isinstance(first, Grant)
    first.settle(300)
    limiter.health = LimitsHealth("the test", False, 0.0, "away")
    alone = await limiter.admit("k", DAILY, 600)
    assert isinstance(alone, Grant) and alone.local
    refused = await limiter.admit("k", DAILY, 200)
    assert not isinstance(refused, Grant), "what Redis knew is known here, so nobody starts anew"
    assert refused[0].limit == "day"
    alone.settle(50)
    alone.settle(50)
    letters = list(limiter._outbox)
    await limiter.stop()
    assert await used(shared) == 350
    await shared.run([letter.order for letter in letters])
    assert await used(shared) == 350, "told again, as after a lost answer, it counts once"
