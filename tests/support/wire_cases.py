"""Requests byte by byte, each with what has to come of it: every way in which readers of HTTP disagree where one ends.

Targets that begin with ``/echo`` are answered with 200 once their body is whole (``tests/support/wire.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

Seen = tuple[str, bytes, bytes]
"""Method, target and body, as the application saw them."""


@dataclass(frozen=True)
class Case:
    name: str
    sent: bytes
    statuses: tuple[int, ...]
    seen: tuple[Seen, ...] = ()
    stays_open: bool = False


HIDDEN = b"GET /echo/hidden HTTP/1.1\r\nHost: localhost\r\n\r\n"
"""A request in a body's place, which nobody may ever see as one."""


def request(line: bytes, *headers: bytes, body: bytes = b"", host: bytes | None = b"localhost") -> bytes:
    lines = [line, *([] if host is None else [b"Host: " + host]), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def get(
    *headers: bytes,
    target: bytes = b"/echo",
    version: bytes = b"1.1",
    body: bytes = b"",
    host: bytes | None = b"localhost",
) -> bytes:
    return request(b"GET " + target + b" HTTP/" + version, *headers, body=body, host=host)


def post(*headers: bytes, body: bytes = b"hello", target: bytes = b"/echo", version: bytes = b"1.1") -> bytes:
    return request(b"POST " + target + b" HTTP/" + version, *headers, body=body)


def sized(body: bytes, *headers: bytes, **more: bytes) -> bytes:
    return post(*headers, b"Content-Length: %d" % len(body), body=body, **more)


def chunked(body: bytes, *headers: bytes) -> bytes:
    return post(*headers, b"Transfer-Encoding: chunked", body=body)


GET: Seen = ("GET", b"/echo", b"")
POST: Seen = ("POST", b"/echo", b"hello")
HIDDEN_BODY: Seen = ("POST", b"/echo", HIDDEN)
CHUNKS = b"5\r\nhello\r\n0\r\n\r\n"
NGINX = (b"Connection: upgrade", b"Upgrade: websocket")
"""What nginx adds to every request with the usual lines for WebSockets."""
JDK = (
    b"Connection: Upgrade, HTTP2-Settings",
    b"Content-Length: 5",
    b"HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA",
    b"Upgrade: h2c",
    b"User-Agent: Java-http-client/17.0.15",
    b"Content-Type: application/json",
)
"""What java.net.http.HttpClient sends with its default settings."""


def good(name: str, sent: bytes, *seen: Seen, statuses: tuple[int, ...] | None = None) -> Case:
    return Case(name, sent, statuses or (200,) * len(seen), seen, stays_open=True)


def last(name: str, sent: bytes, *seen: Seen, statuses: tuple[int, ...] | None = None) -> Case:
    return Case(name, sent, statuses or (200,) * len(seen), seen)


def bad(name: str, sent: bytes, status: int = 400) -> Case:
    """Whatever is refused gets the hidden request behind it."""
    return Case(name, sent + HIDDEN, (status,))


# fmt: off
ODD_LENGTHS = (
    b"", b"+5", b"-5", b"0x5", b"5_0", b"5 0", b"5.0", b"5e0", b"5;", b"five", b"\xd9\xa5", b'"5"', b"9" * 16,
    b"18446744073709551621",
)
ODD_CODINGS = (
    b"", b"identity", b"gzip", b"gzip, chunked", b"chunked, gzip", b"chunked, chunked", b"chunked,", b"xchunked",
    b"chunked;q=1", b'"chunked"', b"chunked\xa0",
)
ODD_CHUNKS = (
    b"\r\n", b"g\r\nhello\r\n", b"0x5\r\nhello\r\n", b"+5\r\nhello\r\n", b"-5\r\nhello\r\n", b" 5\r\nhello\r\n",
    b"5 \r\nhello\r\n", b"5\t;a\r\nhello\r\n", b"5,\r\nhello\r\n", b"\xb5\r\nhello\r\n", b"123456789\r\nhello\r\n",
    b"5\nhello\n0\n\n", b"5\rhello\r0\r\r\n", b"5\r\r\nhello\r\n", b"5;a\nhello\r\n", b"5;a\rb\r\nhello\r\n",
    b"5;\0\r\nhello\r\n", b"5;\r\nhello\r\n", b"5; a\r\nhello\r\n", b'5;a="b\r\nhello\r\n', b"5\r\nhello!\r\n",
    b"5\r\nhello\n0\r\n\r\n", b"5\r\nhello0\r\n\r\n", b"4\r\nhello\r\n", b"5;" + b"a" * 300 + b"\r\nhello\r\n",
    b"5\r\nhello\r\n0\n\r\n", b"5\r\nhello\r\n0\r\n\n", b"5\r\nhello\r\n0\r\nX-A: b\n\r\n",
    b"5\r\nhello\r\n0\r\nX-A\r\n\r\n", b"5\r\nhello\r\n0\r\n X-A: b\r\n\r\n", b"5\r\nhello\r\n0\r\nX-A : b\r\n\r\n",
    b"5\r\nhello\r\n0\r\nContent-Length: 5\r\n\r\n", b"5\r\nhello\r\n0\r\nX-A: b\0\r\n\r\n",
)
# fmt: on

CASES = (
    # Plain ones.
    good("get", get(), GET),
    good("length", sized(b"hello"), POST),
    good("length 0", sized(b""), ("POST", b"/echo", b"")),
    good("no length", post(body=b""), ("POST", b"/echo", b"")),
    good("length with leading zeros", post(b"Content-Length: 0005"), POST),
    good("length with spaces around", post(b"Content-Length:  5 "), POST),
    good("chunks", chunked(CHUNKS), POST),
    good("many chunks", chunked(b"1\r\nh\r\n3\r\nell\r\n1\r\no\r\n0\r\n\r\n"), POST),
    good("chunk sizes in capitals", chunked(b"A\r\n0123456789\r\n0\r\n\r\n"), ("POST", b"/echo", b"0123456789")),
    good("chunk sizes with zeros", chunked(b"0005\r\nhello\r\n000\r\n\r\n"), POST),
    good("chunk extensions", chunked(b'5;a=b;c="d e"\r\nhello\r\n0;x\r\n\r\n'), POST),
    good("thousands of chunks", chunked(b"1\r\na\r\n" * 4000 + b"0\r\n\r\n"), ("POST", b"/echo", b"a" * 4000)),
    good(
        "very many chunks",
        chunked((b"64\r\n" + b"a" * 100 + b"\r\n") * 6000 + b"0\r\n\r\n"),
        ("POST", b"/echo", b"a" * 600_000),
    ),
    bad("too many small chunks", chunked(b"1\r\na\r\n" * 4200)),
    bad("too many extensions", chunked((b"1;a=" + b"b" * 200 + b"\r\na\r\n") * 100)),
    good("trailers", chunked(b"5\r\nhello\r\n0\r\nX-Sum: 1\r\nX-B:\r\n\r\n"), POST),
    good("coding in capitals", post(b"Transfer-Encoding: Chunked", body=CHUNKS), POST),
    good("body that looks like a request", sized(HIDDEN), HIDDEN_BODY),
    good("chunk that looks like a request", chunked(b"%x\r\n%b\r\n0\r\n\r\n" % (len(HIDDEN), HIDDEN)), HIDDEN_BODY),
    # Several.
    good("two gets", get() + get(target=b"/echo/2"), GET, ("GET", b"/echo/2", b"")),
    good("post and get", sized(b"hello") + get(), POST, GET),
    good("chunks and post", chunked(CHUNKS) + sized(b"hello"), POST, POST),
    good("five", get() + sized(b"hello") + get() + chunked(CHUNKS) + get(), GET, POST, GET, POST, GET),
    good("an empty line behind a body", sized(b"hello") + b"\r\n" + get(), POST, GET),
    good("an empty line before the first", b"\r\n" + get(), GET),
    # Bodies where none is expected.
    good("get with length", get(b"Content-Length: 5", body=b"hello"), ("GET", b"/echo", b"hello")),
    good("get with chunks", get(b"Transfer-Encoding: chunked", body=CHUNKS), ("GET", b"/echo", b"hello")),
    good(
        "get with a request as body",
        get(b"Content-Length: %d" % len(HIDDEN), body=HIDDEN),
        ("GET", b"/echo", HIDDEN),
    ),
    good(
        "head with length",
        request(b"HEAD /echo HTTP/1.1", b"Content-Length: 5", body=b"hello"),
        ("HEAD", b"/echo", b"hello"),
    ),
    good(
        "delete with length",
        request(b"DELETE /echo HTTP/1.1", b"Content-Length: 5", body=b"hello"),
        ("DELETE", b"/echo", b"hello"),
    ),
    good(
        "answered before its body is read",
        post(
            b"Content-Length: %d" % len(HIDDEN),
            b"Content-Type: text/plain",
            target=b"/v1/chat/completions",
            body=HIDDEN,
        ),
        ("POST", b"/v1/chat/completions", b""),
        statuses=(415,),
    ),
    # Upgrades, which are ignored.
    good("the JDK's client", post(*JDK), POST),
    good("the JDK's client, twice", post(*JDK) + post(*JDK), POST, POST),
    good("websocket lines of nginx", sized(b"hello", *NGINX), POST),
    good("websocket lines and a hidden request", sized(HIDDEN, *NGINX), HIDDEN_BODY),
    good("websocket lines and chunks", chunked(CHUNKS, *NGINX) + get(), POST, GET),
    good(
        "websocket lines and padding",
        sized(b"\r\n" * 50_000 + HIDDEN, *NGINX),
        ("POST", b"/echo", b"\r\n" * 50_000 + HIDDEN),
    ),
    good(
        "websocket handshake",
        get(*NGINX, b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==", b"Sec-WebSocket-Version: 13") + get(),
        GET,
        GET,
    ),
    good("upgrade without connection", sized(b"hello", b"Upgrade: websocket") + get(), POST, GET),
    good("connection without upgrade", sized(b"hello", b"Connection: upgrade") + get(), POST, GET),
    good("upgrade to TLS", sized(b"hello", b"Connection: upgrade", b"Upgrade: TLS/1.0"), POST),
    good("several upgrades", sized(b"hello", b"Connection: upgrade", b"Upgrade: h2c, websocket", b"Upgrade: x"), POST),
    # Expectations.
    good("expect", sized(b"hello", b"Expect: 100-continue"), POST, statuses=(100, 200)),
    good("expect in capitals", chunked(CHUNKS, b"Expect: 100-Continue"), POST, statuses=(100, 200)),
    good("expect without a body", get(b"Expect: 100-continue"), GET),
    last(
        "expect, answered instead",
        sized(HIDDEN, b"Expect: 100-continue", target=b"/v1/chat/completions"),
        ("POST", b"/v1/chat/completions", b""),
        statuses=(415,),
    ),
    bad("other expectation", sized(b"hello", b"Expect: 200-ok"), 417),
    bad("two expectations", sized(b"hello", b"Expect: 100-continue", b"Expect: 100-continue"), 417),
    # Targets and hosts.
    good("query", get(target=b"/echo/a?b=c&d=%20"), ("GET", b"/echo/a?b=c&d=%20", b"")),
    good("absolute", get(target=b"http://localhost/echo/a?b"), ("GET", b"/echo/a?b", b"")),
    good("absolute in capitals", get(target=b"HTTP://LOCALHOST/echo"), GET),
    good("host with port", get(host=b"localhost:8080"), GET),
    good("host with address", get(host=b"[::1]:8080"), GET),
    good("empty host", get(host=b""), GET),
    good("star", request(b"OPTIONS * HTTP/1.1"), ("OPTIONS", b"*", b""), statuses=(404,)),
    bad("no host", get(host=None)),
    bad("two hosts", get(b"Host: localhost")),
    bad("two different hosts", get(b"Host: 127.0.0.1")),
    bad("two hosts in one", get(host=b"localhost, 127.0.0.1")),
    bad("host with path", get(host=b"localhost/admin")),
    bad("host with user", get(host=b"a@localhost")),
    bad("absolute of another host", get(target=b"http://127.0.0.1/echo")),
    bad("absolute without Host", get(target=b"http://localhost/echo", host=None, version=b"1.0")),
    bad("host with percent", get(host=b"evil%2ecom")),
    good("host with underscore", get(host=b"my_box"), GET),
    bad("absolute without host", get(target=b"http:///echo")),
    bad("another scheme", get(target=b"ftp://localhost/echo")),
    bad("authority", get(target=b"localhost:80")),
    bad("relative", get(target=b"echo")),
    bad("star with get", get(target=b"*")),
    bad("fragment", get(target=b"/echo#/hidden")),
    bad("bytes over 127 in target", get(target="/echo/é".encode())),
    bad("connect", request(b"CONNECT localhost:80 HTTP/1.1"), 501),
    # Headers.
    good(
        "odd headers",
        get(b"X-Empty:", b"X-Tabs:\ta\tb\t", b"x_y: 1", b"Content_Length: 3", b"X-\xc3: a"[:2] + b": \xff"),
        GET,
    ),
    bad("line ends LF", get().replace(b"\r\n", b"\n")),
    bad("one line ends LF", get(b"X-A: b\nContent-Length: 5")),
    bad("the last line ends LF", b"GET /echo HTTP/1.1\r\nHost: localhost\n\r\n"),
    bad("the empty line is LF", b"GET /echo HTTP/1.1\r\nHost: localhost\r\n\n"),
    bad("line ends CR", get(b"X-A: b\rContent-Length: 5")),
    bad("CR in value", get(b"X-A: b\rc")),
    bad("NUL in value", get(b"X-A: b\0c")),
    bad("NUL in name", get(b"X-\0A: b")),
    bad("folded", get(b"X-A: b\r\n c")),
    bad("folded length", post(b"Content-Length:\r\n 5")),
    bad("folded coding", post(b"Transfer-Encoding:\r\n\tchunked", body=CHUNKS)),
    bad("first header after a space", b"GET /echo HTTP/1.1\r\n Host: localhost\r\n\r\n"),
    bad("space before colon", post(b"Content-Length : 5")),
    bad("tab before colon", post(b"Transfer-Encoding\t: chunked", body=CHUNKS)),
    bad("space in name", get(b"X A: b")),
    bad("no colon", get(b"X-A")),
    bad("no name", get(b": b")),
    # Lengths.
    bad("length and coding", post(b"Content-Length: 5", b"Transfer-Encoding: chunked", body=CHUNKS)),
    bad("coding and length", post(b"Transfer-Encoding: chunked", b"Content-Length: %d" % len(CHUNKS), body=CHUNKS)),
    bad("two equal lengths", post(b"Content-Length: 5", b"Content-Length: 5")),
    bad("two lengths", post(b"Content-Length: 5", b"Content-Length: 0")),
    bad("list of equal lengths", post(b"Content-Length: 5, 5")),
    bad("list of lengths", post(b"Content-Length: 5, 0")),
    *(bad(f"length {value!r}", post(b"Content-Length: " + value)) for value in ODD_LENGTHS),
    # Codings.
    bad("two codings", post(b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked", body=CHUNKS)),
    bad("coding and identity", post(b"Transfer-Encoding: chunked", b"Transfer-Encoding: identity", body=CHUNKS)),
    *(bad(f"coding {value!r}", post(b"Transfer-Encoding: " + value, body=CHUNKS), 501) for value in ODD_CODINGS),
    bad("coding before a tab", post(b"Transfer-Encoding: chunked\t", body=CHUNKS)),
    bad("length after a tab", post(b"Content-Length:\t5")),
    bad("coding after a form feed", post(b"Transfer-Encoding: \x0cchunked", body=CHUNKS)),
    # Chunks.
    *(bad(f"chunk {body!r}", chunked(body)) for body in ODD_CHUNKS),
    # First lines and versions.
    last("close", get(b"Connection: close") + HIDDEN, GET),
    last("close among others", sized(b"hello", b"Connection: keep-alive, Close") + HIDDEN, POST),
    last("close in a second header", sized(b"hello", b"Connection: upgrade", b"Connection: close") + HIDDEN, POST),
    last("1.0", get(version=b"1.0") + HIDDEN, GET),
    last("1.0 without host", get(version=b"1.0", host=None) + HIDDEN, GET),
    last("1.0 with keep-alive", get(b"Connection: keep-alive", version=b"1.0") + HIDDEN, GET),
    last("1.0 with length", sized(b"hello", version=b"1.0") + HIDDEN, POST),
    last("1.0 with expect", sized(b"hello", b"Expect: 100-continue", version=b"1.0") + HIDDEN, POST),
    bad("1.0 with coding", post(b"Transfer-Encoding: chunked", body=CHUNKS, version=b"1.0")),
    bad("1.0 with two hosts", get(b"Host: localhost", version=b"1.0")),
    bad("0.9", b"GET /echo\r\n\r\n"),
    bad("1.2", get(version=b"1.2"), 505),
    bad("2.0", get(version=b"2.0"), 505),
    bad("2's preface", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0", 505),
    bad("version 1.10", get(version=b"1.10")),
    bad("version in small letters", request(b"GET /echo http/1.1")),
    bad("method in small letters", request(b"get /echo HTTP/1.1"), 501),
    bad("unknown method", request(b"BREW /echo HTTP/1.1"), 501),
    bad("two spaces", request(b"GET  /echo HTTP/1.1")),
    bad("a tab", request(b"GET\t/echo HTTP/1.1")),
    bad("space behind the version", request(b"GET /echo HTTP/1.1 ")),
    bad("space before the method", request(b" GET /echo HTTP/1.1")),
    bad("space in target", get(target=b"/echo /hidden")),
    bad("two empty lines before", b"\r\n\r\n" + get()),
    bad("LF before", b"\n" + get()),
    bad("TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),
    Case("good, then bad", get() + post(b"Content-Length: 5", b"Content-Length: 6") + HIDDEN, (200, 400), (GET,)),
    Case("length too small", post(b"Content-Length: 4") + HIDDEN, (200, 501), (("POST", b"/echo", b"hell"),)),
    Case("an empty line too many", sized(b"hello") + b"\r\n\r\n" + HIDDEN, (200, 400), (POST,)),
)
"""Several requests behind one another are answered in turn. What is read of a refused one is nothing."""
