"""From request bytes to a typed request, with errors that name the field and how to mend it.

msgspec finds the first thing wrong and says it in one sentence, which ``gateway.wire.body_errors`` words for clients.
What asks for nothing is left out first (``gateway.wire.body_levels``); what is known but not honoured is refused by
name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import msgspec
from litestar import Request

from gateway.wire.body_errors import BodyErrors
from gateway.wire.body_levels import Level, pruned
from gateway.wire.errors import InvalidRequest, UnsupportedMediaType

T = TypeVar("T", bound=msgspec.Struct)
R = TypeVar("R")

_BYTE_ORDER_MARKS = (b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")
INLINE_BYTES = 64 * 1024
"""Bodies up to this size are read on the event loop: that takes less time than a thread's turns would."""


class BodyDecoder(Generic[T]):
    """Decodes and checks bodies of one request type. Stateless after construction, so one is shared by all requests.

    ``elsewhere``: other routes and the types that they take, for whoever sends their fields here.
    """

    def __init__(self, struct: type[T], elsewhere: Mapping[str, type[msgspec.Struct]] | None = None) -> None:
        self._json = msgspec.json.Decoder(struct)
        self._level = Level.of(struct)
        self._errors = BodyErrors(struct, elsewhere or {})

    def decode(self, body: bytes) -> T:
        """Raises :class:`InvalidRequest`, also for a field that asks for something this gateway doesn't do."""
        try:
            try:
                value = self._json.decode(body)
            except msgspec.ValidationError:
                # Perhaps only because of what asks for nothing. Slower, so not done for every body.
                body = pruned(body, self._level)
                value = self._json.decode(body)
        except msgspec.ValidationError as error:
            raise self._errors.of(str(error), body) from None
        except RecursionError:
            raise InvalidRequest("The JSON body is nested too deeply.", code="invalid_json") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"The body is not valid JSON: {error}.{_hint(body)}", code="invalid_json") from None
        for param, no_op in self._level.unsupported(value):
            raise InvalidRequest(f"'{param}' {no_op.refusal}", param=param, code="unsupported_parameter")
        return value


def _hint(body: bytes) -> str:
    if not body:
        return " An empty body is not a request."
    if body.startswith(_BYTE_ORDER_MARKS):
        return " It begins with a byte order mark; send UTF-8 without one."
    return " NaN and Infinity are not JSON." if b"NaN" in body or b"Infinity" in body else ""


async def off_the_loop(read: Callable[[bytes], R], body: bytes) -> R:
    """``read(body)``, in a thread if the body is large: streams would notice the time that 70,000 messages take."""
    return read(body) if len(body) <= INLINE_BYTES else await asyncio.to_thread(read, body)


async def read_json(request: Request[Any, Any, Any]) -> bytes:
    """The body, if it says it is JSON.

    Insisting on the content type is also what keeps web pages from posting here: a browser sends a cross-origin
    ``application/json`` only after a CORS preflight, which this gateway doesn't answer.
    """
    content_type = request.headers.get("content-type", "")
    if content_type.partition(";")[0].strip().lower() != "application/json":
        shown = f"not '{content_type[:100]}'" if content_type else "but there is none"
        raise UnsupportedMediaType(f"Content-Type must be application/json, {shown}.", param=None)
    if (encoding := request.headers.get("content-encoding", "identity").lower()) != "identity":
        raise UnsupportedMediaType(f"Content-Encoding '{encoding[:100]}' is not supported; send the body as it is.")
    return await request.body()
