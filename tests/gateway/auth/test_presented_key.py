"""Where a client may put its key."""

from __future__ import annotations

import pytest

from gateway.auth.access import InvalidApiKey, presented_key


@pytest.mark.parametrize(
    "headers",
    [
        [(b"authorization", b"Bearer k")],
        [(b"authorization", b"bearer  k ")],
        [(b"x-api-key", b"k")],
        [(b"x-api-key", b"other"), (b"authorization", b"Bearer k")],
    ],
    ids=str,
)
def test_a_key(headers: list[tuple[bytes, bytes]]) -> None:
    assert presented_key(headers) == "k"


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"x-api-key", b" ")],
        [(b"x-api-key", b"a"), (b"x-api-key", b"b")],
        [(b"authorization", b"Basic k")],
        [(b"authorization", b"Bearer ")],
        [(b"authorization", b"Bearer a"), (b"authorization", b"Bearer b")],
        [(b"authorization", b"nonsense"), (b"x-api-key", b"k")],
    ],
    ids=str,
)
def test_no_key(headers: list[tuple[bytes, bytes]]) -> None:
    with pytest.raises(InvalidApiKey):
        presented_key(headers)
