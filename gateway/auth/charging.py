"""What a request costs its key: taken when it is admitted, settled when it ends."""

from __future__ import annotations

from litestar.types import Scope

from gateway.admission import Ticket
from gateway.auth.access import Access
from gateway.auth.errors import BudgetSpent, RateLimited
from gateway.auth.guard import key_of, show_standing
from gateway.auth.keyfile import ApiKey
from gateway.wire.errors import InvalidRequest
from policy.limits.arithmetic import KeyLimits, Refusal, Standing, describe
from policy.limits.budgets import renewal
from policy.limits.limiter import Grant

_WORDS = {
    "requests": "requests per minute",
    "tokens": "tokens per minute",
    "streams": "concurrent streams",
}


async def charge(
    scope: Scope, access: Access, ticket: Ticket, *, prompt_tokens: int, answer_tokens: int, named: bool
) -> None:
    """Take one request and its tokens from the limits of its key, until ``ticket`` closes.

    ``answer_tokens``: the most that may be generated, over all sequences; ``named``: the client set that limit itself.
    Raises :class:`RateLimited`, or :class:`InvalidRequest` for what the key could never pay.
    """
    key = key_of(scope)
    if key is None or not key.limits.any:
        return
    tokens = reservation(prompt_tokens, answer_tokens, key.limits, named=named)
    outcome = await access.limiter.admit(key.name, key.limits, tokens)
    if not isinstance(outcome, Grant):
        raise _refused(scope, key, *outcome, tokens)
    show_standing(scope, describe(key.limits, outcome.standing))
    _settle_with(ticket, outcome)


def refuse_early(scope: Scope, access: Access) -> None:
    """Raises :class:`RateLimited` for a key that is out of requests, before any work is done for this one."""
    key = key_of(scope)
    if key is None or not key.limits.any:
        return
    found = access.limiter.refused_anyway(key.name, key.limits)
    if found is not None:
        raise _refused(scope, key, *found, 0)


def _refused(scope: Scope, key: ApiKey, refused: Refusal, standing: Standing, tokens: int) -> RateLimited:
    show_standing(scope, describe(key.limits, standing))
    limits = key.limits
    if refused.limit == "day" or refused.limit == "month":
        day = refused.limit == "day"
        spent, limit = (
            (standing.budgets.day, limits.tokens_per_day) if day else (standing.budgets.month, limits.tokens_per_month)
        )
        return BudgetSpent(
            f"The API key '{key.name}' has used {spent.tokens} of its budget of {limit} tokens per {refused.limit}, "
            f"and this request may need {tokens}. The budget renews at {renewal(standing.budgets, refused.limit)}.",
            wait_s=refused.wait_s,
        )
    most = {
        "requests": limits.requests_per_minute,
        "tokens": limits.tokens_per_minute,
        "streams": limits.concurrent_streams,
    }[refused.limit]
    asked = f" This request may need {tokens}." if refused.limit == "tokens" else ""
    return RateLimited(
        f"The API key '{key.name}' is at its limit of {most} {_WORDS[refused.limit]}.{asked} "
        f"Try again in {max(refused.wait_s, 0.001):.3g} s.",
        wait_s=refused.wait_s,
    )


def reservation(prompt_tokens: int, answer_tokens: int, limits: KeyLimits, *, named: bool) -> int:
    """The tokens to take at admission: all that the request may use, or the whole limit if the client named no
    ``max_tokens`` and the default goes past it. What it uses beyond that is settled at its end. Pure.
    """
    total = prompt_tokens + answer_tokens
    kinds = (
        (limits.tokens_per_minute, "minute"),
        (limits.tokens_per_day, "day"),
        (limits.tokens_per_month, "month"),
    )
    given = [(limit, kind) for limit, kind in kinds if limit is not None]
    if not given or total <= min(given)[0]:
        return total
    limit, kind = min(given)
    if named or prompt_tokens >= limit:
        raise InvalidRequest(
            f"The request may use {total} tokens ({prompt_tokens} of its prompt), but its API key has {limit} a "
            f"{kind}: it could never be let in. Shorten the prompt or lower max_tokens.",
            param="max_tokens" if named and prompt_tokens < limit else None,
            code="over_token_limit",
        )
    return limit


def _settle_with(ticket: Ticket, grant: Grant) -> None:
    def settle() -> None:
        if ticket.used_tokens is None:
            grant.cancel()
        else:
            grant.settle(ticket.used_tokens)

    ticket.on_close = settle
