"""The Litestar application: routes, errors, limits. All it knows comes in through :class:`GatewayState`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial

from litestar import Litestar
from litestar.datastructures import State
from litestar.enums import HttpMethod
from litestar.exceptions import HTTPException
from litestar.types import ASGIApp, Message, Receive, Scope, Send

from gateway.api import completions, messages, models, openai_responses, tokens
from gateway.api.admin import admin_routes
from gateway.api.alerts import alert_routes
from gateway.api.metrics import RequestTelemetry, metrics, observed
from gateway.api.openapi import openapi_route
from gateway.api.pages import page, page_at_root, page_file
from gateway.auth.guard import ResponseHeaders, guard, needs_by_path
from gateway.http.cors import Cors
from gateway.http.error_responses import handle_exception
from gateway.http.stopping import stopped
from gateway.http.whereabouts import REPLICA_HEADER, VERSION_HEADER, Whereabouts
from gateway.serving.state import GatewayState
from gateway.version import package_version
from gateway.wire.request_id import RequestIdHeader
from policy.limits.arithmetic import STANDING_HEADERS

ROUTES = (
    completions.create_chat_completion,
    completions.create_completion,
    openai_responses.create_response,
    messages.create_message,
    messages.count_message_tokens,
    tokens.tokenize,
    tokens.detokenize,
    models.list_models,
    models.retrieve_model,
    models.health,
    models.readiness,
    models.pointer,
    page,
    page_file,
    metrics,
)

EXPOSED_HEADERS = ("x-request-id", REPLICA_HEADER, VERSION_HEADER, "retry-after", *STANDING_HEADERS)
"""What pages of other origins may read of an answer."""

STOP_S, CONTROLLER_STOP_S = 2.5, 8.0
"""Longer than what each of them waits for by itself, such as a Redis that does not answer. See ``server.EXIT_S``."""


@asynccontextmanager
async def _controlled(state: GatewayState, _: Litestar) -> AsyncGenerator[None, None]:
    """Background work, for as long as the app takes requests."""
    await state.controller.background.start({each.name: each.served.decoder for each in state.backends.engines})
    try:
        await state.access.start(state.controller.background.store_target)
        await state.backends.start(state.controller.events.note)
        yield
    finally:
        await stopped("the access control", state.access.stop(), STOP_S)
        await stopped("the backends", state.backends.stop(), STOP_S)
        await stopped("the controller", state.controller.background.stop(), CONTROLLER_STOP_S)


def _head_as_get(app: ASGIApp) -> ASGIApp:
    """Every GET route answers HEAD too (RFC 9110, 9.3.2). The server leaves the body out, and sends its length."""

    async def handle(scope: Scope, receive: Receive, send: Send) -> None:
        async def told(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    (name, value.replace(b"GET", b"GET, HEAD") if name == b"allow" else value)
                    for name, value in message["headers"]
                ]
            await send(message)

        if scope["type"] == "http" and scope["method"] == "HEAD":
            # A copy: by its own scope, the server knows what was asked for.
            scope = {**scope, "method": HttpMethod.GET}
        await app(scope, receive, told)

    return handle


def create_app(state: GatewayState) -> Litestar:
    """An app that serves ``state``. The caller keeps what is in it: only the controller stops with the app."""
    routes = [*ROUTES, *admin_routes(), *alert_routes()]
    needs_of = None if state.access.keys is None else needs_by_path(routes)
    app = Litestar(
        route_handlers=[*routes, openapi_route(sorted(state.backends.models), needs_of)],
        state=State({"gateway": state}),
        lifespan=[partial(_controlled, state), partial(observed, state)],
        middleware=[RequestTelemetry(state)],
        exception_handlers={HTTPException: handle_exception, Exception: handle_exception},
        guards=[guard],
        before_send=[
            RequestIdHeader(state.new_id),
            Whereabouts(state.controller.statistics.replica, package_version()),
            ResponseHeaders(),
        ],
        request_max_body_size=state.settings.max_body_bytes,
        # The document is made in gateway.api.openapi; errors are logged in gateway.wire.errors; LITESTAR_DEBUG is not
        # heeded.
        openapi_config=None,
        logging_config=None,
        debug=False,
    )
    # In here, so that what they answer gets the headers of all responses.
    app.asgi_handler = page_at_root(_head_as_get(app.asgi_handler))
    if origins := state.settings.cors_origins:
        app.asgi_handler = Cors(app.asgi_handler, origins, EXPOSED_HEADERS)
    return app
