"""What the routes of this package answer with."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar.response.base import ASGIResponse


def json_response(value: Any) -> ASGIResponse:
    """A success, of anything that msgspec can write."""
    return ASGIResponse(body=msgspec.json.encode(value), media_type="application/json", status_code=200)
