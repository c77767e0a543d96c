"""Long pastes for training: made-up material of many kinds, with what is asked about it before, after or inside.

The label follows what is asked, never the material, so that a model learns to look for the asking line.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence

Slots = Mapping[str, Sequence[str]]

POSITIONS = ("end",) * 10 + ("start",) * 7 + ("middle",) * 3
_LEADS = ("", "", "", "", "Text:\n", "Context:\n", "---\n", '"""\n', "<document>\n")
_QUESTION_LEADS = ("", "", "", "", "", "Question: ", "Task: ", "Q: ", "-> ", "---\n")
_WORDS = ("depth", "north", "lamp", "order", "mill", "port", "april", "team", "unit", "oak", "salt", "ferry", "total")


def paste(slots: Slots, fill: Callable[[str], str], snippets: Sequence[str], rng: random.Random) -> str:
    """Some material, from two lines to about 6,000 characters; `fill` expands templates."""
    kinds = ("prose",) * 8 + ("story",) * 3 + ("mails", "passages", "passages", "csv", "log", "code", "code", "calls")
    kind = rng.choice(kinds)
    if kind == "csv":
        return _csv(rng)
    if kind == "log":
        return _log(rng)
    if kind == "code":
        return "\n\n".join(rng.choice(snippets) for _ in range(rng.choice((1, 2, 4, 8))))
    if kind == "calls":
        return _calls(slots, fill, rng)
    count = rng.choice((4, 8, 8, 16, 16, 30, 60))
    sentences = [_sentence(slots, fill, rng, story=kind == "story") for _ in range(count)]
    if kind == "passages":
        return " ".join(f"[{i}] {text}" for i, text in enumerate(sentences, 1))
    if kind == "mails":
        names = [rng.choice(slots["name"]) for _ in range(2)]
        mails = [" ".join(sentences[i : i + 4]) for i in range(0, count, 4)]
        return "\n\n".join(f"From: {names[i % 2]}\nSubject: Re: {rng.choice(_WORDS)}\n{m}" for i, m in enumerate(mails))
    gap = rng.choice(("\n", "\n\n", "\n\n", " "))
    size = rng.choice((3, 5, 8))
    return gap.join(" ".join(sentences[i : i + size]) for i in range(0, count, size))


def place(material: str, ask: str, rng: random.Random) -> str:
    """Puts `ask` before, behind or into the material."""
    position = rng.choice(POSITIONS)
    gap = rng.choice(("\n\n", "\n\n", "\n\n", "\n", " ")) if position != "middle" else "\n\n"
    if position == "end":
        return f"{rng.choice(_LEADS)}{material}{gap}{rng.choice(_QUESTION_LEADS)}{ask}"
    if position == "start":
        return f"{ask}{gap}{rng.choice(_LEADS)}{material}"
    lines = material.split("\n") if "\n" in material else material.split(". ")
    joint = "\n" if "\n" in material else ". "
    half = rng.randint(1, max(1, len(lines) - 1))
    return f"{joint.join(lines[:half])}{gap}{ask}{gap}{joint.join(lines[half:])}"


def _sentence(slots: Slots, fill: Callable[[str], str], rng: random.Random, story: bool) -> str:
    if "clause" not in slots or rng.random() < 0.15:
        return rng.choice(slots["sentence" if story else "article"])
    text = fill(f"{rng.choice(slots['subject'])} {rng.choice(slots['verb'])} {rng.choice(slots['clause'])}")
    if text[0] >= "\u3400":  # Chinese is written without spaces
        return f"{text.replace(' ', '')}。"
    if rng.random() < 0.1:
        return f"{text}?"
    if story and rng.random() < 0.3:
        return f"\u201c{text}\u201d, {rng.choice(slots['name'])}."
    return f"{text}."


def _csv(rng: random.Random) -> str:
    separator = rng.choice((",", ",", ";", " | ", "\t"))
    head = rng.sample(_WORDS, rng.randint(2, 5))
    rows = [[rng.choice(_WORDS), *(str(rng.randint(1, 999)) for _ in head[1:])] for _ in range(rng.randint(2, 60))]
    return "\n".join(separator.join(row) for row in [head, *rows])


def _log(rng: random.Random) -> str:
    states = ("INFO", "INFO", "WARN", "ERROR", "DEBUG")
    ends = ("done", "timeout after 30 s", "retry 2 of 5", "user not found", "queue 12", "connection refused", "200 OK")
    return "\n".join(
        f"2025-0{rng.randint(1, 9)}-{rng.randint(10, 28)} {rng.randint(10, 23)}:{rng.randint(10, 59)}"
        f" {rng.choice(states)} {rng.choice(_WORDS)}: {rng.choice(ends)}"
        for _ in range(rng.randint(3, 50))
    )


def _calls(slots: Slots, fill: Callable[[str], str], rng: random.Random) -> str:
    """The transcript of an agent's calls and what they gave."""
    lines = [rng.choice(("Tools:", "You can use these tools:", "# Tools", "Available functions:"))]
    lines += [f"- {rng.choice(slots['tool'])}" for _ in range(rng.randint(1, 4))] if "tool" in slots else []
    for _ in range(rng.randint(1, 6)):
        name = rng.choice(("search", "get_weather", "find", "book", "mail", "lookup"))
        call = json.dumps({rng.choice(("query", "day", "name")): rng.choice(_WORDS)})
        found = _sentence(slots, fill, rng, story=False)
        result = json.dumps({rng.choice(("result", "text", "error")): found}, ensure_ascii=False)
        lines += rng.choice(([f"> {name}({call})", result], [f"tool: {name} {call}", f"result: {result}"]))
    return "\n".join(lines)
