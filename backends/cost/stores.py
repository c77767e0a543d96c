"""Where cost tables lie between starts: a folder of this user's, and whatever else keeps texts by key."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Protocol

import platformdirs

_MOST_BYTES = 1 << 20


class CostStore(Protocol):
    """Texts by key. Both calls may block for seconds, and raise OSError when the store can't be had."""

    def load(self, key: str) -> str | None:
        """None: there is none."""
        ...

    def save(self, key: str, text: str) -> None: ...


class FolderStore:
    """A file for each key, replaced as a whole: a reader sees one table or the other, never a half."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __str__(self) -> str:
        return str(self._folder)

    @classmethod
    def of_user(cls) -> FolderStore:
        return cls(Path(platformdirs.user_cache_dir("medusa-gateway")) / "cost-tables")

    def load(self, key: str) -> str | None:
        try:
            with open(self._path(key), "rb") as file:
                return file.read(_MOST_BYTES).decode("utf-8", "replace")
        except FileNotFoundError:
            return None

    def save(self, key: str, text: str) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=self._folder, delete=False) as file:
            try:
                file.write(text)
                file.close()
                os.replace(file.name, self._path(key))
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}.json"
