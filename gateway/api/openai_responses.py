"""``POST /v1/responses``: OpenAI's Responses API without its store, answered as a chat completion."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import Request, post
from litestar.response.base import ASGIResponse

from gateway.api.completions import CHAT_BODIES, ChatCall
from gateway.auth.guard import needs
from gateway.interfaces import responses_answer
from gateway.interfaces.chat import EventTranslator, in_words_of
from gateway.interfaces.responses_request import CHAT_NAMES, ResponsesRequest, as_chat
from gateway.serving.dispatch import dispatch
from gateway.serving.state import gateway_of
from gateway.wire.event_stream import EventStream
from gateway.wire.request_body import BodyDecoder, off_the_loop, read_json

_BODIES = BodyDecoder(ResponsesRequest)


class ResponsesCall(ChatCall):
    id_prefix = "resp_"


def _call(body: bytes) -> tuple[ResponsesRequest, ResponsesCall]:
    asked = _BODIES.decode(body)
    with in_words_of(CHAT_NAMES):
        return asked, ResponsesCall(CHAT_BODIES.decode(msgspec.json.encode(as_chat(asked))))


@post("/v1/responses", status_code=200, opt=needs("inference"))
async def create_response(request: Request[Any, Any, Any]) -> ASGIResponse:
    asked, call = await off_the_loop(_call, await read_json(request))
    with in_words_of(CHAT_NAMES):
        response = await dispatch(call, request, gateway_of(request))
    if isinstance(response, EventStream):
        return response.translated(EventTranslator(responses_answer.ResponsesWriter(asked)))
    body = responses_answer.whole(response.body, asked)
    return ASGIResponse(body=body, media_type="application/json", status_code=200)
