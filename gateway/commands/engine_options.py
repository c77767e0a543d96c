"""Options that several commands take alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from backends.hub import is_path


def folder_or_id(text: str) -> str:
    """An argparse type. A folder that is not there is told at once, before torch is loaded to look for it."""
    from gateway.cli import CommandError

    if problem := no_such_folder(text):
        raise CommandError(problem)
    return text


def no_such_folder(name: str) -> str | None:
    """What is wrong with the name of a model or of heads, if it can't be an id of the hub and is no folder either."""
    if not is_path(name) or Path(name).is_dir():
        return None
    return f"{name} is a file; name its folder" if Path(name).exists() else f"there is no folder {name}"


_OPTIONS: dict[str, dict[str, Any]] = {
    "--model": {
        "type": folder_or_id,
        "metavar": "DIR_OR_ID",
        "help": "local folder or hub id; default: the demo model",
    },
    "--heads": {
        "type": folder_or_id,
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
