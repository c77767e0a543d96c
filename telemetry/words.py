"""What went wrong between here and a server, in words that may be logged and shown.

HTTP clients quote the URL, or the header that they choke on, in some of their errors, and either may hold a secret.
"""

from __future__ import annotations

import httpx

_KNOWN: tuple[tuple[type[Exception], str], ...] = (
    (httpx.UnsupportedProtocol, "the URL can't be used; it must begin with http:// or https://"),
    (httpx.InvalidURL, "the URL can't be used; check its host, its port and its characters"),
    (httpx.LocalProtocolError, "the request can't be sent; check URL and token for line ends and other odd characters"),
    (httpx.RemoteProtocolError, "the server broke off, or answered with what is no HTTP"),
)


def transport_words(error: Exception) -> str:
    """The kind of ``error``, with the system's own words where it is the system that speaks."""
    kind = type(error).__name__
    for known, words in _KNOWN:
        if isinstance(error, known):
            return f"{kind}: {words}"
    if isinstance(error, httpx.NetworkError | OSError) and str(error):
        return f"{kind}: {error}"
    return kind
