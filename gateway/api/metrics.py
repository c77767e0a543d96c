"""Where the gateway and its telemetry meet: around each request, once a second, and at ``/metrics``."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from litestar import Litestar, Request, get
from litestar.enums import ScopeType
from litestar.middleware import ASGIMiddleware
from litestar.response.base import ASGIResponse
from litestar.types import ASGIApp, Receive, Scope, Send

from gateway.auth.guard import needs
from gateway.request_record import keep_record
from gateway.serving.backend import Backend
from gateway.serving.state import GatewayState, gateway_of
from gateway.serving.targets import UpstreamTarget
from gateway.version import package_version
from gateway.wire.errors import APIError, shutting_down
from gateway.wire.request_id import request_id_of
from policy.background import cancel_and_wait, pause
from telemetry.request import RequestRecord
from telemetry.service import Attached
from telemetry.snapshot import BackendState, Figures, Sources, Standing

logger = logging.getLogger("gateway.telemetry")

OBSERVE_EVERY_S = 1.0
LOOK_EVERY_S = 0.1
"""How often the event loop's lag is looked at."""
OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}
"""The routes whose requests have a trace, and ``gen_ai.operation.name`` of each."""


class MetricsOff(APIError):
    status = 404
    type = "invalid_request_error"
    code = "metrics_off"


class RequestTelemetry(ASGIMiddleware):
    """Opens a request's record and span, and closes them when the last byte of its response is out.

    Not in the way of chunks: what they say is noted by whoever reads them anyway.
    """

    scopes = (ScopeType.HTTP,)

    def __init__(self, state: GatewayState) -> None:
        self._state = state

    async def handle(self, scope: Scope, receive: Receive, send: Send, next_app: ASGIApp) -> None:
        operation = OPERATIONS.get(scope["path"])
        if operation is None:
            await next_app(scope, receive, send)
            return
        telemetry, state = self._state.telemetry, self._state
        record = RequestRecord(operation, scope["path"], telemetry.clock())
        record.request_id = request_id_of(scope, state.new_id)
        record.content = {} if telemetry.log_content else None
        keep_record(scope, record)
        request = telemetry.begin(record, scope["headers"])
        with Attached(request):
            try:
                await next_app(scope, receive, send)
            finally:
                record.tenant = scope.get("state", {}).get("tenant", "")
                if state.admission.aborted and record.error is None and not record.completed:
                    record.error = shutting_down().code
                telemetry.finish(request)


def take_figures(state: GatewayState) -> Figures:
    """The figures of now, which exporters and alerts then see."""
    controller = state.controller
    background = controller.background
    sync = background.sync
    sources = Sources(
        statistics=controller.statistics,
        decoders={each.name: each.served.decoder for each in state.backends.engines},
        models=state.backends.models,
        classes=controller.known_classes,
        policy=controller.policy.status,
        fallbacks=controller.events.fallbacks,
        store=sync.health if sync is not None and sync.health.remote else None,
        cost=controller.policy.spec.cost,
        saved_s=controller.savings.items(),
        alerts={} if background.alerting is None else background.alerting.exported(),
        standing=_standing(state),
    )
    figures = state.telemetry.observe(sources, controller.clock())
    background.evaluate_alerts(figures, state.telemetry.window)
    return figures


def _standing(state: GatewayState) -> Standing:
    controller, access, limiter = state.controller, state.access, state.access.limiter
    sync = controller.background.sync
    latency = {} if sync is None or not sync.health.remote else {"statistics": sync.last_s}
    latency |= {} if limiter.last_s is None else {"limits": limiter.last_s}
    hangs = {"policy": controller.background.file.hangs}
    if access.keys is not None:
        hangs["keys"] = access.keys_hang
    return Standing(
        backends=[_backend_state(each) for each in state.backends.all],
        keys=None if access.keys is None else access.keys.status,
        hangs=hangs,
        redis_latency_s={use: seconds for use, seconds in latency.items() if seconds is not None},
        decided_locally=limiter.decided_locally if limiter.health.shared is not None else None,
        build=(package_version(), controller.statistics.replica),
        draining=state.admission.draining,
        drain_aborted=state.admission.drain_aborted,
    )


def _backend_state(backend: Backend) -> BackendState:
    places = backend.places
    state = BackendState(backend.model, backend.name, backend.healthy, places.in_flight, places.capacity)
    if not isinstance(backend, UpstreamTarget):
        return state
    return replace(state, breaker=backend.breaker.state(backend.clock()), outcomes=backend.outcomes)


@asynccontextmanager
async def observed(state: GatewayState, _: Litestar) -> AsyncGenerator[None, None]:
    """Takes figures for as long as the app lives."""

    async def watch() -> None:
        while True:
            try:
                take_figures(state)
            except Exception:
                # Telemetry that fails is no reason to have none from then on.
                logger.exception("figures could not be taken; it is tried again")
            await pause(OBSERVE_EVERY_S)

    async def watch_the_loop() -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LOOK_EVERY_S
            await pause(LOOK_EVERY_S)
            state.telemetry.note_lag(loop.time() - due)

    watching = [asyncio.create_task(watch()), asyncio.create_task(watch_the_loop())]
    try:
        yield
    finally:
        await cancel_and_wait(*watching)


@get("/metrics", opt=needs("metrics"))
async def metrics(request: Request[Any, Any, Any]) -> ASGIResponse:
    """What Prometheus scrapes. In a thread: hundreds of series take milliseconds, which streams shall not wait for."""
    telemetry = gateway_of(request).telemetry
    found = await asyncio.to_thread(telemetry.exposition, request.headers.get("accept", ""))
    if found is None:
        raise MetricsOff("Metrics are switched off on this gateway.")
    body, media_type = found
    return ASGIResponse(body=body, status_code=200, headers={"content-type": media_type})
