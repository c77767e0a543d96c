"""``GET /v1/models``, health, readiness and the pointer at ``/``."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import Request, get
from litestar.params import FromPath
from litestar.response.base import ASGIResponse

from backends.types import ModelInfo
from gateway.errors import Unavailable, shutting_down
from gateway.openai_responses import Health, ModelCard, ModelList, Pointer
from gateway.state import gateway_of
from gateway.version import package_version


def model_card(info: ModelInfo) -> ModelCard:
    return ModelCard(
        id=info.name,
        created=info.created,
        owned_by="medusa-gateway",
        max_model_len=info.max_model_len,
        num_heads=info.num_heads,
        dtype=info.dtype,
        device=info.device,
    )


def _json(value: msgspec.Struct) -> ASGIResponse:
    return ASGIResponse(body=msgspec.json.encode(value), media_type="application/json", status_code=200)


@get("/v1/models")
async def list_models(request: Request[Any, Any, Any]) -> ASGIResponse:
    served = gateway_of(request).models.values()
    return _json(ModelList([model_card(model.decoder.info) for model in served]))


@get("/v1/models/{model_id:path}")
async def retrieve_model(request: Request[Any, Any, Any], model_id: FromPath[str]) -> ASGIResponse:
    # A path parameter, since hub ids have a slash in them; Litestar gives it with a leading one.
    return _json(model_card(gateway_of(request).served(model_id.removeprefix("/")).decoder.info))


@get("/healthz")
async def health(request: Request[Any, Any, Any]) -> ASGIResponse:
    """The process answers. Says nothing about the engine: restarting a busy process helps nobody."""
    return _json(Health("ok"))


@get("/readyz")
async def readiness(request: Request[Any, Any, Any]) -> ASGIResponse:
    gateway = gateway_of(request)
    if gateway.admission.draining:
        raise shutting_down()
    if not gateway.ready:
        raise Unavailable("No engine of this gateway is alive.")
    return _json(Health("ok"))


@get("/")
async def pointer(request: Request[Any, Any, Any]) -> ASGIResponse:
    return _json(Pointer("medusa-gateway", package_version(), sorted(gateway_of(request).models)))
