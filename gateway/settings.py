"""What an operator can set about the HTTP side. Frozen: a running gateway never changes its settings."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

MEBIBYTE = 1024 * 1024


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """Limits of the HTTP side. The engine has its own limits; these only bound what reaches it.

    ``max_concurrent`` sequences are expected to run at once and ``max_queue`` more may wait in the engine's queue;
    what is past both is refused with 429. ``deadline_s`` None means that a request may take as long as it needs.
    A client gets ``header_timeout_s`` from its first byte to the end of the headers (or from connecting to its first
    byte), ``body_timeout_s`` for the body, and is cut off when it has not read its answer for ``stalled_timeout_s``.
    A connection on which nothing is asked for ``keep_alive_s`` is closed. That is to be longer than the load balancer
    in front keeps idle ones: of two that close, the balancer has to be the first, or a request that it sends in that
    moment is lost.
    """

    max_concurrent: int = 32
    max_queue: int = 128
    default_max_tokens: int = 1024
    max_body_bytes: int = 4 * MEBIBYTE
    deadline_s: float | None = None
    drain_timeout_s: float = 30.0
    max_logit_bias: int = 1024
    inline_tokenize_chars: int = 2_048
    max_header_bytes: int = 32 * 1024
    header_timeout_s: float = 10.0
    body_timeout_s: float = 60.0
    stalled_timeout_s: float = 60.0
    keep_alive_s: float = 75.0
    cors_origins: tuple[str, ...] = ()

    @property
    def capacity(self) -> int:
        """Sequences that may be in the engine or waiting for it."""
        return self.max_concurrent + self.max_queue


def is_loopback(host: str) -> bool:
    """Whether binding to ``host`` reaches this machine only. Names other than localhost are not resolved: not local."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
