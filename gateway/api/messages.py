"""``POST /v1/messages`` and ``/v1/messages/count_tokens``: Anthropic's API, answered as a chat completion."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import Request, post
from litestar.response.base import ASGIResponse

from gateway.api.completions import CHAT_BODIES, ChatCall
from gateway.api.tokens import engine_of
from gateway.auth.guard import needs
from gateway.interfaces import messages_answer
from gateway.interfaces.chat import EventTranslator, in_words_of
from gateway.interfaces.messages_request import CHAT_NAMES, CountTokensRequest, MessagesRequest, as_chat
from gateway.serving.dispatch import dispatch
from gateway.serving.state import gateway_of
from gateway.wire.event_stream import EventStream
from gateway.wire.request_body import BodyDecoder, off_the_loop, read_json

_BODIES = BodyDecoder(MessagesRequest)
_COUNTS = BodyDecoder(CountTokensRequest)


class MessagesCall(ChatCall):
    id_prefix = "msg_"


def message_call(body: bytes) -> MessagesCall:
    """Raises :class:`InvalidRequest`."""
    return _as_call(_BODIES.decode(body))


def _counted(body: bytes) -> MessagesCall:
    return _as_call(_COUNTS.decode(body))


def _as_call(asked: CountTokensRequest) -> MessagesCall:
    with in_words_of(CHAT_NAMES):
        call = MessagesCall(CHAT_BODIES.decode(msgspec.json.encode(as_chat(asked))))
    if asked.thinking is not None:
        call.thinking = asked.thinking.type != "disabled"
    return call


@post("/v1/messages", status_code=200, opt=needs("inference"))
async def create_message(request: Request[Any, Any, Any]) -> ASGIResponse:
    call = await off_the_loop(message_call, await read_json(request))
    with in_words_of(CHAT_NAMES):
        response = await dispatch(call, request, gateway_of(request))
    if isinstance(response, EventStream):
        return response.translated(EventTranslator(messages_answer.MessagesWriter()))
    return ASGIResponse(body=messages_answer.whole(response.body), media_type="application/json", status_code=200)


@post("/v1/messages/count_tokens", status_code=200, opt=needs("inference"))
async def count_message_tokens(request: Request[Any, Any, Any]) -> ASGIResponse:
    gateway = gateway_of(request)
    call = await off_the_loop(_counted, await read_json(request))
    engine = engine_of(gateway, call.body.model)
    with in_words_of(CHAT_NAMES):
        [ids] = await call.encode(engine.served, gateway.settings.inline_tokenize_chars)
    counted = msgspec.json.encode({"input_tokens": len(ids)})
    return ASGIResponse(body=counted, media_type="application/json", status_code=200)
