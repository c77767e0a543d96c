"""``validate`` of the operator's files, whichever they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def validate_files(names: Sequence[str], summary: Callable[[str], str]) -> int:
    """Say of each file what ``summary`` of its name says, or why it is refused. Exit status: 1 when any is.

    ``summary`` reads the file and raises :class:`policy.problems.FileError` for one that can't be used.
    """
    from policy.problems import FileError

    refused = False
    for name in names:
        try:
            found = summary(name)
        except FileError as error:
            refused = True
            print("\n".join(error.lines()))
        else:
            print(f"{name}: ok, {found}")
    return int(refused)
