"""Cuts chat messages into bounded pieces: the sentences of the request, pasted code, earlier context.

Head and tail are read in windows of fixed size. Between them only lines that look like a question are picked out, in a
bounded stretch, so a prompt of 1 MB costs what one of 8,000 characters does. Not covered: an instruction without a
question mark inside a paragraph of a long paste.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

WINDOW_CHARS = 360
"""Characters read from the head, and as many from the tail."""
DENSE_WINDOW_CHARS = 180
"""The same for scripts that say in one character what others say in several (Chinese, Japanese, Korean, Thai)."""
DENSE_FROM = "\u0e00"
MIDDLE_CHARS = 4_000
"""Of what lies between the windows, the characters looked through from its start, and as many from its end."""
MIDDLE_SENTENCES = 3
"""Questions and short paragraphs that are picked out of either stretch."""
ASIDE_CHARS = 240
"""The longest paragraph that counts as set apart from a paste."""
LONG_CHARS = 400
"""From here on a prompt may be a paste with a question; below, all of it is taken for the request."""
DENSE_LONG_CHARS = 150
"""The same for scripts that say in one character what others say in several."""
CONTEXT_CHARS = 200
EARLIER_TURNS = 2
FENCE = "```"
QUESTION_MARKS = "?？؟"

# Starts with one character class, which the regex engine skips to; an alternation would be tried at every position.
_SENTENCE_END = re.compile(r"[.!?。！？؟।](?:(?<=[。！？؟।])|\s+)")
_DENSE_START = re.compile(f"[{DENSE_FROM}-\U0010ffff]")
# A line that only source code, a shell session or a stack trace starts with.
_CODE_LINE = re.compile(
    r"\s*(?:(?:async )?def \w+\(|class \w+[(:{]|import [\w.{]+|from [\w.]+ import |#include|using namespace "
    r"|(?:public|private|protected|static|export) |(?:const|let|var) \w+ ?=|function\b ?\w*\(|func \w+\(|fn \w+"
    r"|(?:SELECT|INSERT INTO|UPDATE|DELETE FROM|CREATE TABLE|ALTER TABLE) |(?:if|for|while|switch) ?\("
    r"|return [\w(\[{\"'-].*[;)\]]$|[{}\])]+[;,)]*$|//|/\*|<[/!]?\w+[^<>]*>|\$ \w|@\w+$|print\(|console\."
    r"|Traceback \(|  File \"|[A-Za-z_]\w*(?:\.\w+)* ?[-+*/]?= ?\S|[A-Za-z_][A-Za-z0-9_.]*\(.*\)[;:]?$)"
)


class RequestText(NamedTuple):
    """The bounded view of a request that features are taken from."""

    sentences: tuple[str, ...]
    """Prose of the last user turn, in order, each a sentence or line."""
    code: str
    """Fenced or code-like text of the last user turn."""
    fenced: bool
    code_last: bool
    """Code comes after the last prose."""
    length: int
    """Characters of the whole last user turn."""
    context: tuple[str, ...]
    """Heads of the system prompt and of earlier user turns."""
    answered_in_code: bool
    """An earlier assistant turn holds a fenced block."""
    middle: range
    """Which of `sentences` were picked out between the windows."""
    aside: frozenset[int]
    """Which of `sentences` begin or end a long prompt in a short paragraph of their own."""


def read_request(messages: Sequence[Mapping[str, Any]] | str) -> RequestText:
    """Cuts `messages` (or one prompt) into the pieces that features are taken from."""
    if isinstance(messages, str):
        last, earlier = messages, ()
    else:
        last, earlier = _last_user_turn(messages)
    head, tail = _windows(last)
    pieces: list[tuple[str, bool]] = []  # (text, is code)
    _split_fences(_normal(head), False, pieces)
    in_head = len(pieces)
    if tail:
        # Whether the tail starts inside a block follows from the fences of the tail alone: an odd number closes one.
        _split_fences(_normal(tail), tail.count(FENCE) % 2 == 1, pieces)
    sentences: list[str] = []
    code: list[str] = []
    code_last = _read_pieces(pieces[:in_head], sentences, code)
    middle = range(len(sentences), len(sentences))
    if tail:
        sentences += _middle(last, len(head), len(last) - len(tail))
        middle = range(middle.start, len(sentences))
        code_last = _read_pieces(pieces[in_head:], sentences, code)
    context: list[str] = []
    answers: list[str] = []
    if earlier:
        context += [_content(m)[:CONTEXT_CHARS] for m in earlier if m.get("role") in ("system", "developer")][:1]
        context += [_content(m)[-CONTEXT_CHARS:] for m in earlier if m.get("role") == "user"][-EARLIER_TURNS:]
        answers += [_content(m) for m in earlier if m.get("role") == "assistant"][-1:]
    return RequestText(
        sentences=tuple(sentences),
        code="\n".join(code),
        fenced=FENCE in head or FENCE in tail,
        code_last=code_last,
        length=len(last),
        context=tuple(_normal(text) for text in context if text),
        answered_in_code=any(FENCE in text[:2000] for text in answers),
        middle=middle,
        aside=_aside(last, sentences) if "\n\n" in last[: ASIDE_CHARS + 2] + last[-ASIDE_CHARS - 2 :] else frozenset(),
    )


def _read_pieces(pieces: Sequence[tuple[str, bool]], sentences: list[str], code: list[str]) -> bool:
    """Sorts the lines of `pieces` into `sentences` and `code`; whether code came last."""
    code_last = False
    for text, is_code in pieces:
        if is_code:
            code.append(text)
            code_last = True
            continue
        for line in text.splitlines():
            if not line or line.isspace():
                continue
            if _CODE_LINE.match(line):
                code.append(line)
                code_last = True
            else:
                _split_sentences(line, sentences)
                code_last = False
    return code_last


def _middle(text: str, start: int, end: int) -> list[str]:
    """Questions and short paragraphs between two places of `text`, in reading order."""
    if end - start <= 2 * MIDDLE_CHARS:
        stretches = [(start, end)]
    else:
        stretches = [(start, start + MIDDLE_CHARS), (end - MIDDLE_CHARS, end)]
    found: list[str] = []
    for low, high in stretches:
        stretch = text[low:high]
        found += _questions(stretch)
        paragraphs = [part.strip() for part in stretch.split("\n\n", 80)[1:-1]]
        short = [part for part in paragraphs if 0 < len(part) < ASIDE_CHARS and "\n" not in part]
        # Where most paragraphs are short, being short says nothing.
        if len(short) <= MIDDLE_SENTENCES:
            found += [part for part in short if not _CODE_LINE.match(part) and part not in found]
    return [_normal(part) for part in found]


def _questions(text: str) -> list[str]:
    """The first questions of `text`, each from the end of the sentence before it."""
    found: list[str] = []
    for mark in QUESTION_MARKS:
        end = -1
        # `find` runs over a paste many times faster than a regular expression does; few tries, since some text is
        # nothing but marks.
        for _ in range(4 * MIDDLE_SENTENCES):
            end = text.find(mark, end + 1)
            if end < 0 or len(found) == MIDDLE_SENTENCES:
                break
            low = max(0, end - ASIDE_CHARS)
            start = max(low - 1, *(text.rfind(stop, low, end) for stop in "\n.!?。！？؟।"))
            if end - start > 5:
                found.append(text[start + 1 : end + 1].strip())
    return found


def _aside(text: str, sentences: Sequence[str]) -> frozenset[int]:
    """Indices of the sentences of the first and of the last paragraph, each if it is short."""
    chosen: set[int] = set()
    first, blank, _ = text[: ASIDE_CHARS + 2].strip("\n").partition("\n\n")
    if blank:
        chosen.update(i for i in range(min(4, len(sentences))) if sentences[i].strip() in first)
    _, blank, last = text[-ASIDE_CHARS - 2 :].strip("\n").rpartition("\n\n")
    if blank:
        count = len(sentences)
        chosen.update(i for i in range(max(0, count - 4), count) if sentences[i].strip() in last)
    return frozenset(chosen)


def _last_user_turn(messages: Sequence[Mapping[str, Any]]) -> tuple[str, Sequence[Mapping[str, Any]]]:
    for position in range(len(messages) - 1, -1, -1):
        if messages[position].get("role", "user") == "user":
            return _content(messages[position]), messages[:position]
    # Without a user turn the last message stands for it, so that a lone system prompt still gets a class.
    return (_content(messages[-1]), messages[:-1]) if messages else ("", ())


def _content(message: Mapping[str, Any]) -> str:
    """The text of a message; of content parts, the text parts. Anything else counts as empty."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(p["text"] for p in content if isinstance(p, Mapping) and isinstance(p.get("text"), str))
    return ""


