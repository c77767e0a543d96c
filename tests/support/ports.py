"""Ports for programs that can't choose one themselves."""

from __future__ import annotations

import random
import socket
from itertools import count

_LOWEST, _HIGHEST = 20_000, 32_000
"""Below the ports that systems give to those who ask for any, so nobody else comes by one in the meantime."""
_turn = count(random.Random().randrange(_HIGHEST - _LOWEST))


def free_port() -> int:
    """One of loopback that nobody listens on now. A process gets each once, and begins at a random place, as others run
    tests beside it.

    Raises RuntimeError where all are taken.
    """
    for _ in range(_HIGHEST - _LOWEST):
        port = _LOWEST + next(_turn) % (_HIGHEST - _LOWEST)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"no port from {_LOWEST} to {_HIGHEST} is free on 127.0.0.1")
