"""A file of the operator's that is read again while the gateway runs: taken over as a whole, or not at all."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, Literal, Protocol, TypeVar

from policy.background import PatientCall
from policy.config.problems import ConfigError, Problem

logger = logging.getLogger("gateway")

Outcome = Literal["unchanged", "settling", "accepted", "rejected", "hangs"]


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
        """``parse`` gets content and name, and raises :class:`ConfigError`, as this does.

        ``path`` None: not watched.
        """
        self.value = parse(content, name)
        self.content = content
        self.path = path
        self.status = FileStatus(name, self.value.version, wall_time)
        self._parse = parse
        self._read = read_regular
        self._taken = _digest(content)
        self._candidate: str | None = None

    def poll(self, wall_time: float) -> Outcome:
        """Look at the file once; may be called in a thread, but from one at a time.

        New content is taken when two polls in a row have seen the same: an editor that writes in place is let finish.
        """
        if self.path is None:
            return "unchanged"
        try:
            content = self._read(self.path)
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
                raise ConfigError(str(self.path), [Problem(1, "", digest)])
            value = self._parse(content, str(self.path))
        except ConfigError as error:
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


class FileWatch(Generic[V]):
    """Polls a file from an event loop, which a file system that hangs neither holds up nor keeps from ending.

    ``clock`` is monotonic.
    """

    def __init__(
        self, file: WatchedFile[V], clock: Callable[[], float], wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._file = file
        self._told = False
        # In a thread, since a file may lie on a network and YAML takes its time.
        self._poll: PatientCall[Outcome] = PatientCall(lambda: file.poll(wall_clock()), clock=clock)

    async def poll(self) -> Outcome:
        """See :meth:`WatchedFile.poll`; "hangs": the file can't be read, and nothing changes until it can.

        That it hangs is logged once, and so is its end.
        """
        status = self._file.status
        try:
            outcome = await self._poll()
        except TimeoutError:
            if not self._told:
                logger.error("%s can't be read, its file system hangs; %s stays in force", status.file, status.version)
            self._told = True
            return "hangs"
        if self._told:
            logger.warning("%s can be read again", status.file)
        self._told = False
        return outcome

    @property
    def hangs(self) -> bool:
        """Whether the file can't be read now."""
        return self._poll.hangs_s is not None

    def problem(self, what: str) -> str | None:
        """That the file can't be read, in words for everybody; ``what`` names it."""
        hangs_s = self._poll.hangs_s
        return None if hangs_s is None else f"{what} can't be read for {hangs_s:.0f} s; the last one stays in force"


def read_regular(path: Path) -> bytes:
    """The content of a file, or of what a link leads to. Raises OSError, also for a FIFO or a device: those give what
    they have once, or nothing for ever, and can't be watched."""
    # Opening a FIFO would wait for its writer; not blocking changes nothing for a regular file.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "device")
            raise OSError(errno.EINVAL, f"is a {kind}; it must be a regular file, or a link to one", str(path))
        with open(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)


_KINDS = ((stat.S_ISFIFO, "FIFO"), (stat.S_ISSOCK, "socket"), (stat.S_ISDIR, "folder"))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
