"""Which answers are worth training on. Held-out answers are never dropped: evaluations must stay comparable."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from backends.training.data.dataset import Answer

_NGRAM = 4
# A class with a smaller share than this does not set the size of the others.
_RARE_CLASS = 0.05


@dataclass(frozen=True, slots=True)
class CleaningOptions:
    """``min_tokens``: shorter answers are dropped. ``max_repetition``: so are those of which a larger share of
    4-grams has occurred before in the same answer. ``balance``: a class may have at most so many times the answers of
    the smallest (classes under 5% of all don't count as smallest); 0 leaves classes as they are.
    """

    min_tokens: int = 8
    max_repetition: float = 0.6
    balance: float = 4.0


@dataclass(frozen=True, slots=True)
class CleaningReport:
    """Answers ``kept`` and ``dropped`` by reason, and what is left of each class."""

    kept: int
    dropped: dict[str, int]
    by_class: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {"kept": self.kept, "dropped": self.dropped, "by_class": self.by_class}

    @property
    def reasons(self) -> str:
        return ", ".join(f"{count} {reason}" for reason, count in self.dropped.items())

    def __str__(self) -> str:
        classes = ", ".join(f"{label} {count}" for label, count in sorted(self.by_class.items()))
        return f"{self.kept} answers to train on ({classes}); dropped: {self.reasons}"


def repetition(tokens: Sequence[int]) -> float:
    """Share of an answer's 4-grams that have occurred before in it: 0 for none, near 1 for a loop."""
    grams = [tuple(tokens[i : i + _NGRAM]) for i in range(len(tokens) - _NGRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def dropped_answers(answers: Sequence[Answer], options: CleaningOptions) -> tuple[frozenset[int], CleaningReport]:
    """Indices of training answers to leave out, and the counts. The same answers give the same choice.

    Of duplicates (equal prompt and answer tokens) the first stays. To balance classes, the answers with the highest
    hash of prompt and answer go.
    """
    dropped: dict[int, str] = {}
    seen: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
    for index, answer in enumerate(answers):
        if answer.held_out:
            continue
        content = (answer.prompt_ids, answer.answer_ids)
        if len(answer.answer_ids) < options.min_tokens:
            dropped[index] = "short"
        elif content in seen:
            dropped[index] = "duplicate"
        elif repetition(answer.answer_ids) > options.max_repetition:
            dropped[index] = "repetitive"
        seen.add(content)
    classes: dict[str, list[int]] = {}
    for index, answer in enumerate(answers):
        if not answer.held_out and index not in dropped:
            classes.setdefault(answer.label or "unlabelled", []).append(index)
    for index in _surplus(classes, answers, options.balance):
        dropped[index] = "surplus of its class"
    counts = Counter(dropped.values())
    remaining = {label: sum(i not in dropped for i in members) for label, members in classes.items()}
    reasons = ("short", "duplicate", "repetitive", "surplus of its class")
    report = CleaningReport(sum(remaining.values()), {reason: counts[reason] for reason in reasons}, remaining)
    return frozenset(dropped), report


def _surplus(classes: dict[str, list[int]], answers: Sequence[Answer], balance: float) -> list[int]:
    total = sum(map(len, classes.values()))
    common = [len(members) for members in classes.values() if len(members) >= _RARE_CLASS * total]
    if not balance or not common:
        return []
    most = max(1, int(balance * min(common)))

    def order(index: int) -> bytes:
        return hashlib.sha256(repr((answers[index].id, answers[index].answer_ids)).encode()).digest()

    return [index for members in classes.values() for index in sorted(members, key=order)[most:]]
