"""Names in conditions: exact ones, and patterns."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Names:
    """Exact names, and patterns with ``*``."""

    exact: frozenset[str]
    pattern: re.Pattern[str] | None = None

    @classmethod
    def of(cls, names: tuple[str, ...]) -> Names:
        patterns = [".*".join(map(re.escape, name.split("*"))) for name in names if "*" in name]
        exact = frozenset(name for name in names if "*" not in name)
        return cls(exact, re.compile("|".join(patterns), re.DOTALL) if patterns else None)

    def holds(self, name: str) -> bool:
        return name in self.exact or (self.pattern is not None and self.pattern.fullmatch(name) is not None)
