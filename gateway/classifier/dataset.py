"""Labelled prompts as JSON lines: read and checked, with errors that name the file, the line and the fix."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EVAL_DIR = Path(__file__).parent / "assets" / "eval"
ROLES = ("system", "developer", "user", "assistant", "tool")


class DataError(ValueError):
    """A line that can't be used; the message says where it is and how to mend it."""


@dataclass(frozen=True, slots=True)
class Example:
    """One labelled prompt, as (role, content) messages."""

    id: str
    source: str
    licence: str
    label: str
    lang: str
    messages: tuple[tuple[str, str], ...]

    def chat(self) -> list[dict[str, str]]:
        """The messages in the API's form."""
        return [{"role": role, "content": content} for role, content in self.messages]

    def text(self) -> str:
        """All contents in one string, for the bag-of-words baseline."""
        return "\n".join(content for _, content in self.messages)


def read_examples(path: Path) -> list[Example]:
    """The examples of a JSON lines file: "label" and "prompt" or "messages"; source, licence, lang, id are optional."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; give a JSON lines file of labelled prompts") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: can't be read as UTF-8 text ({error}); give a JSON lines file") from error
    examples = [_example(where, row) for where, row in _rows(path, text.split("\n"))]
    if not examples:
        raise DataError(f'{path}: no examples; write lines such as {{"prompt": "...", "label": "code"}}')
    return examples


def shipped_sets() -> dict[str, list[Example]]:
    """The hand-written evaluation sets, which no model trains on."""
    return {path.stem: read_examples(path) for path in sorted(EVAL_DIR.glob("*.jsonl"))}


def read_prompts(name: str, lines: Iterable[str]) -> Iterator[list[dict[str, Any]] | str]:
    """Unlabelled lines of {"prompt": ...} or {"messages": [...]}, each as `PromptClassifier.classify` takes it."""
    for where, row in _rows(name, lines):
        yield _request(where, row)


def _rows(name: Path | str, lines: Iterable[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{name}:{number}"
        try:
            row = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise DataError(f"{where}: not JSON ({error}); write one JSON object a line") from None
        if not isinstance(row, dict):
            raise DataError(f'{where}: {type(row).__name__} instead of an object; write {{"prompt": "..."}}')
        yield where, row


def _request(where: str, row: dict[str, Any]) -> list[dict[str, Any]] | str:
    if ("prompt" in row) == ("messages" in row):
        found = "both" if "prompt" in row else "neither"
        raise DataError(f'{where}: {found} of "prompt" and "messages"; give one of them')
    if "prompt" in row:
        if not isinstance(row["prompt"], str):
            raise DataError(f'{where}: "prompt" is {type(row["prompt"]).__name__}; make it a string')
        return row["prompt"]
    messages = row["messages"]
    if not isinstance(messages, list) or not messages:
        raise DataError(f'{where}: "messages" must be a list of at least one message')
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise DataError(f'{where}: messages[{index}] needs a "role" of {", ".join(ROLES)}')
        if not isinstance(message.get("content"), str | list | None):
            raise DataError(f'{where}: messages[{index}]."content" must be a string or a list of parts')
    return messages


def _example(where: str, row: dict[str, Any]) -> Example:
    request = _request(where, row)
    label = row.get("label")
    if not isinstance(label, str) or not label.strip():
        raise DataError(f'{where}: "label" is missing or not a string; add the class, such as "label": "code"')
    optional = {}
    for name, default in (("id", where), ("source", "data"), ("licence", "unknown"), ("lang", "unknown")):
        value = row.get(name, default)
        if not isinstance(value, str):
            raise DataError(f'{where}: "{name}" is {type(value).__name__}; make it a string or leave it out')
        optional[name] = value
    if isinstance(request, str):
        messages = (("user", request),)
    else:
        contents = [(message["role"], message.get("content")) for message in request]
        if any(not isinstance(content, str) for _, content in contents):
            raise DataError(f'{where}: training messages need string "content"')
        messages = tuple((role, str(content)) for role, content in contents)
    return Example(label=label.strip(), messages=messages, **optional)
