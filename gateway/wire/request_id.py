"""``x-request-id``: taken from the client if it is harmless, made otherwise, and on every response."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from litestar.types import Message, Scope

_HARMLESS = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}")
_HEADER = b"x-request-id"
_KEY = "x_request_id"


def request_id_of(scope: Scope, new_id: Callable[[], str]) -> str:
    """The id of the request in ``scope``; the same every time it is asked for. Safe to log and to echo."""
    state: dict[str, Any] = scope.setdefault("state", {})
    if _KEY not in state:
        given = next((value for name, value in scope["headers"] if name == _HEADER), b"")
        state[_KEY] = given.decode("ascii") if _HARMLESS.fullmatch(given) else new_id()
    return state[_KEY]


class RequestIdHeader:
    """A Litestar ``before_send`` hook, so that routes that don't exist and refused bodies get the header too."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._new_id = new_id

    async def __call__(self, message: Message, scope: Scope) -> None:
        if message["type"] == "http.response.start":
            value = request_id_of(scope, self._new_id).encode("ascii")
            message["headers"] = [*message["headers"], (_HEADER, value)]
