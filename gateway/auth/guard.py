"""Where authentication meets the web framework: a guard before every route, and headers on every response."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from litestar.connection import ASGIConnection
from litestar.handlers.base import BaseRouteHandler
from litestar.types import Message, Scope

from gateway.auth.access import Need
from gateway.auth.keyfile import ApiKey

OPT = "need"
"""The key of a route's ``opt`` that names its :data:`Need`. A route without one needs the admin scope."""

_KEY = "api_key"
_STANDING = "ratelimit_headers"

SECURITY_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
_NO_CONTENT = (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'")


def needs(need: Need) -> dict[str, Need]:
    """For a route's ``opt``."""
    return {OPT: need}


def needs_by_path(handlers: Iterable[BaseRouteHandler]) -> dict[str, Need]:
    """What each path needs, as its route declares it; parameters as OpenAPI writes them, without their type."""
    return {
        re.sub(r":\w+}", "}", path): handler.opt.get(OPT, "admin") for handler in handlers for path in handler.paths
    }


async def guard(connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler) -> None:
    """Runs before a body is read. Raises InvalidApiKey, NotAllowed or NotHere; notes key and tenant in the scope."""
    scope = connection.scope
    server = scope.get("server")
    access = connection.app.state.gateway.access
    key = access.check(handler.opt.get(OPT, "admin"), scope["headers"], None if server is None else server[1])
    if key is not None:
        state: dict[str, Any] = scope.setdefault("state", {})
        state[_KEY] = key
        state["tenant"] = key.name


def key_of(scope: Scope) -> ApiKey | None:
    """The key that the request was let in with."""
    return scope.get("state", {}).get(_KEY)


def show_standing(scope: Scope, headers: dict[str, str]) -> None:
    """Put ``headers`` on the response of this request, whatever it will be."""
    scope.setdefault("state", {})[_STANDING] = headers


class ResponseHeaders:
    """A Litestar ``before_send`` hook, so that routes that don't exist and refused bodies get the headers too."""

    async def __call__(self, message: Message, scope: Scope) -> None:
        if message["type"] != "http.response.start":
            return
        given = list(message["headers"])
        names = {name.lower() for name, _ in given}
        own = [*SECURITY_HEADERS, _NO_CONTENT]
        if b"cache-control" not in names:
            own.append((b"cache-control", b"no-store"))
        standing: dict[str, str] = scope.get("state", {}).get(_STANDING, {})
        own += [(name.encode(), value.encode()) for name, value in standing.items()]
        # A page of ours (a dashboard, say) may bring its own policy.
        message["headers"] = [*given, *(each for each in own if each[0] not in names)]
