"""The version that is installed."""

from __future__ import annotations

from functools import cache
from importlib import metadata


@cache
def package_version() -> str:
    """As the installed distribution says it; a checkout that was never installed has none."""
    try:
        return metadata.version("medusa-gateway")
    except metadata.PackageNotFoundError:
        return "0+unknown"
