"""Options that several commands take alike."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from backends.engine.options import ABOUT, DEFAULTS, EngineOptions
from backends.models.hub import is_path
from gateway.commands.errors import CommandError


class FolderOrId(argparse.Action):
    """Keeps the name of a folder, or an id of the hub, and that :func:`refuse_missing_folders` is to look at it."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, values)
        namespace.may_be_folders = [*getattr(namespace, "may_be_folders", ()), values]


def refuse_missing_folders(args: argparse.Namespace) -> None:
    """Tell at once, before torch is loaded to look for it, of a folder that is not there. Raises CommandError.

    Parsing a command line looks at no disk, so this is called behind it.
    """
    for name in getattr(args, "may_be_folders", ()):
        if problem := no_such_folder(name):
            raise CommandError(problem)


def no_such_folder(name: str) -> str | None:
    """What is wrong with the name of a model or of heads, if it can't be an id of the hub and is no folder either."""
    if not is_path(name) or Path(name).is_dir():
        return None
    return f"{name} is a file; name its folder" if Path(name).exists() else f"there is no folder {name}"


def whole(low: int, high: int) -> Callable[[str], int]:
    """An argparse type: a whole number within limits."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text} is not between {low:g} and {high:g}")
        return value

    return read


_BY_FLAG = {about.flag: name for name, about in ABOUT.items() if about.flag}


def add_engine_options(add: Callable[..., object], *flags: str) -> None:
    """``add``: the ``add_argument`` of a parser or group; ``flags``: of :data:`backends.engine.options.ABOUT`."""
    for flag in flags:
        about, default = ABOUT[_BY_FLAG[flag]], DEFAULTS[_BY_FLAG[flag]]
        if about.switch:
            add(flag, action="store_true", help=about.help)
        elif about.choices:
            add(flag, choices=about.choices, default=default, help=about.help)
        elif about.limits is not None:
            add(flag, type=whole(*about.limits), metavar=about.metavar, default=default, help=about.help)
        elif about.in_file:
            # What both can name is a folder or something of the hub.
            add(flag, action=FolderOrId, metavar=about.metavar, default=default, help=about.help)
        else:
            add(flag, metavar=about.metavar, default=default, help=about.help)


def given_options(args: argparse.Namespace) -> EngineOptions:
    """Those that the command has flags for; the others have their defaults."""
    found = {name: flag.removeprefix("--").replace("-", "_") for flag, name in _BY_FLAG.items()}
    return EngineOptions(**{name: getattr(args, dest) for name, dest in found.items() if hasattr(args, dest)})
