"""Options that several commands take alike."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


_OPTIONS: dict[str, dict[str, Any]] = {
    "--model": {
        "action": FolderOrId,
        "metavar": "DIR_OR_ID",
        "help": "local folder or hub id; default: the demo model",
    },
    "--heads": {
        "action": FolderOrId,
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
