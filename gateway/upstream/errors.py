"""How an upstream fails, in errors that OpenAI clients understand."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import msgspec

from gateway.wire.errors import APIError, ErrorDetail

_SHOWN = 300
OUTCOMES = (
    "completed",
    "abandoned",
    "refused",
    "upstream_error",
    "upstream_unavailable",
    "upstream_timeout",
    "upstream_busy",
)
"""How a request to an upstream may end; "error" beside, for what nobody foresaw."""
MOST_RETRY_S = 60
"""The longest that an upstream's Retry-After is believed."""


class UpstreamFailure(APIError):
    """The upstream's fault, not the client's: another backend may do better. Never raised after the first byte but
    inside the stream. ``at_fault`` false: it is well, but has no room. ``internal``: what only the operator is told.
    """

    status = 502
    type = "upstream_error"
    code = "upstream_error"
    at_fault = True

    def __init__(self, message: str, *, headers: Mapping[str, str] | None = None, internal: str = "") -> None:
        super().__init__(message, headers=headers)
        self.internal = internal


class UpstreamUnavailable(UpstreamFailure):
    """It can't be reached, or is known not to be well."""

    status = 503
    type = "service_unavailable_error"
    code = "upstream_unavailable"


class UpstreamTimeout(UpstreamFailure):
    status = 504
    type = "timeout_error"
    code = "upstream_timeout"


class UpstreamBusy(UpstreamFailure):
    status = 429
    type = "rate_limit_error"
    code = "upstream_busy"
    at_fault = False


class UpstreamRefusal(APIError):
    """The upstream finds the request itself wrong: no other backend is asked, and its words are passed on."""

    status = 400
    type = "invalid_request_error"
    code = "upstream_refused"


def outcome_of(error: APIError) -> str:
    """A word for how a request to an upstream ended, of a closed set: codes of refusals are the upstream's own."""
    if isinstance(error, UpstreamRefusal):
        return "refused"
    return (error.code or "error") if isinstance(error, UpstreamFailure) else "error"


class _Body(msgspec.Struct):
    error: msgspec.Raw


class _Detail(msgspec.Struct):
    message: str = ""
    type: str | None = None
    param: str | None = None
    code: str | int | None = None


def detail_of(body: bytes) -> ErrorDetail | None:
    """What an error body says, in whichever of the usual forms; None if it is in none of them."""
    try:
        raw = msgspec.json.decode(body, type=_Body).error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raw = msgspec.Raw(body)
    return error_detail(raw)


def error_detail(raw: msgspec.Raw) -> ErrorDetail | None:
    """The same of the value of ``error`` alone: an object as OpenAI's, or a text."""
    try:
        found = msgspec.json.decode(raw, type=_Detail | str)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if isinstance(found, str):
        return ErrorDetail(found[:_SHOWN], "", None, None)
    if not found.message:
        return None
    code = None if found.code is None else str(found.code)
    return ErrorDetail(found.message[:_SHOWN], found.type or "", found.param, code)


def failure_of_status(name: str, status: int, body: bytes, retry_after: str | None, now: datetime) -> APIError:
    """The error for an answer that is not a success. ``name``: the backend's. ``now``: for a Retry-After that is a
    date."""
    detail = detail_of(body)
    if status in (400, 413, 422):
        said = detail.message if detail else f"it answered {status} without a reason"
        error = UpstreamRefusal(
            f"The backend '{name}' refuses this request: {said}",
            param=detail.param if detail else None,
            code=detail.code if detail and detail.code and not detail.code.isdigit() else None,
        )
        error.status = status
        return error
    if status == 429:
        seconds = retry_after_seconds(retry_after, now)
        return UpstreamBusy(
            f"The backend '{name}' has no room; try again in about {seconds} s.",
            headers={"retry-after": str(seconds)},
        )
    # Words about keys, paths and hosts of the upstream are the operator's business: they are in /admin/backends.
    if status in (401, 403):
        return UpstreamFailure(f"The backend '{name}' does not accept this gateway's credentials.")
    if status == 404:
        return UpstreamFailure(f"The backend '{name}' does not know its route or model; its configuration is wrong.")
    if status in (502, 503, 504):
        return UpstreamUnavailable(f"The backend '{name}' is unavailable: it answered {status}.")
    return UpstreamFailure(f"The backend '{name}' failed: it answered {status}.")


def retry_after_seconds(given: str | None, now: datetime) -> int:
    """Whole seconds, between 1 and :data:`MOST_RETRY_S`, of a Retry-After header: a number, or a date as HTTP has them.

    1 for one that is neither, or is over already.
    """
    try:
        seconds = float(given or 1)
    except ValueError:
        try:
            date = parsedate_to_datetime(given or "")
        except ValueError:
            return 1
        # HTTP's dates are in GMT, whether they say so in a way that is understood or not.
        seconds = (date.replace(tzinfo=date.tzinfo or UTC) - now).total_seconds()
    # NaN is in no order with anything.
    return max(1, math.ceil(min(seconds, MOST_RETRY_S))) if seconds > 1 else 1
