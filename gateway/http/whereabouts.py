"""Which replica answered, and what it runs, on every response: where to look when an answer was odd."""

from __future__ import annotations

from litestar.types import Message, Scope

REPLICA_HEADER = "x-medusa-replica"
VERSION_HEADER = "x-medusa-version"


class Whereabouts:
    """A Litestar ``before_send`` hook, so that routes that don't exist and refused bodies get the headers too.

    ``replica``: the id by which ``/admin/decisions``, alerts and ``medusa_build_info`` name it.
    """

    def __init__(self, replica: str, version: str) -> None:
        self._headers = [
            (REPLICA_HEADER.encode("ascii"), replica.encode("latin-1", "replace")),
            (VERSION_HEADER.encode("ascii"), version.encode("latin-1", "replace")),
        ]

    async def __call__(self, message: Message, scope: Scope) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], *self._headers]
