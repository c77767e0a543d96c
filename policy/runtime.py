"""The policy in force, and the file it comes from."""

from __future__ import annotations

from pathlib import Path

from policy.config.watched_file import WatchedFile, read_regular
from policy.file.format import default_policy, parse_policy
from policy.spec import PolicySpec

EMBEDDED = "embedded default"


class PolicyRuntime(WatchedFile[PolicySpec]):
    """A request that has read ``spec`` keeps its version to the end."""

    @property
    def spec(self) -> PolicySpec:
        return self.value

    @classmethod
    def embedded(cls, wall_time: float = 0.0) -> PolicyRuntime:
        return cls(parse_policy, default_policy(), EMBEDDED, wall_time=wall_time)

    @classmethod
    def from_text(cls, content: bytes, wall_time: float = 0.0) -> PolicyRuntime:
        """A policy without a file to watch."""
        return cls(parse_policy, content, "policy", wall_time=wall_time)

    @classmethod
    def open(cls, path: Path, wall_time: float = 0.0) -> PolicyRuntime:
        """Raises OSError or PolicyError: a gateway doesn't start with a policy that it can't read."""
        return cls(parse_policy, read_regular(path), str(path), path, wall_time)
