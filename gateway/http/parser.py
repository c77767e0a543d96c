"""Where one HTTP/1.1 request ends and the next begins: the gateway's only opinion on that.

A proxy in front may have rules ("nobody reaches /admin"). They hold as long as both see the same requests in the same
bytes, so what two readers of HTTP could read in two ways is refused here and never guessed at; docs/security.md lists
it. Nothing in a request changes what the bytes behind it mean: an ``Upgrade`` is ignored, as RFC 9110 (7.8) allows.

:class:`RequestParser` has no socket and no clock. It is fed bytes and gives events: a :class:`Head`, its body in
pieces of bytes, and :data:`END`. After :class:`Malformed` it must not be asked again: the connection has to be closed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"})
"""What is passed on to the application, which knows what to do with each."""

MAX_TRAILER_BYTES: Final = 8 * 1024
MAX_CHUNK_LINE: Final = 256
MAX_CHUNK_EXTENSIONS: Final = 16 * 1024
"""Bytes, of all chunks of a body together: they count against no other limit."""
FREE_CHUNKS: Final = 4096
LEAST_CHUNK: Final = 64
"""Bytes that the chunks beyond those must have on average: each costs the loop microseconds, however small it is."""

_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_REQUEST_LINE = re.compile(rb"(" + _TOKEN + rb") ([!-~]+) HTTP/([0-9])\.([0-9])")
_FRAMING = frozenset({b"content-length", b"transfer-encoding", b"host"})
_NAME = re.compile(_TOKEN)
_NOT_IN_VALUES = re.compile(rb"[^\t -~\x80-\xff]")
_BARE_LF = re.compile(rb"(?<!\r)\n")
_LENGTH = re.compile(rb"[0-9]{1,15}")
_EXTENSION = rb";" + _TOKEN + rb"(?:=(?:" + _TOKEN + rb"|\"[ !#-\[\]-~]*\"))?"
_CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,8})((?:" + _EXTENSION + rb")*)")
_HOST = re.compile(rb"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]*)(?::[0-9]{0,5})?")
_ABSOLUTE = re.compile(rb"https?://([^/?#]+)", re.IGNORECASE)


class Malformed(Exception):
    """A request that is refused: nothing behind it may be read. ``message`` is for the client."""

    def __init__(self, message: str, status: int = 400, code: str = "invalid_http") -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code


@dataclass(frozen=True, slots=True)
class Head:
    """A request's line and headers. ``target``: path and query, whatever form they were sent in."""

    method: str
    target: bytes
    version: str
    headers: list[tuple[bytes, bytes]]
    """Names in lower case. Exactly as many as were sent."""
    length: int | None
    """Of the body; None: it comes in chunks."""
    keep_alive: bool
    """Whether the connection may serve another request after this one."""
    expects_continue: bool


class _End:
    """The request is complete."""


END: Final = _End()
Event = Head | bytes | _End


