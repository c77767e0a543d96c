"""``validate`` of the operator's files, whichever they are."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path


def read_input(name: str) -> bytes:
    """The content of a file; of standard input for ``-``. Raises OSError."""
    return sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()


def validate_files(names: Sequence[str], summary: Callable[[str], str]) -> int:
    """Say of each file what ``summary`` of its name says, or why it is refused. Exit status: 1 when any is.

    ``summary`` reads the file and raises :class:`policy.config.problems.ConfigError` for one that can't be used.
    """
    from policy.config.problems import ConfigError

    refused = False
    for name in names:
        try:
            found = summary(name)
        except ConfigError as error:
            refused = True
            print("\n".join(error.lines()))
        else:
            print(f"{name}: ok, {found}")
    return int(refused)
