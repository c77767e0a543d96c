"""Files of prompts for benchmarks: JSON lines, each a prompt and its category.

Public benchmarks of speculative decoding come in this form: Spec-Bench with ``category`` and ``turns``, others with
``prompt`` or ``text``. They are never shipped; ``medusa-gateway bench prompts SOURCE`` brings one from
where its user says.
"""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

_MOST_BYTES = 64 << 20


def read_source(source: str) -> bytes:
    """A file, or what an http(s) address answers, of up to 64 MiB. Raises OSError, or ValueError for more."""
    if source.startswith(("http://", "https://")):
        with urllib.request.urlopen(source, timeout=60) as answer:
            content: bytes = answer.read(_MOST_BYTES + 1)
    else:
        with Path(source).open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise ValueError(f"{source} is larger than {_MOST_BYTES >> 20} MiB")
    return content


def parse_prompts(content: bytes, name: str) -> dict[str, list[str]]:
    """Texts by category, in the order of the file. A line holds ``category`` (else it is of "other") and ``text``,
    ``prompt`` or ``turns``, of which the first is taken.

    Raises ValueError, with ``name`` and the line, for what is not that.
    """
    found: dict[str, list[str]] = {}
    for number, line in enumerate(content.decode("utf-8-sig", errors="replace").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            raise ValueError(f"{name}, line {number}: it is no JSON") from None
        text = _text(row) if isinstance(row, dict) else None
        if text is None:
            raise ValueError(f'{name}, line {number}: there is no "text", "prompt" or "turns" with words in it')
        found.setdefault(str(row.get("category") or "other"), []).append(text)
    if not found:
        raise ValueError(f"{name}: there are no prompts in it")
    return found


def _text(row: dict[str, object]) -> str | None:
    for name in ("text", "prompt", "turns"):
        value = row.get(name)
        if isinstance(value, list) and value:
            value = value[0]
        if isinstance(value, str) and value.strip():
            return value
    return None


def format_prompts(prompts: dict[str, list[str]]) -> str:
    """JSON lines that :func:`parse_prompts` reads as the same."""
    rows = [{"category": category, "text": text} for category, texts in prompts.items() for text in texts]
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
