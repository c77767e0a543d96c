"""The page's files, read once, and the headers that go with them."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import NamedTuple

CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Nothing from elsewhere, and nothing that is written into the document itself."""

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


class UiFile(NamedTuple):
    media_type: str
    content: bytes


@cache
def ui_files() -> dict[str, UiFile]:
    """By name, such as ``app.js``. What is not in here is not served, whatever path asks for it."""
    found = {}
    for each in files("gateway.ui").joinpath("assets").iterdir():
        suffix = each.name[each.name.rfind(".") :]
        if suffix in _TYPES:
            found[each.name] = UiFile(_TYPES[suffix], each.read_bytes())
    return found