class RequestParser:
    """One connection's requests, one after another.

    ``begun``: bytes of a request are here, or have been handed out, whose end was not given yet.
    """

    def __init__(self, max_head_bytes: int) -> None:
        self._most = max_head_bytes
        self._buffer = bytearray()
        self._searched = 0
        """How far the buffer was searched for the end of the head, so that slow senders cost no more than fast ones."""
        self._state: Callable[[], Event | None] = self._head
        self._rest = 0
        """Bytes still to come of the body or chunk."""
        self._extensions = 0
        self._chunks = 0
        self._chunk_bytes = 0
        self._trailers = 0
        self._may_skip = True
        self.in_head = True

    @property
    def begun(self) -> bool:
        return not self.in_head or bool(self._buffer)

    @property
    def waiting(self) -> int:
        """Bytes that were fed and not handed out."""
        return len(self._buffer)

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next_event(self) -> Event | None:
        """The next event; None: more bytes are needed. Raises :class:`Malformed`."""
        return self._state()

    # What may come next, one method each.

    def _head(self) -> Event | None:
        buffer = self._buffer
        if self._may_skip and buffer.startswith(b"\r\n"):
            # Old clients send one line end too many behind a body (RFC 9112, 2.2). One.
            del buffer[:2]
            self._may_skip, self._searched = False, 0
        end = buffer.find(b"\r\n\r\n", max(self._searched - 3, 0))
        if end < 0:
            if len(buffer) > self._most:
                raise self._too_large()
            self._refuse_at_once(buffer)
            self._searched = len(buffer)
            return None
        if end + 4 > self._most:
            raise self._too_large()
        head = read_head(bytes(buffer[:end]))
        del buffer[: end + 4]
        self._searched, self.in_head = 0, False
        if head.length is None:
            self._state = self._chunk_line
            self._extensions = self._chunks = self._chunk_bytes = 0
        else:
            self._state, self._rest = self._counted, head.length
        return head

    def _counted(self) -> Event | None:
        if self._rest == 0:
            return self._end()
        return self._piece()

    def _chunk_line(self) -> Event | None:
        line = self._line(MAX_CHUNK_LINE, "the size of a chunk")
        if line is None:
            return None
        found = _CHUNK_LINE.fullmatch(line)
        if found is None:
            raise Malformed("A chunk of the body has no size that can be read.")
        self._extensions += len(found[2])
        if self._extensions > MAX_CHUNK_EXTENSIONS:
            raise Malformed("The body's chunks have too many extensions.")
        self._rest = int(found[1], 16)
        self._chunks += 1
        self._chunk_bytes += self._rest
        if self._chunks > FREE_CHUNKS + self._chunk_bytes // LEAST_CHUNK:
            raise Malformed("The body comes in too many small chunks.")
        if self._rest == 0:
            self._state, self._trailers = self._trailer, 0
        else:
            self._state = self._chunk
        return self._state()

    def _chunk(self) -> Event | None:
        if self._rest:
            return self._piece()
        if len(self._buffer) < 2:
            if self._buffer not in (b"", b"\r"):
                raise Malformed("A chunk of the body is longer than its size says.")
            return None
        if not self._buffer.startswith(b"\r\n"):
            raise Malformed("A chunk of the body is longer than its size says.")
        del self._buffer[:2]
        self._state = self._chunk_line
        return self._state()

    def _trailer(self) -> Event | None:
        """Read as strictly as headers, and dropped: nothing here asks for any."""
        while True:
            line = self._line(MAX_TRAILER_BYTES - self._trailers, "the headers behind the body")
            if line is None:
                return None
            if not line:
                return self._end()
            self._trailers += len(line) + 2
            name, _ = _read_field(line)
            if name in _FRAMING:
                raise Malformed(f"The header {name.decode()} can't stand behind the body.")

    def _piece(self) -> bytes | None:
        if not self._buffer:
            return None
        piece = bytes(self._buffer[: self._rest])
        del self._buffer[: self._rest]
        self._rest -= len(piece)
        return piece

    def _line(self, most: int, what: str) -> bytes | None:
        """The next line without its end, which must be CR LF."""
        most = max(most, 0)
        end = self._buffer.find(b"\n", 0, most + 2)
        if end < 0:
            if len(self._buffer) >= most + 2:
                raise Malformed(f"The line with {what} is too long.")
            return None
        if end == 0 or self._buffer[end - 1] != 0x0D:
            raise Malformed(f"The line with {what} does not end in CR LF.")
        line = bytes(self._buffer[: end - 1])
        del self._buffer[: end + 1]
        return line

    def _end(self) -> _End:
        self._state, self.in_head, self._may_skip = self._head, True, True
        return END

    def _refuse_at_once(self, start: bytearray) -> None:
        """Refuse an unfinished head that can't become a good one. Else somebody who speaks TLS, or ends lines in LF,
        would wait for the time limit."""
        if not start or (start == b"\r" and self._may_skip):
            return
        if not 0x21 <= start[0] <= 0x7E or _BARE_LF.search(start, self._searched):
            raise Malformed("The request's line and headers must be text whose lines end in CR LF.")

    def _too_large(self) -> Malformed:
        return Malformed(
            f"The request's line and headers are over {self._most} bytes together.", 431, "headers_too_large"
        )


