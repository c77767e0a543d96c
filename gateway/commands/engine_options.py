"""Options that several commands take alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_OPTIONS: dict[str, dict[str, Any]] = {
    "--model": {"metavar": "DIR_OR_ID", "help": "local folder or hub id; default: the demo model"},
    "--heads": {"metavar": "DIR_OR_ID", "help": "Medusa heads; default: those that belong to the model"},
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
