"""What a request costs its key: taken when it is admitted, settled when it ends."""

from __future__ import annotations

from litestar.types import Scope

from gateway.admission import Ticket
from gateway.auth.access import Access
from gateway.auth.errors import RateLimited
from gateway.auth.guard import key_of, show_standing
from gateway.auth.keyfile import ApiKey
from gateway.wire.errors import InvalidRequest
from policy.limits.arithmetic import Dimension, KeyLimits, Refusal, Standing, describe
from policy.limits.limiter import Grant

_WORDS: dict[Dimension, str] = {
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
    most = {
        "requests": key.limits.requests_per_minute,
        "tokens": key.limits.tokens_per_minute,
        "streams": key.limits.concurrent_streams,
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
    total, limit = prompt_tokens + answer_tokens, limits.tokens_per_minute
    if limit is None or total <= limit:
        return total
    if named or prompt_tokens >= limit:
        raise InvalidRequest(
            f"The request may use {total} tokens ({prompt_tokens} of its prompt), but its API key has {limit} a "
            "minute: it could never be let in. Shorten the prompt or lower max_tokens.",
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
