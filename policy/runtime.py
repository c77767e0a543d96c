"""The policy in force, and the file it comes from: watched, taken over as a whole, and kept when an edit is broken."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from policy.format import default_policy, parse_policy
from policy.problems import PolicyError, Problem
from policy.spec import PolicySpec

EMBEDDED = "embedded default"
Outcome = Literal["unchanged", "settling", "accepted", "rejected"]


@dataclass(frozen=True, slots=True)
class Rejection:
    """The last version of the file that was refused. ``at``: wall clock."""

    problems: tuple[str, ...]
    at: float
    digest: str


@dataclass(frozen=True, slots=True)
class PolicyStatus:
    """``loaded_at``: wall clock. ``rejection`` None: what lies in the file is what is in force."""

    file: str
    version: str
    loaded_at: float
    accepted: int = 1
    rejected: int = 0
    rejection: Rejection | None = None


class PolicyRuntime:
    """``spec`` is replaced in one assignment; a request that has read it keeps its version to the end.

    :meth:`poll` opens the path anew and compares contents: a ConfigMap volume swaps a symlink above the file, editors
    rename a new file over it, and both can leave time, size and even inode as they were.
    """

    def __init__(self, spec: PolicySpec, content: bytes, path: Path | None, wall_time: float) -> None:
        self.spec = spec
        self.content = content
        self.path = path
        self.status = PolicyStatus(spec.file, spec.version, wall_time)
        self._taken = _digest(content)
        self._candidate: str | None = None

    @classmethod
    def embedded(cls, wall_time: float = 0.0) -> PolicyRuntime:
        content = default_policy()
        return cls(parse_policy(content, EMBEDDED), content, None, wall_time)

    @classmethod
    def from_text(cls, content: bytes, wall_time: float = 0.0) -> PolicyRuntime:
        """A policy without a file to watch."""
        return cls(parse_policy(content, "policy"), content, None, wall_time)

    @classmethod
    def open(cls, path: Path, wall_time: float = 0.0) -> PolicyRuntime:
        """Raises OSError or :class:`PolicyError`: a gateway doesn't start with a policy that it can't read."""
        content = path.read_bytes()
        return cls(parse_policy(content, str(path)), content, path, wall_time)

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
                raise PolicyError(str(self.path), [Problem(1, "", digest)])
            spec = parse_policy(content, str(self.path))
        except PolicyError as error:
            refused = Rejection(tuple(error.lines()), wall_time, digest)
            self.status = replace(self.status, rejected=self.status.rejected + 1, rejection=refused)
            return "rejected"
        self.content, self._taken = content, digest
        self.status = replace(
            self.status,
            version=spec.version,
            loaded_at=wall_time,
            accepted=self.status.accepted + 1,
            rejection=None,
        )
        self.spec = spec
        return "accepted"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
