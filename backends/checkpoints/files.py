"""The tensors of a heads checkpoint, read without trust: pickles only as tensors, of a whole model only the heads."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from backends.heads.format import WEIGHTS_FILE
from backends.heads.module import HeadsError
from backends.models.fetch import FetchError, fetch_heads

# In the order in which they are looked for: a folder may hold the same heads twice, or the backbone beside them.
_FILES = (
    WEIGHTS_FILE,
    "medusa_lm_head.safetensors",
    "medusa_lm_head.pt",
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


@dataclass(frozen=True, slots=True)
class HeadsFiles:
    """``tensors``: those that ``wanted`` took, by name. ``others``: names of the rest, in ``parts``.

    ``bytes``: size of the tensors taken.
    """

    folder: Path
    name: str
    tensors: dict[str, torch.Tensor]
    others: tuple[str, ...]
    parts: tuple[Path, ...]
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def resolve_folder(name: str) -> Path:
    """A local folder, or the snapshot of a hub id. Raises :class:`HeadsError` saying what to do."""
    path = Path(name)
    if path.is_file():
        raise HeadsError(f"{name} is a file; give the folder that it is in")
    try:
        return fetch_heads(name)
    except FetchError as error:
        raise HeadsError(
            f"heads {name!r} are neither a local folder nor to be had from the hub ({error}); without a network, "
            f"bring them once with: medusa-gateway fetch --heads {name}"
        ) from None


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json`` as it is; empty when there is none. Told, not trusted."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def read_heads_files(
    folder: Path, wanted: Callable[[str], bool], *, safe_only: bool = False, left: dict[str, list[str]] | None = None
) -> HeadsFiles | None:
    """The first file of ``folder`` that holds tensors which ``wanted`` takes by name; None when no file does.

    ``safe_only``: look into safetensors only, whose names can be read without the weights. ``left`` is given the names
    of tensors in files that hold none that are wanted.

    Raises :class:`HeadsError` for a file that is broken, or that holds code instead of tensors.
    """
    for name in _FILES:
        path = folder / name
        if not path.is_file() or (safe_only and name.removesuffix(".index.json").endswith((".pt", ".bin"))):
            continue
        parts = _shards(path) if name.endswith(".json") else (path,)
        tensors: dict[str, torch.Tensor] = {}
        others: list[str] = []
        for part in parts:
            read = _read_safetensors if part.suffix == ".safetensors" else _read_pickle
            found, rest = read(part, wanted)
            tensors |= found
            others += rest
        if tensors:
            return HeadsFiles(folder, name, tensors, tuple(others), parts, read_config(folder))
        if left is not None:
            left[name] = others
    return None


def _shards(index: Path) -> tuple[Path, ...]:
    try:
        content = json.loads(index.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise HeadsError(f"{index} can't be read as JSON: {error}") from None
    files = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise HeadsError(f"{index} is not an index of shards: weight_map must name a file for every tensor")
    # A name must not lead out of the folder.
    return tuple(index.parent / name for name in sorted({Path(name).name for name in files.values()}))


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except OSError as error:
        raise HeadsError(f"{path} can't be read: {error}") from None
    except SafetensorError as error:
        raise HeadsError(f"{path} is not a safetensors file: {error}") from None


def _read_safetensors(path: Path, wanted: Callable[[str], bool]) -> tuple[dict[str, torch.Tensor], list[str]]:
    with _opened(path) as file:
        names = list(file.keys())
        return {name: file.get_tensor(name) for name in names if wanted(name)}, [n for n in names if not wanted(n)]


def _read_pickle(path: Path, wanted: Callable[[str], bool]) -> tuple[dict[str, torch.Tensor], list[str]]:
    try:
        # weights_only: a pickle can name any function to be called; this reader calls none but tensors' own.
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise HeadsError(f"{path} holds more than tensors; code in a checkpoint is never run") from None
    except Exception as error:  # a damaged pickle raises whatever its next byte leads to
        raise HeadsError(f"{path} can't be read: {str(error).splitlines()[0] if str(error) else error!r}") from None
    if not isinstance(content, dict):
        raise HeadsError(f"{path} is not a dictionary of tensors: its type is {type(content).__name__}")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise HeadsError(
                f"{path} is not a dictionary of tensors: {name!r} is of type {type(value).__name__}; save the tensors "
                "alone, under names"
            )
    return {n: t for n, t in content.items() if wanted(n)}, [n for n in content if not wanted(n)]


def first_values(parts: Iterable[Path], names: Iterable[str], count: int) -> dict[str, torch.Tensor]:
    """The first ``count`` values of tensors in safetensors files, in bfloat16; names that are in none are left out."""
    wanted, found = set(names), {}
    for part in parts:
        if part.suffix != ".safetensors":
            continue
        with _opened(part) as file:
            for name in wanted & set(file.keys()):
                piece = file.get_slice(name)
                shape = piece.get_shape()
                row = 1
                for size in shape[1:]:
                    row *= size
                rows = piece[: -(-count // max(row, 1))] if shape else file.get_tensor(name)
                found[name] = rows.reshape(-1)[:count].to(torch.bfloat16)
    return found
