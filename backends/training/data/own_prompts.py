"""Prompts to distil from: patterns filled from the lists in ``backends/assets/own_prompts``, written for this project.

Public prompt collections are thin where people ask most: plain questions about the world, everyday advice, small pieces
of code. What is in :mod:`backends.bench.prompts` is left out here, topics included, so that benchmarks stay unseen.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from importlib import resources
from typing import Any

LANGUAGES = ("Python", "JavaScript", "Java", "C++", "Go", "Rust", "PHP")

FORMS = (
    "Write a short story about {}.",
    "Write a poem about {}.",
    "Write the first paragraph of a novel about {}.",
    "Write a fairy tale about {}.",
    "Write a short dialogue about {}.",
    "Write a song about {}.",
    "Write a letter about {}.",
    "Describe a scene with {} in vivid language.",
)

_CHAT_PATTERNS = (
    (
        "concepts",
        (
            "What is {}?",
            "Explain {} in simple words.",
            "How does {} work?",
            "Why does {} matter?",
            "Tell me some facts about {}.",
        ),
    ),
    ("pairs", ("What is the difference between {}?", "Compare {}.")),
    (
        "advice",
        (
            "How can I {}?",
            "Give me a few tips on how to {}.",
            "I want to {}. Where should I start?",
            "What mistakes should I avoid when I {}?",
        ),
    ),
    (
        "places",
        ("What is {} famous for?", "Plan a weekend in {} for me.", "When is the best time to visit {}, and why?"),
    ),
    ("events", ("What were the causes of {}?", "Tell me about {}.", "Why was {} important?")),
    ("questions", ("{}", "{} Explain it to a child.")),
)


def own_prompts() -> list[dict[str, Any]]:
    """Records with id, label and prompt, as ``heads answers`` and ``heads train`` read them; always in one order."""
    records = [
        {"id": f"own-{label}-{number}", "label": label, "prompt": prompt, "source": "own", "licence": "Apache-2.0"}
        for label, prompts in (("chat", _chat()), ("code", _code()), ("creative", _creative()))
        for number, prompt in enumerate(dict.fromkeys(prompts))
    ]
    random.Random(0).shuffle(records)
    return records


def _items(name: str) -> list[str]:
    """A list of ``backends/assets/own_prompts``: one item a line."""
    text = resources.files("backends").joinpath(f"assets/own_prompts/{name}.txt").read_text(encoding="utf-8")
    return text.splitlines()


def _chat() -> Iterator[str]:
    for name, patterns in _CHAT_PATTERNS:
        for item in _items(name):
            for pattern in patterns:
                yield pattern.format(item)


def _code() -> Iterator[str]:
    tasks = _items("code_tasks")
    for number, task in enumerate(tasks):
        for offset in (0, 1, 3):
            language = "Python" if offset == 0 else LANGUAGES[(number + offset) % len(LANGUAGES)]
            what = "program" if task.startswith(("plays", "prints", "draws", "simulates")) else "function"
            yield f"Write a {language} {what} that {task}."
    yield from _items("code_requests")


def _creative() -> Iterator[str]:
    for subject in _items("subjects"):
        for form in FORMS:
            yield form.format(subject)
