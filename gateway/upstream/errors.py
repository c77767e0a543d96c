"""How an upstream fails, in errors that OpenAI clients understand."""

from __future__ import annotations

import math

import msgspec

from gateway.errors import APIError, ErrorDetail

_SHOWN = 300


class UpstreamFailure(APIError):
    """The upstream's fault, not the client's: another backend may do better. Never raised after the first byte but
    inside the stream. ``at_fault`` false: it is well, but has no room."""

    status = 502
    type = "upstream_error"
    code = "upstream_error"
    at_fault = True


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


def failure_of_status(name: str, status: int, body: bytes, retry_after: str | None) -> APIError:
    """The error for an answer that is not a success. ``name``: the backend's."""
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
        seconds = _seconds(retry_after)
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


def _seconds(retry_after: str | None) -> int:
    try:
        value = float(retry_after or 1)
    except ValueError:
        return 1
    return max(1, min(math.ceil(value), 60)) if math.isfinite(value) else 1
