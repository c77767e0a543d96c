"""The key that an upstream is sent, from where the operator said."""

from __future__ import annotations

import os
from pathlib import Path

from gateway.routing.spec import UpstreamSpec
from policy.config.watched_file import read_regular


class ApiKeyError(ValueError):
    """The key for an upstream can't be had; the message names variable or file, never the key."""


def read_api_key(spec: UpstreamSpec) -> str | None:
    """The key, from where the operator said; None if nowhere. Raises :class:`ApiKeyError`."""
    if spec.api_key_env is not None:
        where, key = f"the environment variable {spec.api_key_env}", os.environ.get(spec.api_key_env, "")
    elif spec.api_key_file is not None:
        where = spec.api_key_file
        try:
            key = read_regular(Path(spec.api_key_file)).decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ApiKeyError(f"can't read {where}: {error}") from None
    else:
        return None
    key = key.strip()
    if not key:
        raise ApiKeyError(f"{where} is not set or empty")
    if not (key.isascii() and key.isprintable()):
        raise ApiKeyError(f"{where} holds something that is no key: it must be one line of printable ASCII")
    return key
