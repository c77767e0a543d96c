"""Which web pages may ask (CORS): those of the origins that the operator names, with any header they like.

The browser asks first (a preflight): OPTIONS with ``Origin`` and ``Access-Control-Request-Method``. Which headers a
page sends is its client's business: OpenAI's JavaScript client has a dozen of its own, tracing adds more. Cookies are
never allowed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from litestar.types import ASGIApp, Message, Receive, Scope, Send

from gateway.wire.errors import APIError

Headers = list[tuple[bytes, bytes]]

_VARY = (b"vary", b"origin")
MAX_AGE_S = 600
_MOST_ASKED = 8 * 1024


class OriginNotAllowed(APIError):
    status = 403
    type = "invalid_request_error"
    code = "origin_not_allowed"


class Cors:
    """An ASGI app before ``app``."""

    def __init__(self, app: ASGIApp, origins: Sequence[str], exposed: Iterable[str]) -> None:
        self._app = app
        self._origins = frozenset(origin.encode() for origin in origins)
        self._exposed = ", ".join(sorted(set(exposed))).encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked = scope["headers"]
        origin = _value(asked, b"origin")
        if scope["method"] == "OPTIONS" and origin and _value(asked, b"access-control-request-method"):
            await _answer(send, *self.preflight(asked))
            return
        own: Headers = [_VARY]
        if origin in self._origins:
            own += [(b"access-control-allow-origin", origin), (b"access-control-expose-headers", self._exposed)]

        async def told(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *own]
            await send(message)

        await self._app(scope, receive, told)

    def preflight(self, asked: Iterable[tuple[bytes, bytes]]) -> tuple[int, Headers, bytes]:
        """Status, headers and body. Pure."""
        asked = list(asked)
        origin = _value(asked, b"origin")
        if origin not in self._origins:
            error = OriginNotAllowed(
                f"Pages of {origin.decode('latin-1')[:100]} may not ask here. Start the gateway with --cors-origin and "
                "the origin, if they should."
            )
            return error.status, [_VARY, (b"content-type", b"application/json")], error.body()
        headers = [
            _VARY,
            (b"access-control-allow-origin", origin),
            (b"access-control-allow-methods", b"GET, HEAD, POST"),
            (b"access-control-max-age", b"%d" % MAX_AGE_S),
        ]
        if names := _value(asked, b"access-control-request-headers")[:_MOST_ASKED]:
            headers.append((b"access-control-allow-headers", names))
        return 204, headers, b""


def _value(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> bytes:
    return b", ".join(value for each, value in headers if each == name)


async def _answer(send: Send, status: int, headers: Headers, body: bytes) -> None:
    if status != 204:
        headers.append((b"content-length", b"%d" % len(body)))
    start: Any = {"type": "http.response.start", "status": status, "headers": headers}
    await send(start)
    await send({"type": "http.response.body", "body": body, "more_body": False})
