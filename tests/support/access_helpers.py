"""Keys, key files and gateways that ask for them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gateway.auth.access import Access, open_keys
from gateway.auth.keyfile import new_key, written_digest
from gateway.serving.controller import Controller
from gateway.serving.statistics_store import store_opener
from policy.limits.limiter import Limiter
from policy.runtime import PolicyRuntime
from tests.support.live_gateway import LiveGateway, running_gateway

POLICY = b"""
version: 1
rules:
  - {name: guests, when: {tenant: guest}, use: {method: vanilla}}
"""
CHAT = "/v1/chat/completions"


def entry(name: str, key: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "hash": written_digest(key), **fields}


def write_keys(path: Path, *entries: dict[str, Any]) -> None:
    path.write_text(json.dumps({"version": 1, "keys": entries}))


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def chat(text: str = "hi", **more: Any) -> dict[str, Any]:
    return {"model": "fake-model", "messages": [{"role": "user", "content": text}], **more}


@contextmanager
def keyed_gateway(
    path: Path, redis_url: str = "memory", *, timeout_s: float = 60.0, admin_port: int | None = None, **more: Any
) -> Iterator[LiveGateway]:
    """A gateway that asks for the keys in ``path``."""
    controller = Controller(PolicyRuntime.from_text(POLICY), open_store=store_opener(redis_url))
    access = Access(open_keys(path), limiter=Limiter(timeout_s=timeout_s), admin_port=admin_port, local=False)
    with running_gateway(controller=controller, access=access, **more) as live:
        yield live


__all__ = ["CHAT", "bearer", "chat", "entry", "keyed_gateway", "new_key", "write_keys"]