def read_head(data: bytes) -> Head:
    """``data``: all before the empty line. Raises :class:`Malformed`. Pure."""
    first, *rest = data.split(b"\r\n")
    found = _REQUEST_LINE.fullmatch(first)
    if found is None:
        raise Malformed("The request's first line is not METHOD TARGET HTTP/1.1.")
    method, version = found[1].decode(), f"{found[3].decode()}.{found[4].decode()}"
    if version not in ("1.0", "1.1"):
        raise Malformed(f"HTTP/{version} is not spoken here; HTTP/1.1 is.", 505, "http_version_not_supported")
    headers = [_read_field(line) for line in rest]
    if method not in METHODS:
        raise Malformed(f"The method '{method[:40]}' is not known here.", 501, "not_implemented")
    target = _read_target(method, found[2], _read_host(headers, version))
    length = _read_framing(headers, version)
    options = {each.strip().lower() for each in b",".join(_values(headers, b"connection")).split(b",")}
    return Head(
        method=method,
        target=target,
        version=version,
        headers=headers,
        length=length,
        # HTTP/1.0 has no keep-alive of its own, and what proxies made of it can't be relied on.
        keep_alive=version == "1.1" and b"close" not in options,
        expects_continue=_read_expectation(headers, version),
    )


def _read_field(line: bytes) -> tuple[bytes, bytes]:
    name, colon, value = line.partition(b":")
    if not colon or not _NAME.fullmatch(name) or _NOT_IN_VALUES.search(value):
        raise Malformed(
            "A header can't be read: each is one line 'Name: value' that ends in CR LF, with no space before the colon "
            "and no control characters."
        )
    name = name.lower()
    if name in _FRAMING and b"\t" in value:
        # Legal, and more than one reader stumbles over it.
        raise Malformed(f"The header {name.decode()} has a tab in it.")
    return name, value.strip(b" \t")


def _values(headers: list[tuple[bytes, bytes]], name: bytes) -> list[bytes]:
    return [value for each, value in headers if each == name]


def _read_host(headers: list[tuple[bytes, bytes]], version: str) -> bytes | None:
    hosts = _values(headers, b"host")
    if len(hosts) > 1:
        raise Malformed("There are several Host headers; send one.")
    if not hosts:
        if version == "1.1":
            raise Malformed("There is no Host header, which HTTP/1.1 asks for.")
        return None
    if not _HOST.fullmatch(hosts[0]):
        raise Malformed("The Host header is not a host, or a host and a port.")
    return hosts[0]


def _read_target(method: str, target: bytes, host: bytes | None) -> bytes:
    if b"#" in target:
        raise Malformed("The request's target has a fragment ('#'), which is never sent.")
    if target.startswith(b"/") or (target == b"*" and method == "OPTIONS"):
        return target
    absolute = _ABSOLUTE.match(target)
    if absolute is None:
        raise Malformed("The request's target must be a path, such as /v1/models.")
    # Whoever looks at one of the two must come to what we come to.
    if host is None or absolute[1].lower() != host.lower():
        raise Malformed("The request's target names another host than its Host header.")
    rest = target[absolute.end() :]
    return rest if rest.startswith(b"/") else b"/" + rest


def _read_framing(headers: list[tuple[bytes, bytes]], version: str) -> int | None:
    """The body's length; None: in chunks."""
    lengths, codings = _values(headers, b"content-length"), _values(headers, b"transfer-encoding")
    if codings:
        if lengths:
            raise Malformed("There are both Content-Length and Transfer-Encoding; send one of them.")
        if version == "1.0":
            raise Malformed("HTTP/1.0 has no Transfer-Encoding; send a Content-Length.")
        if len(codings) > 1:
            raise Malformed("There are several Transfer-Encoding headers; send one.")
        if codings[0].lower() != b"chunked":
            raise Malformed("The only Transfer-Encoding that is read here is 'chunked'.", 501, "not_implemented")
        return None
    if not lengths:
        return 0
    if len(lengths) > 1:
        raise Malformed("There are several Content-Length headers; send one.")
    if not _LENGTH.fullmatch(lengths[0]):
        raise Malformed("Content-Length must be one number of at most 15 decimal digits.")
    return int(lengths[0])


def _read_expectation(headers: list[tuple[bytes, bytes]], version: str) -> bool:
    expected = _values(headers, b"expect")
    if not expected or version == "1.0":
        return False
    if len(expected) > 1 or expected[0].lower() != b"100-continue":
        raise Malformed("The only expectation that is met here is '100-continue'.", 417, "expectation_failed")
    return True
