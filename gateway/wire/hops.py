"""``x-medusa-hops``: how many gateways a request has come through."""

from __future__ import annotations

from typing import Any

from litestar import Request

HOPS_HEADER = "x-medusa-hops"
MAX_HOPS = 4
"""Gateways that a request may pass: two that name each other as upstreams would otherwise never let go of it."""


def hops_of(request: Request[Any, Any, Any]) -> int:
    """How many gateways the request has come through."""
    given = request.headers.get(HOPS_HEADER, "0")
    return int(given) if given.isascii() and given.isdecimal() and len(given) < 4 else 0
