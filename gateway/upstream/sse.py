"""Server-sent events as they come in, by the rules of the HTML standard, within bounds."""

from __future__ import annotations

import re

MAX_EVENT_BYTES = 4 * 1024 * 1024

_LINE = re.compile(rb"\r\n|\n|\r")


class MalformedStream(ValueError):
    """What arrives can't be a stream of events."""


class EventParser:
    """Bytes in, cut anywhere; the ``data`` of whole events out. Other fields and comments are skipped.

    An event that the stream ends within is none, as the standard has it.
    """

    def __init__(self, most: int = MAX_EVENT_BYTES) -> None:
        self._most = most
        self._rest = b""
        self._more: list[bytes] = []
        self._more_bytes = 0
        self._data: list[bytes] = []
        self._held = 0
        self._begun = False

    def feed(self, received: bytes) -> list[bytes]:
        """Raises :class:`MalformedStream` for an event without end."""
        if self._begun and not self._rest.endswith(b"\r") and _LINE.search(received) is None:
            # Within a line: joined when it ends, not with every piece of it.
            self._more.append(received)
            self._more_bytes += len(received)
            self._check_size()
            return []
        pending = b"".join([self._rest, *self._more, received])
        self._more, self._more_bytes = [], 0
        if not self._begun:
            if len(pending) < 3 and b"\xef\xbb\xbf".startswith(pending):
                self._rest = pending
                return []
            self._begun = True
            pending = pending.removeprefix(b"\xef\xbb\xbf")
        # A CR at the very end may be half of a CR LF.
        held_back = b"\r" if pending.endswith(b"\r") else b""
        *lines, rest = _LINE.split(pending.removesuffix(b"\r") if held_back else pending)
        self._rest = rest + held_back
        events = [event for line in lines if (event := self._take(line)) is not None]
        self._check_size()
        return events

    def _check_size(self) -> None:
        if self._held + len(self._rest) + self._more_bytes > self._most:
            raise MalformedStream(f"an event has more than {self._most} bytes")

    def _take(self, line: bytes) -> bytes | None:
        if not line:
            data, self._data, self._held = self._data, [], 0
            return b"\n".join(data) if data else None
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
            self._held += len(value)
        return None
