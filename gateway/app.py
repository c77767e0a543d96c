"""The Litestar application: routes, errors, limits. All it knows comes in through :class:`GatewayState`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial

from litestar import Litestar
from litestar.datastructures import State
from litestar.exceptions import HTTPException

from gateway import completions, models
from gateway.admin import admin_routes
from gateway.alert_routes import alert_routes
from gateway.errors import handle_exception
from gateway.observing import RequestTelemetry, metrics, observed
from gateway.openapi import openapi_route
from gateway.request_id import RequestIdHeader
from gateway.state import GatewayState

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
    """The controller's background work, for as long as the app takes requests."""
    await state.controller.start({each.name: each.served.decoder for each in state.backends.engines})
    try:
        await state.backends.start(state.controller.note)
        yield
    finally:
        await state.backends.stop()
        await state.controller.stop()


def create_app(state: GatewayState) -> Litestar:
    """An app that serves ``state``. The caller keeps what is in it: only the controller stops with the app."""
    return Litestar(
        route_handlers=[*ROUTES, *admin_routes(), *alert_routes(), openapi_route(sorted(state.backends.models))],
        state=State({"gateway": state}),
        lifespan=[partial(_controlled, state), partial(observed, state)],
        middleware=[RequestTelemetry(state)],
        exception_handlers={HTTPException: handle_exception, Exception: handle_exception},
        before_send=[RequestIdHeader(state.new_id)],
        request_max_body_size=state.settings.max_body_bytes,
        # The document is made in gateway.openapi; errors are logged in gateway.errors; LITESTAR_DEBUG is not heeded.
        openapi_config=None,
        logging_config=None,
        debug=False,
    )
