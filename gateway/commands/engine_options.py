"""Options that several commands take alike."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from backends.hub import is_path


class FolderOrId(str):
    """The value of an option that names a folder or an id of the hub. ``cli.main`` has it checked before the command
    runs; parsing a command line looks at no disk."""


def refuse_missing_folders(args: argparse.Namespace) -> None:
    """Tell at once, before torch is loaded to look for it, of a folder that is not there. Raises CommandError."""
    from gateway.cli import CommandError

    for value in vars(args).values():
        if isinstance(value, FolderOrId) and (problem := no_such_folder(value)):
            raise CommandError(problem)


def no_such_folder(name: str) -> str | None:
    """What is wrong with the name of a model or of heads, if it can't be an id of the hub and is no folder either."""
    if not is_path(name) or Path(name).is_dir():
        return None
    return f"{name} is a file; name its folder" if Path(name).exists() else f"there is no folder {name}"


_OPTIONS: dict[str, dict[str, Any]] = {
    "--model": {
        "type": FolderOrId,
        "metavar": "DIR_OR_ID",
        "help": "local folder or hub id; default: the demo model",
    },
    "--heads": {
        "type": FolderOrId,
        "metavar": "DIR_OR_ID",
        "help": "Medusa heads; default: those that belong to the model",
    },
    "--device": {"choices": ("auto", "cpu", "cuda"), "default": "auto", "help": "default: %(default)s"},
    "--dtype": {"choices": ("auto", "bfloat16", "float32"), "default": "auto", "help": "default: %(default)s"},
    "--quantize": {
        "choices": ("int8", "int4"),
        "help": "weights of the linear layers, through torchao (int4: with --dtype bfloat16); default: as they are",
    },
    "--runner": {"choices": ("auto", "native", "transformers"), "default": "auto", "help": "default: %(default)s"},
}


def add_engine_options(add: Callable[..., object], *names: str) -> None:
    """``add``: the ``add_argument`` of a parser or group."""
    for name in names:
        add(name, **_OPTIONS[name])
