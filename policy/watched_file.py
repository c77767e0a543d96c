"""A file of the operator's that is read again while the gateway runs: taken over as a whole, or not at all."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, Literal, Protocol, TypeVar

from policy.problems import FileError, Problem

Outcome = Literal["unchanged", "settling", "accepted", "rejected"]


class Versioned(Protocol):
    """What a file is read as. ``version`` names its content."""

    @property
    def version(self) -> str: ...


V = TypeVar("V", bound=Versioned)


@dataclass(frozen=True, slots=True)
class Rejection:
    """The last version of the file that was refused. ``at``: wall clock."""

    problems: tuple[str, ...]
    at: float
    digest: str


@dataclass(frozen=True, slots=True)
class FileStatus:
    """``loaded_at``: wall clock. ``rejection`` None: what lies in the file is what is in force."""

    file: str
    version: str
    loaded_at: float
    accepted: int = 1
    rejected: int = 0
    rejection: Rejection | None = None


class WatchedFile(Generic[V]):
    """``value`` is replaced in one assignment; who has read it keeps its version for as long as he likes.

    :meth:`poll` opens the path anew and compares contents: a ConfigMap or Secret volume swaps a symlink above the file,
    editors rename a new file over it, and both can leave time, size and even inode as they were.
    """

    def __init__(
        self,
        parse: Callable[[bytes, str], V],
        content: bytes,
        name: str,
        path: Path | None = None,
        wall_time: float = 0.0,
    ) -> None:
        """``parse`` gets content and name, and raises :class:`FileError`, as this does. ``path`` None: not watched."""
        self.value = parse(content, name)
        self.content = content
        self.path = path
        self.status = FileStatus(name, self.value.version, wall_time)
        self._parse = parse
        self._taken = _digest(content)
        self._candidate: str | None = None

    def poll(self, wall_time: float) -> Outcome:
        """Look at the file once; may be called in a thread, but from one at a time.

        New content is taken when two polls in a row have seen the same: an editor that writes in place is let finish.
        """
        if self.path is None:
            return "unchanged"
        try:
            content = self.path.read_bytes()
        except OSError as error:
            content, digest = None, f"unreadable: {error.strerror or error}"
        else:
            digest = _digest(content)
        rejection = self.status.rejection
        if digest == self._taken:
            self._candidate = None
            if rejection is not None:
                self.status = replace(self.status, rejection=None)
            return "unchanged"
        if rejection is not None and digest == rejection.digest:
            return "unchanged"
        if digest != self._candidate:
            self._candidate = digest
            return "settling"
        self._candidate = None
        try:
            if content is None:
                raise FileError(str(self.path), [Problem(1, "", digest)])
            value = self._parse(content, str(self.path))
        except FileError as error:
            refused = Rejection(tuple(error.lines()), wall_time, digest)
            self.status = replace(self.status, rejected=self.status.rejected + 1, rejection=refused)
            return "rejected"
        self.content, self._taken = content, digest
        self.status = replace(
            self.status,
            version=value.version,
            loaded_at=wall_time,
            accepted=self.status.accepted + 1,
            rejection=None,
        )
        self.value = value
        return "accepted"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
