"""``GET /v1/models``, health, readiness and the pointer at ``/`` and ``/v1``."""

from __future__ import annotations

from typing import Any

from litestar import Request, get
from litestar.params import FromPath
from litestar.response.base import ASGIResponse
from litestar.routes import HTTPRoute

from gateway.api.responses import json_response
from gateway.auth.guard import OPT, needs
from gateway.serving.backend import Backend
from gateway.serving.health import problems
from gateway.serving.state import GatewayState, gateway_of
from gateway.version import package_version
from gateway.wire.errors import Unavailable, shutting_down
from gateway.wire.responses import Health, ModelCard, ModelList, Pointer


def model_card(backend: Backend) -> ModelCard:
    """The card of a model by the backend that stands for it."""
    info = backend.info
    return ModelCard(
        id=info.name,
        created=info.created,
        owned_by="medusa-gateway",
        max_model_len=backend.max_model_len,
        num_heads=info.num_heads,
        dtype=info.dtype,
        device=info.device,
        adapted_from=info.adapted_from or None,
        heads_stale=info.heads_stale,
    )


def _health(gateway: GatewayState) -> Health:
    """For everybody, so in words: what names hosts and files is in ``GET /admin/stats``."""
    degraded = [*problems(gateway.controller), *gateway.access.problems()]
    degraded += [f"no healthy backend for {name}" for name in gateway.backends.missing]
    return Health("degraded" if degraded else "ok", degraded, gateway.controller.background.stale_heads)


@get("/v1/models", opt=needs("inference"))
async def list_models(request: Request[Any, Any, Any]) -> ASGIResponse:
    backends = gateway_of(request).backends
    return json_response(ModelList([model_card(backends.of_model(name)[0]) for name in backends.models]))


@get("/v1/models/{model_id:path}", opt=needs("inference"))
async def retrieve_model(request: Request[Any, Any, Any], model_id: FromPath[str]) -> ASGIResponse:
    # A path parameter, since hub ids have a slash in them; Litestar gives it with a leading one.
    return json_response(model_card(gateway_of(request).backends.of_model(model_id.removeprefix("/"))[0]))


@get(["/healthz", "/health", "/startupz"], opt=needs("open"))
async def health(request: Request[Any, Any, Any]) -> ASGIResponse:
    """The process answers, and says what is not as it should be. 200 all the same: a restart would mend none of it.

    While the model is loaded :mod:`gateway.http.starting` answers instead, and ``/startupz`` is 503."""
    return json_response(_health(gateway_of(request)))


@get("/readyz", opt=needs("open"))
async def readiness(request: Request[Any, Any, Any]) -> ASGIResponse:
    gateway = gateway_of(request)
    if gateway.admission.draining:
        raise shutting_down()
    if not gateway.ready:
        raise Unavailable(f"No healthy backend for: {', '.join(gateway.backends.missing)}.")
    return json_response(_health(gateway))


@get(["/", "/v1"], opt=needs("any"))
async def pointer(request: Request[Any, Any, Any]) -> ASGIResponse:
    models = sorted(gateway_of(request).backends.models)
    return json_response(Pointer("medusa-gateway", package_version(), models, routes=_public_routes(request)))


def _public_routes(request: Request[Any, Any, Any]) -> list[str]:
    """What there is for clients, such as ``GET /v1/models``; operators find theirs in the documentation."""
    return sorted(
        f"{method} {route.path_format}"
        for route in request.app.routes
        if isinstance(route, HTTPRoute)
        for handler in route.route_handlers
        if handler.opt.get(OPT) in ("open", "any", "inference")
        for method in handler.http_methods
    )
