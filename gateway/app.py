"""The Litestar application: routes, errors, limits. All it knows comes in through :class:`GatewayState`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from functools import partial

from litestar import Litestar
from litestar.config.cors import CORSConfig
from litestar.datastructures import State
from litestar.exceptions import HTTPException

from gateway import completions, models
from gateway.admin import admin_routes
from gateway.alert_routes import alert_routes
from gateway.auth.guard import ResponseHeaders, guard
from gateway.errors import handle_exception
from gateway.observing import RequestTelemetry, metrics, observed
from gateway.openapi import openapi_route
from gateway.request_id import RequestIdHeader
from gateway.state import GatewayState
from policy.limits import STANDING_HEADERS

ROUTES = (
    completions.create_chat_completion,
    completions.create_completion,
    models.list_models,
    models.retrieve_model,
    models.health,
    models.readiness,
    models.pointer,
    metrics,
)


@asynccontextmanager
async def _controlled(state: GatewayState, _: Litestar) -> AsyncGenerator[None, None]:
    """Background work, for as long as the app takes requests."""
    await state.controller.start({each.name: each.served.decoder for each in state.backends.engines})
    try:
        await state.access.start(state.controller.store_target)
        await state.backends.start(state.controller.note)
        yield
    finally:
        await state.access.stop()
        await state.backends.stop()
        await state.controller.stop()


def _cors(origins: Sequence[str]) -> CORSConfig | None:
    """No CORS headers at all, so no access for web pages, unless there are origins to allow."""
    if not origins:
        return None
    return CORSConfig(
        allow_origins=list(origins),
        allow_methods=["GET", "POST"],
        allow_headers=["authorization", "content-type", "x-request-id"],
        expose_headers=["x-request-id", "retry-after", *STANDING_HEADERS],
    )


def create_app(state: GatewayState) -> Litestar:
    """An app that serves ``state``. The caller keeps what is in it: only the controller stops with the app."""
    return Litestar(
        route_handlers=[
            *ROUTES,
            *admin_routes(),
            *alert_routes(),
            openapi_route(sorted(state.backends.models), keyed=state.access.keys is not None),
        ],
        state=State({"gateway": state}),
        lifespan=[partial(_controlled, state), partial(observed, state)],
        middleware=[RequestTelemetry(state)],
        exception_handlers={HTTPException: handle_exception, Exception: handle_exception},
        guards=[guard],
        before_send=[RequestIdHeader(state.new_id), ResponseHeaders()],
        cors_config=_cors(state.settings.cors_origins),
        request_max_body_size=state.settings.max_body_bytes,
        # The document is made in gateway.openapi; errors are logged in gateway.errors; LITESTAR_DEBUG is not heeded.
        openapi_config=None,
        logging_config=None,
        debug=False,
    )
