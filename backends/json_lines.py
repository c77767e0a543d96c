"""JSON lines as people have them: what can be read is read, and anything else is refused with its file and line.

Byte order mark, CRLF, blank lines and U+2028 inside a string are nothing to refuse. Another encoding, a line that is
cut off, and anything that is no object are.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

Objects = Iterator[tuple[int, dict[str, Any]]]
"""Line numbers, from 1, and what stands there."""

_GZIP = b"\x1f\x8b"
_BOM = b"\xef\xbb\xbf"
_OTHER_BOMS = (b"\xff\xfe", b"\xfe\xff", b"\x00\x00\xfe\xff")


class _LineError(ValueError):
    pass


def read_objects(path: Path, error: Callable[[str], Exception], *, torn_end: bool = False) -> Objects:
    """Objects of a file, packed with gzip or not. What is refused is raised as ``error`` of the message.

    ``torn_end``: what a killed writer has left at the end is passed over. Raises OSError for what can't be opened.
    """
    name = str(path)
    with path.open("rb") as file:
        lines = gzip.GzipFile(fileobj=file) if file.peek(2)[:2] == _GZIP else file
        yield from objects_of(name, _unpacked(name, lines, error, torn_end), error, torn_end=torn_end)


def objects_of(
    name: str,
    lines: Iterable[bytes | str],
    error: Callable[[str], Exception],
    *,
    torn_end: bool = False,
    replace: bool = False,
) -> Objects:
    """Objects of lines, of which ``name`` tells where they are from. See :func:`read_objects`.

    ``replace``: bytes that aren't UTF-8 become replacement characters.
    """
    torn: Exception | None = None
    for number, line in enumerate(lines, start=1):
        if torn is not None:
            raise torn
        try:
            record = _object(line, first=number == 1, replace=replace)
        except _LineError as problem:
            torn = error(f"{name}:{number}: {problem}")
            if not torn_end:
                raise torn from None
            continue
        if record is not None:
            yield number, record


def _unpacked(name: str, file: Iterable[bytes], error: Callable[[str], Exception], torn_end: bool) -> Iterator[bytes]:
    number = 0
    try:
        for line in file:
            number += 1
            yield line
    except (EOFError, zlib.error, gzip.BadGzipFile) as problem:
        if not torn_end:
            raise error(f"{name}:{number + 1}: the file is cut off or damaged here ({problem})") from None


def _object(line: bytes | str, *, first: bool, replace: bool) -> dict[str, Any] | None:
    """None: a blank line. Raises :class:`_LineError`."""
    text = line if isinstance(line, str) else _decoded(line, first, replace)
    if not text.strip():
        return None
    try:
        record = json.loads(text)
        if "\\u" in text:
            # Half a surrogate pair is JSON, and no text: it would fail at whatever encodes it.
            json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise _LineError("a string holds half a surrogate pair (\\ud800 to \\udfff); leave it out") from None
    except RecursionError:
        raise _LineError("nested too deeply; write one JSON object a line") from None
    except ValueError as problem:
        where = f"{problem.msg} at place {problem.pos + 1}" if isinstance(problem, json.JSONDecodeError) else problem
        raise _LineError(f"not JSON ({where}); write one JSON object a line") from None
    if not isinstance(record, dict):
        raise _LineError(f"{type(record).__name__} instead of an object; write one JSON object a line")
    return record


def _decoded(line: bytes, first: bool, replace: bool) -> str:
    if first:
        line = line.removeprefix(_BOM)
    if b"\0" in line or (first and line.startswith(_OTHER_BOMS)):
        raise _LineError("not UTF-8 but UTF-16 or UTF-32, it seems; save the file as UTF-8")
    try:
        return line.decode("utf-8", "replace" if replace else "strict")
    except UnicodeDecodeError as problem:
        raise _LineError(
            f"not UTF-8 (byte 0x{line[problem.start]:02x} at place {problem.start + 1}); save the file as UTF-8"
        ) from None