def _split_sentences(line: str, out: list[str]) -> None:
    start = 0
    for match in _SENTENCE_END.finditer(line):
        out.append(line[start : match.end()])
        start = match.end()
    if start < len(line):
        out.append(line[start:])


def _windows(text: str) -> tuple[str, str]:
    """Head and tail of a text, without the word or line that a window cuts in two; short text is all head."""
    if len(text) <= 2 * DENSE_WINDOW_CHARS:
        return text, ""
    size = DENSE_WINDOW_CHARS if _DENSE_START.search(text, 0, 100) else WINDOW_CHARS
    if len(text) <= 2 * size:
        return text, ""
    head, tail = text[:size], text[-size:]
    cut = max(head.rfind("\n"), head.rfind(" "))
    starts = [at for at in (tail.find("\n"), tail.find(" ")) if 0 <= at < size // 2]
    return head[:cut] if cut > size // 2 else head, tail[min(starts) :] if starts else tail


def _normal(text: str) -> str:
    if text.isascii() or unicodedata.is_normalized("NFKC", text):
        return text
    return unicodedata.normalize("NFKC", text)


def _split_fences(text: str, inside: bool, out: list[tuple[str, bool]]) -> None:
    for part in text.split(FENCE):
        if part:
            out.append((part, inside))
        inside = not inside
