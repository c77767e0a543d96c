"""What an API key may use in a day and in a month, beside its limits by the minute. Pure.

Days and months are those of UTC, and begin anew with nothing used: a budget renews at once, where a limit by the minute
refills evenly. What a request might use is taken when it is admitted and what it did not use is given back at its end,
to the window that it was taken from and to no other. A limit is compared with what was used, so an edit of it counts
from the next request on; what was used under the old one stays used.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from typing import Literal, Protocol

Window = Literal["day", "month"]
Windows = tuple[int, int]
"""When the windows of a day and of a month began, in ms of the wall clock: marks of what was taken in them."""
DAY_MS = 86_400_000
BACKWARDS_MS = 3_600_000
"""A clock that goes back over a window's beginning by up to this much stays in it, so that nothing is granted twice.
One that was further ahead was wrong, and is not held to it."""
MOST_TOKENS = 10**12
"""The largest budget; keeps counts within the integers that a double, and so a Lua script, can hold."""

_EPOCH = date(1970, 1, 1).toordinal()


class HasBudgets(Protocol):
    """None: no such budget."""

    @property
    def tokens_per_day(self) -> int | None: ...

    @property
    def tokens_per_month(self) -> int | None: ...


@dataclass(frozen=True, slots=True)
class Spent:
    """Tokens used in the window that began at ``start_ms`` (of the wall clock; 0: nothing is known)."""

    start_ms: int = 0
    tokens: int = 0

    def at(self, begins_ms: int, now_ms: int) -> Spent:
        """The same at ``now_ms``, in whose window that is: a new one if ``begins_ms`` says so."""
        held = now_ms < self.start_ms <= now_ms + BACKWARDS_MS
        return self if held or self.start_ms == begins_ms else Spent(begins_ms)


@dataclass(frozen=True, slots=True)
class Budgets:
    """What a key has used at ``at_ms`` (wall clock). Windows without a limit are not counted and stay as they are."""

    day: Spent = Spent()
    month: Spent = Spent()
    at_ms: int = 0

    def windows(self) -> Windows:
        return self.day.start_ms, self.month.start_ms


def day_start(now_ms: int) -> int:
    return now_ms - now_ms % DAY_MS


def month_start(now_ms: int) -> int:
    days = now_ms // DAY_MS
    return (days - date.fromordinal(days + _EPOCH).day + 1) * DAY_MS


def at(before: Budgets, limits: HasBudgets, now_ms: int) -> Budgets:
    """What is used at ``now_ms``."""
    return Budgets(
        before.day if limits.tokens_per_day is None else before.day.at(day_start(now_ms), now_ms),
        before.month if limits.tokens_per_month is None else before.month.at(month_start(now_ms), now_ms),
        now_ms,
    )


def exceeded(budgets: Budgets, limits: HasBudgets, tokens: int) -> dict[Window, float]:
    """The budgets that ``tokens`` more go past, with the seconds until each renews."""
    by_window: tuple[tuple[Window, int | None, Spent], ...] = (
        ("day", limits.tokens_per_day, budgets.day),
        ("month", limits.tokens_per_month, budgets.month),
    )
    return {
        window: renews_in_ms(budgets, window) / 1000
        for window, limit, spent in by_window
        if limit is not None and spent.tokens + tokens > limit
    }


def renews_in_ms(budgets: Budgets, window: Window) -> int:
    next_month = month_start(budgets.month.start_ms + 32 * DAY_MS)
    return max((budgets.day.start_ms + DAY_MS if window == "day" else next_month) - budgets.at_ms, 0)


def spend(budgets: Budgets, limits: HasBudgets, tokens: int) -> Budgets:
    """Take ``tokens`` from every budget that there is."""
    day, month = budgets.day, budgets.month
    return replace(
        budgets,
        day=day if limits.tokens_per_day is None else replace(day, tokens=day.tokens + tokens),
        month=month if limits.tokens_per_month is None else replace(month, tokens=month.tokens + tokens),
    )


def unspend(budgets: Budgets, limits: HasBudgets, tokens: int, windows: Windows) -> Budgets:
    """Give back what was not used; negative for what was used and not taken. ``limits`` and ``windows``: those of the
    admission. A window that is over is left alone."""

    def less(spent: Spent, limit: int | None, window: int) -> Spent:
        if limit is None or spent.start_ms != window:
            return spent
        return replace(spent, tokens=max(spent.tokens - tokens, 0))

    return replace(
        budgets,
        day=less(budgets.day, limits.tokens_per_day, windows[0]),
        month=less(budgets.month, limits.tokens_per_month, windows[1]),
    )


def shown(budgets: Budgets, limits: HasBudgets) -> Budgets:
    """Those that there is a limit for; nothing of the others."""
    if limits.tokens_per_day is None and limits.tokens_per_month is None:
        return Budgets()  # also without the time, which then is of no interest
    return replace(
        budgets,
        day=Spent() if limits.tokens_per_day is None else budgets.day,
        month=Spent() if limits.tokens_per_month is None else budgets.month,
    )


def higher(one: Budgets, other: Budgets) -> Budgets:
    """What is used by whichever knows more: the later window, or the higher count in the same."""

    def more(a: Spent, b: Spent) -> Spent:
        return max(a, b, key=lambda spent: (spent.start_ms, spent.tokens))

    return Budgets(more(one.day, other.day), more(one.month, other.month), one.at_ms)


def renewal(budgets: Budgets, window: Window) -> str:
    """When that is, as RFC 3339 has it."""
    moment = datetime.fromtimestamp((budgets.at_ms + renews_in_ms(budgets, window)) // 1000, UTC)
    return moment.isoformat().replace("+00:00", "Z")
