"""Labelled prompts as JSON lines: read and checked, with errors that name the file, the line and the fix."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.json_lines import objects_of, read_objects

EVAL_DIR = Path(__file__).parent.parent / "assets" / "eval"
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
        examples = [_example(f"{path}:{number}", row) for number, row in read_objects(path, DataError)]
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; give a JSON lines file of labelled prompts") from None
    except OSError as error:
        raise DataError(f"{path}: can't be read ({error.strerror or error}); give a JSON lines file") from error
    if not examples:
        raise DataError(f'{path}: no examples; write lines such as {{"prompt": "...", "label": "code"}}')
    return examples


def shipped_sets() -> dict[str, list[Example]]:
    """The hand-written evaluation sets, which no model trains on."""
    return {path.stem: read_examples(path) for path in sorted(EVAL_DIR.glob("*.jsonl"))}


def read_prompts(name: str, lines: Iterable[bytes | str]) -> Iterator[list[dict[str, Any]] | str]:
    """Unlabelled lines of {"prompt": ...} or {"messages": [...]}, each as `PromptClassifier.classify` takes it.

    Bytes that aren't UTF-8 become replacement characters: one bad line must not end a stream.
    """
    for number, row in objects_of(name, lines, DataError, replace=True):
        yield _request(f"{name}:{number}", row)


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
