"""Errors as OpenAI clients expect them: ``{"error": {"message", "type", "param", "code"}}``, whatever went wrong."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Mapping

import msgspec

logger = logging.getLogger("gateway")

CLIENT_CLOSED_REQUEST = 499
"""nginx's number for a client that left. Nobody reads it; it only shows in the access log."""


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    """The body of every response that is not a success, and of the ``data:`` event that ends a broken stream."""

    error: ErrorDetail


class APIError(Exception):
    """A failure that the client is told about. ``message`` is shown as it is: no internals, no prompt text."""

    status = 500
    type = "server_error"
    code: str | None = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or type(self).code
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        return msgspec.json.encode(ErrorBody(ErrorDetail(self.message, self.type, self.param, self.code)))


class InvalidRequest(APIError):
    """The request can't be served as it stands; the message says what to change."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class ModelNotFound(APIError):
    status = 404
    type = "invalid_request_error"
    code = "model_not_found"


class UnsupportedMediaType(APIError):
    status = 415
    type = "invalid_request_error"
    code = "unsupported_media_type"


class QueueFull(APIError):
    """More sequences than the gateway may hold. Carries Retry-After."""

    status = 429
    type = "rate_limit_error"
    code = "queue_full"

    def __init__(self, message: str, *, retry_after_s: int) -> None:
        super().__init__(message, headers={"retry-after": str(retry_after_s)})


class Unavailable(APIError):
    """This replica can't answer now (draining, or its engine is gone); another one may."""

    status = 503
    type = "service_unavailable_error"
    code = "engine_unavailable"


class EngineFailure(APIError):
    """The engine gave up on a sequence."""

    status = 500
    type = "server_error"
    code = "engine_error"


class ClientDisconnected(APIError):
    """Ends the work for a client that left; never read by anybody."""

    status = CLIENT_CLOSED_REQUEST
    type = "client_disconnected"
    code = "client_disconnected"


def shutting_down(*, mid_answer: bool = False) -> Unavailable:
    """The error of a replica that drains: for a new request, or for an answer that the drain timeout cut."""
    message = (
        "The server shut down before this answer was complete; send the request again."
        if mid_answer
        else "The server is shutting down and takes no new requests; send it again."
    )
    return Unavailable(message, code="shutting_down", headers={"retry-after": "1"})


def _without_words(error: BaseException) -> str:
    """Kinds and frames of an exception and of those that led to it, the last one first."""
    told, seen = [], set[int]()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        told.append(f"{type(cause).__qualname__} at\n{''.join(traceback.format_tb(cause.__traceback__))}")
        cause = cause.__cause__ or cause.__context__
    return "after ".join(told).rstrip()


def handle_unexpected(error: Exception, where: str) -> APIError:
    """Log an error that nobody foresaw; what the client is told names no internals.

    Where it happened is logged, and its kind, but not its words: they may quote the prompt that it choked on.
    """
    logger.error("unhandled error in %s: %s", where, _without_words(error))
    return APIError("The gateway failed on this request; its log says why.", code="internal_error")
