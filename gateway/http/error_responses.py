"""Every error as a response: the gateway's own, the web framework's, and those that nobody foresaw."""

from __future__ import annotations

from typing import Any

from litestar import Request
from litestar.exceptions import HTTPException
from litestar.response import Response

from gateway.interfaces.messages_answer import error_body as messages_error
from gateway.request_record import record_of
from gateway.wire.errors import APIError, ClientDisconnected, InvalidRequest, handle_unexpected

_MESSAGES = "/v1/messages"
"""Below it, errors have Anthropic's form."""

_API = "The API is at /v1; see /schema/openapi.json."
_CHAT_INSTEAD = "Use POST /v1/chat/completions"
_INSTEAD = {
    "/v1/embeddings": "This gateway generates text only: POST /v1/chat/completions and POST /v1/completions.",
    "/v1/edits": f"{_CHAT_INSTEAD}.",
    "/chat/completions": f"{_CHAT_INSTEAD}: base URLs end in /v1.",
    "/completions": "Use POST /v1/completions: base URLs end in /v1.",
    "/models": "Use GET /v1/models: base URLs end in /v1.",
    "/api/chat": f"{_CHAT_INSTEAD}: this gateway speaks OpenAI's API, not Ollama's own.",
    "/api/generate": "Use POST /v1/completions: this gateway speaks OpenAI's API, not Ollama's own.",
    "/api/tags": "Use GET /v1/models: this gateway speaks OpenAI's API, not Ollama's own.",
    "/generate": "Use POST /v1/completions.",
    "/docs": "There is no page of the API; GET /schema/openapi.json describes it, and /ui is the page for people.",
    "/redoc": "There is no page of the API; GET /schema/openapi.json describes it, and /ui is the page for people.",
    "/version": "GET / tells the version.",
    "/tokenizer_info": "GET /v1/models tells the context length.",
}
"""What there is instead of well-known routes of other servers."""

_HTTP_MESSAGES: dict[int, tuple[str, str]] = {
    404: ("not_found", "No such route: {method} {path}. {instead}"),
    405: ("method_not_allowed", "{method} is not allowed on {path}."),
    413: ("request_too_large", "The request body is larger than this gateway accepts."),
}


def _from_framework(error: HTTPException, method: str, path: str) -> APIError:
    """The same refusal in OpenAI's form, for what the web framework refuses before a handler runs."""
    code, template = _HTTP_MESSAGES.get(error.status_code, ("invalid_request", error.detail))
    known = error.status_code in _HTTP_MESSAGES
    # Paths are cut: an echo of a megabyte of somebody's path helps nobody.
    instead = _INSTEAD.get(path.rstrip("/"), _API)
    message = template.format(method=method, path=path[:200], instead=instead) if known else template
    translated = InvalidRequest(message, code=code, headers=error.headers)
    translated.status = error.status_code
    return translated


def handle_exception(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    """The one exception handler of the app. Unexpected errors are logged here and told as a bare 500."""
    told = _as_told(request, error)
    record = record_of(request.scope)
    record.status, record.error = told.status, told.code or told.type
    record.param = told.param or ""
    body = messages_error(told) if request.url.path.startswith(_MESSAGES) else told.body()
    return Response(content=body, status_code=told.status, media_type="application/json", headers=told.headers)


def _as_told(request: Request[Any, Any, Any], error: Exception) -> APIError:
    if isinstance(error, APIError):
        return error
    if isinstance(error, HTTPException):
        if error.status_code < 500:
            return _from_framework(error, request.method, request.url.path)
        if error.detail == "client disconnected prematurely":
            return ClientDisconnected("The client left while its body was read.")
    return handle_unexpected(error, f"{request.method} {request.url.path}")
