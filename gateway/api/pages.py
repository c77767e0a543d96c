"""``/ui``: the page for people. Its files are the same for everybody; what they show comes from routes that ask for a
key. A browser gets it at ``/`` too, where API clients get the pointer."""

from __future__ import annotations

from litestar import get
from litestar.params import FromPath
from litestar.response.base import ASGIResponse
from litestar.types import ASGIApp, Receive, Scope, Send

from gateway.auth.guard import needs
from gateway.ui.files import CONTENT_POLICY, ui_files
from gateway.wire.errors import APIError

_HEADERS = {"content-security-policy": CONTENT_POLICY, "cache-control": "no-cache", "vary": "accept"}


class NoSuchFile(APIError):
    status = 404
    type = "invalid_request_error"
    code = "not_found"


def _file(name: str) -> ASGIResponse:
    found = ui_files().get(name)
    if found is None:
        raise NoSuchFile("The page has no such file; it begins at /ui.")
    return ASGIResponse(body=found.content, media_type=found.media_type, status_code=200, headers=_HEADERS)


@get("/ui", opt=needs("open"))
async def page() -> ASGIResponse:
    return _file("index.html")


@get("/ui/{name:str}", opt=needs("open"))
async def page_file(name: FromPath[str]) -> ASGIResponse:
    return _file(name)


def page_at_root(app: ASGIApp) -> ASGIApp:
    """``GET /`` is the page for whoever prefers HTML, as browsers say they do."""

    async def handle(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == "/" and scope["method"] in ("GET", "HEAD"):
            accepts = next((value for name, value in scope["headers"] if name == b"accept"), b"")
            if b"text/html" in accepts:
                scope = {**scope, "path": "/ui", "raw_path": b"/ui"}
        await app(scope, receive, send)

    return handle
