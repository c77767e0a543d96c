"""Errors as OpenAI clients expect them: ``{"error": {"message", "type", "param", "code"}}``, whatever went wrong."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Mapping
from typing import Any

import msgspec
from litestar import Request
from litestar.exceptions import HTTPException
from litestar.response import Response

from gateway.request_record import record_of

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


_API = "The API is at /v1; see /schema/openapi.json."
_CHAT_INSTEAD = "Use POST /v1/chat/completions"
_INSTEAD = {
    "/v1/responses": f"{_CHAT_INSTEAD}; most SDKs can be told to.",
    "/v1/messages": f"{_CHAT_INSTEAD}: this gateway speaks OpenAI's API, not Anthropic's.",
    "/v1/embeddings": "This gateway generates text only: POST /v1/chat/completions and POST /v1/completions.",
    "/v1/edits": f"{_CHAT_INSTEAD}.",
    "/chat/completions": f"{_CHAT_INSTEAD}: base URLs end in /v1.",
    "/completions": "Use POST /v1/completions: base URLs end in /v1.",
    "/models": "Use GET /v1/models: base URLs end in /v1.",
    "/api/chat": f"{_CHAT_INSTEAD}: this gateway speaks OpenAI's API, not Ollama's own.",
    "/api/generate": "Use POST /v1/completions: this gateway speaks OpenAI's API, not Ollama's own.",
    "/api/tags": "Use GET /v1/models: this gateway speaks OpenAI's API, not Ollama's own.",
    "/generate": "Use POST /v1/completions.",
    "/docs": "There is no page; the API is described by GET /schema/openapi.json.",
    "/redoc": "There is no page; the API is described by GET /schema/openapi.json.",
    "/version": "GET / tells the version.",
    "/tokenize": "Tokens are counted in usage; POST /v1/decoding/explain counts a prompt's without answering it.",
    "/detokenize": "Log probabilities hold the text of tokens.",
    "/tokenizer_info": "GET /v1/models tells the context length.",
}
"""What there is instead of well-known routes of other servers."""

_HTTP_MESSAGES: dict[int, tuple[str, str]] = {
    404: ("not_found", "No such route: {method} {path}. {instead}"),
    405: ("method_not_allowed", "{method} is not allowed on {path}."),
    413: ("request_too_large", "The request body is larger than this gateway accepts."),
}


def from_framework(error: HTTPException, method: str, path: str) -> APIError:
    """The same refusal in OpenAI's form, for what the web framework refuses before a handler runs."""
    code, template = _HTTP_MESSAGES.get(error.status_code, ("invalid_request", error.detail))
    known = error.status_code in _HTTP_MESSAGES
    # Paths are cut: an echo of a megabyte of somebody's path helps nobody.
    instead = _INSTEAD.get(path.rstrip("/"), _API)
    message = template.format(method=method, path=path[:200], instead=instead) if known else template
    translated = InvalidRequest(message, code=code, headers=error.headers)
    translated.status = error.status_code
    return translated


def to_response(error: APIError) -> Response[bytes]:
    return Response(
        content=error.body(), status_code=error.status, media_type="application/json", headers=error.headers
    )


def handle_exception(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    """The one exception handler of the app. Unexpected errors are logged here and told as a bare 500."""
    told = _as_told(request, error)
    record = record_of(request.scope)
    record.status, record.error = told.status, told.code or told.type
    record.param = told.param or ""
    return to_response(told)


def _as_told(request: Request[Any, Any, Any], error: Exception) -> APIError:
    if isinstance(error, APIError):
        return error
    if isinstance(error, HTTPException):
        if error.status_code < 500:
            return from_framework(error, request.method, request.url.path)
        if error.detail == "client disconnected prematurely":
            return ClientDisconnected("The client left while its body was read.")
    return handle_unexpected(error, f"{request.method} {request.url.path}")


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
