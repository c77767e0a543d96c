"""What is wrong with a file of the operator's, told so that it can be mended: file, line, path, and the fix."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

MOST_NAMES = 64


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong. ``line`` counts from 1; ``path`` is such as ``rules[2].when.class``, "" for the whole file."""

    line: int
    path: str
    message: str


class ConfigError(ValueError):
    """A file of the operator's that can't be used. ``problems`` holds all that was found, in the order of the file."""

    def __init__(self, file: str, problems: Iterable[Problem]) -> None:
        self.file = file
        self.problems = tuple(sorted(problems, key=lambda problem: problem.line))
        super().__init__("\n".join(self.lines()))

    def lines(self) -> list[str]:
        """One line per problem, as compilers print them, so that editors can jump there."""
        return [
            f"{self.file}:{each.line}: {each.path + ': ' if each.path else ''}{each.message}" for each in self.problems
        ]


class PolicyError(ConfigError):
    """A policy file that can't be used."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the nearest known one, or all of them."""
    names = sorted(known)
    # Comparing takes its time, and a file may have thousands of names and of words that are none.
    alike = names if len(names) <= MOST_NAMES else [name for name in names if name[:2] == word[:2]][:MOST_NAMES]
    near = difflib.get_close_matches(word[:MOST_NAMES], alike, n=1, cutoff=0.6)
    if near:
        return f"did you mean '{near[0]}'?"
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return f"use one of: {', '.join(names[:MOST_NAMES])}{more}"
