"""``POST /tokenize`` and ``/detokenize``: what the served model's tokenizer makes of a text, and back."""

from __future__ import annotations

import asyncio
from typing import Any

from litestar import Request, post
from litestar.response.base import ASGIResponse

from gateway.api.responses import json_response
from gateway.auth.guard import needs
from gateway.serving.state import GatewayState, gateway_of
from gateway.serving.targets import EngineBackend
from gateway.tools.asked import facts_of
from gateway.tools.rendering import template_messages
from gateway.wire.errors import InvalidRequest
from gateway.wire.prompts import encode_messages, encode_prompts, refuse_unknown_ids
from gateway.wire.request_body import BodyDecoder, off_the_loop, read_json
from gateway.wire.token_requests import Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest

_TOKENIZE, _DETOKENIZE = BodyDecoder(TokenizeRequest), BodyDecoder(DetokenizeRequest)
_INLINE_TOKENS = 1000


def engine_of(gateway: GatewayState, model: str | None) -> EngineBackend:
    """The engine whose tokenizer knows ``model``; None: the only model. Raises ModelNotFound or InvalidRequest."""
    if model is None:
        models = gateway.backends.models
        if len(models) != 1:
            raise InvalidRequest(
                f"'model' is required where several are served: {', '.join(models)}.",
                param="model",
                code="missing_required_parameter",
            )
        model = models[0]
    for backend in gateway.backends.of_model(model):
        if isinstance(backend, EngineBackend):
            return backend
    raise InvalidRequest(
        f"The tokens of {model} can't be told here: only an upstream serves it. Ask that server.",
        param="model",
        code="unsupported_parameter",
    )


@post(["/tokenize", "/v1/tokenize"], status_code=200, opt=needs("inference"))
async def tokenize(request: Request[Any, Any, Any]) -> ASGIResponse:
    body = await off_the_loop(_TOKENIZE.decode, await read_json(request))
    gateway = gateway_of(request)
    served = engine_of(gateway, body.model).served
    info, inline = served.decoder.info, gateway.settings.inline_tokenize_chars
    if body.messages is not None:
        messages = template_messages(body.messages, (), facts_of(served.tokenizer))
        ids = await encode_messages(served.tokenizer, messages, inline, info)
    else:
        # An empty text has no tokens, and may be asked for all the same.
        [ids] = await encode_prompts(served.tokenizer, [body.prompt], inline, info) if body.prompt else [()]
    strings = [served.tokenizer.decode([each]) for each in ids] if body.return_token_strs else None
    return json_response(Tokenized(len(ids), info.max_model_len, list(ids), strings))


@post(["/detokenize", "/v1/detokenize"], status_code=200, opt=needs("inference"))
async def detokenize(request: Request[Any, Any, Any]) -> ASGIResponse:
    body = await off_the_loop(_DETOKENIZE.decode, await read_json(request))
    served = engine_of(gateway_of(request), body.model).served
    if body.tokens:
        refuse_unknown_ids([body.tokens], served.decoder.info.vocab_size, "tokens")
    decode = served.tokenizer.decode
    small = len(body.tokens) <= _INLINE_TOKENS
    return json_response(Detokenized(decode(body.tokens) if small else await asyncio.to_thread(decode, body.tokens)))
