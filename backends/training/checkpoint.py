"""Where a training run stands, in its work folder: written whole or not at all, read only by the run that made it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch


class TrainingError(RuntimeError):
    """Training can't go on; the message says why."""


def write_checkpoint(path: Path, saved: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f".{path.name}.tmp")
    torch.save(dict(saved), staged)
    os.replace(staged, path)


def read_checkpoint(
    path: Path, same: Mapping[str, Any], *, default_options: Mapping[str, Any] | None = None
) -> dict[str, Any] | None:
    """None when there is none.

    Raises :class:`TrainingError` unless everything in ``same`` ("options" and a size of the data) is as it was; options
    from before they existed had their ``default_options``.
    """
    if not path.exists():
        return None
    saved = torch.load(path, weights_only=True, map_location="cpu")
    saved["options"] = {**(default_options or {}), **saved["options"]}
    if any(saved[name] != value for name, value in same.items()):
        raise TrainingError(f"{path} was made with other options or answers; delete it or drop --resume")
    return saved
