"""How those are told who may not ask, or not so much."""

from __future__ import annotations

import math

from gateway.wire.errors import APIError


class InvalidApiKey(APIError):
    status = 401
    type = "authentication_error"
    code = "invalid_api_key"

    def __init__(self, message: str) -> None:
        super().__init__(message, headers={"www-authenticate": "Bearer"})


class NotAllowed(APIError):
    """The key is good, but not for this; or the request comes from where it should not."""

    status = 403
    type = "permission_error"
    code = "insufficient_scope"


class NotHere(APIError):
    """The route exists, but on the other port."""

    status = 404
    type = "invalid_request_error"
    code = "not_found"


class RateLimited(APIError):
    """Carries Retry-After in whole seconds."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, wait_s: float) -> None:
        super().__init__(message, headers={"retry-after": str(max(math.ceil(wait_s), 1))})


class BudgetSpent(RateLimited):
    """Of a day or a month. OpenAI's code for it, and its clients' word for not asking again by themselves."""

    code = "insufficient_quota"

    def __init__(self, message: str, *, wait_s: float) -> None:
        super().__init__(message, wait_s=wait_s)
        self.headers["x-should-retry"] = "false"
