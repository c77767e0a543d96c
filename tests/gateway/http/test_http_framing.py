"""Where requests end: the table of ``wire_cases`` against the parser, the real server, and other readers of HTTP."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress

import h11
import httptools
import pytest

from gateway.http.parser import END, Head, Malformed, RequestParser
from gateway.settings import GatewaySettings
from tests.support.wire import Echo, Wire, cut, echoing
from tests.support.wire_cases import CASES, HIDDEN, Case, Seen, get

MOST = 32 * 1024
by_name = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@pytest.fixture(scope="module")
def echo() -> Iterator[Echo]:
    with echoing(GatewaySettings(max_header_bytes=MOST)) as found:
        yield found


def check(echo: Echo, case: Case, pieces: list[bytes]) -> None:
    echo.seen.clear()
    with Wire(echo.port) as wire:
        for piece in pieces:
            wire.send(piece)
            echo.turn()
        assert wire.statuses(len(case.statuses)) == list(case.statuses)
        wire.send(get(b"Connection: close", target=b"/echo/after"))
        if case.stays_open:
            assert wire.statuses(1) == [200]
        assert wire.rest() == b"", "nothing more is answered"
    after: list[Seen] = [("GET", b"/echo/after", b"")] if case.stays_open else []
    assert echo.seen == [*case.seen, *after]


def test_the_table_is_long_enough() -> None:
    assert len(CASES) >= 60
    assert len({case.name for case in CASES}) == len(CASES)


@by_name
def test_in_one_packet(echo: Echo, case: Case) -> None:
    check(echo, case, [case.sent])


@by_name
def test_with_the_body_in_a_later_packet(echo: Echo, case: Case) -> None:
    head, empty, body = case.sent.partition(b"\r\n\r\n")
    check(echo, case, [head + empty, body])


@by_name
def test_cut_anywhere(echo: Echo, case: Case) -> None:
    chance = random.Random(case.name)
    check(echo, case, cut(case.sent, chance.choices(range(1, len(case.sent)), k=4)))


def read(pieces: list[bytes]) -> tuple[list[Seen], int]:
    """The whole requests, and the status of what is refused behind them (0: nothing is)."""
    parser, seen, head, body = RequestParser(MOST), list[Seen](), None, b""
    for piece in pieces:
        parser.feed(piece)
        try:
            while (event := parser.next_event()) is not None:
                if isinstance(event, Head):
                    head, body = event, b""
                elif event is END:
                    assert head is not None
                    seen.append((head.method, head.target, body))
                    if not head.keep_alive:
                        return seen, 0
                elif isinstance(event, bytes):
                    body += event
        except Malformed as problem:
            return seen, problem.status
    return seen, 0


@by_name
def test_the_parser_byte_by_byte(case: Case) -> None:
    # By a few bytes where there are very many.
    step = 1 + len(case.sent) // 10_000
    assert read([case.sent[at : at + step] for at in range(0, len(case.sent), step)]) == read([case.sent])


def read_by_h11(data: bytes, count: int) -> list[Seen]:
    """The first ``count`` requests as h11 reads them. Raises what h11 raises."""
    server, seen = h11.Connection(h11.SERVER, max_incomplete_event_size=1_000_000), list[Seen]()
    server.receive_data(data)
    while len(seen) < count:
        head, body = server.next_event(), b""
        assert isinstance(head, h11.Request), head
        while isinstance(event := server.next_event(), h11.Data):
            body += event.data
        assert isinstance(event, h11.EndOfMessage), event
        seen.append((head.method.decode(), bytes(head.target), body))
        if len(seen) < count:
            server.send(h11.Response(status_code=200, headers=[(b"content-length", b"0")]))
            server.send(h11.EndOfMessage())
            server.start_next_cycle()
    return seen


# fmt: off
TRICKY = (
    b"\r", b"\n", b"\r\n", b" ", b"\t", b":", b",", b"0", b"5", b"\0", b";", b"chunked", b"\x0b", b"\xa0", b"_", b"+",
    b"\r\nContent-Length: 5", b"\r\nTransfer-Encoding: chunked", b"\r\nTransfer-Encoding: x", HIDDEN,
)
# fmt: on


def mutated(chance: random.Random) -> bytes:
    """A case with a few changes that readers of HTTP take differently."""
    # Half of them of cases that are read: most changes make it one that is refused.
    among = CASES if chance.random() < 0.5 else [case for case in CASES if case.seen]
    data = bytearray(chance.choice(among).sent[:2000])
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(data))
        data[at : at + chance.choice([0, 0, 1, 2])] = chance.choice(TRICKY)
    return bytes(data)


def test_what_is_read_here_another_reader_reads_alike() -> None:
    """h11 is lax in some points, so it reads more; of what we read, it must read the same."""
    chance, compared = random.Random(1), 0
    for _ in range(15_000):
        data = mutated(chance)
        ours, _ = read([data])
        # Forms of targets that h11 leaves to its caller; and it knows no empty line before a request.
        if ours and b"://" not in data and not data.startswith(b"\r\n"):
            try:
                theirs = read_by_h11(data, len(ours))
            except h11.RemoteProtocolError as error:
                if str(error) == "no request line received":
                    continue
                raise AssertionError(data) from error
            compared += 1
            assert theirs == ours, data
    assert compared > 1000


class ByHttptools:
    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self.parser = httptools.HttpRequestParser(self)

    def on_message_begin(self) -> None:
        self.target = self.body = b""

    def on_url(self, url: bytes) -> None:
        self.target += url

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.seen.append((self.parser.get_method().decode(), self.target, self.body))


def test_and_so_does_a_third() -> None:
    """llhttp, inside of Node and of uvicorn. It stops at upgrades, which is what this table began with."""
    chance, compared = random.Random(2), 0
    for _ in range(15_000):
        data = mutated(chance)
        ours, _ = read([data])
        if ours and b"://" not in data and b"pgrade" not in data:
            theirs = ByHttptools()
            with suppress(httptools.HttpParserError):
                theirs.parser.feed_data(data)
            compared += 1
            assert theirs.seen[: len(ours)] == ours, data
    assert compared > 1000
