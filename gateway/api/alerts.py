"""Alerts for people: what fires, silences, acknowledgements. Under ``/admin``, so whatever guards that guards these."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from litestar import Request, delete, get, post
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath
from litestar.response.base import ASGIResponse

from gateway.api.responses import json_response
from gateway.serving.state import gateway_of
from gateway.wire.errors import APIError, InvalidRequest
from gateway.wire.request_body import read_json
from telemetry.alerts.manager import Alerting, shown
from telemetry.alerts.sharing import BoardUnavailable

_Name = Annotated[str, msgspec.Meta(max_length=256)]
_Text = Annotated[str, msgspec.Meta(max_length=500)]


class MuteNotFound(APIError):
    status = 404
    type = "invalid_request_error"
    code = "silence_not_found"


class StoreAway(APIError):
    status = 503
    type = "server_error"
    code = "store_unavailable"


class MuteBody(msgspec.Struct, forbid_unknown_fields=True, rename={"class_name": "class"}):
    """Body of the two POST routes. An empty name matches any; all empty would be every alert, which must be meant."""

    seconds: Annotated[float, msgspec.Meta(ge=1, le=30 * 86_400)]
    alert: _Name = ""
    model: _Name = ""
    class_name: _Name = ""
    all: bool = False
    by: _Text = ""
    comment: _Text = ""


def _alerting(request: Request[Any, Any, Any]) -> Alerting:
    alerting = gateway_of(request).controller.background.alerting
    if alerting is None:
        raise StoreAway("Alerts are not evaluated yet: the gateway is starting.")
    return alerting


@get("/admin/alerts")
async def show_alerts(request: Request[Any, Any, Any]) -> ASGIResponse:
    """This replica's alerts by state, what the fleet agrees on, who is told, silences and acknowledgements."""
    return json_response(_alerting(request).status(gateway_of(request).controller.policy.spec))


@post("/admin/alerts/silence", status_code=200)
async def silence(request: Request[Any, Any, Any]) -> ASGIResponse:
    """Keep alerts from receivers for a while. They are evaluated, logged and acted on all the same."""
    return await _mute(request, "silence")


@post("/admin/alerts/acknowledge", status_code=200)
async def acknowledge(request: Request[Any, Any, Any]) -> ASGIResponse:
    """Somebody sees to it: receivers are not reminded of alerts that fire now, but told when they are resolved."""
    return await _mute(request, "acknowledge")


@delete("/admin/alerts/silences/{mute_id:str}", status_code=200)
async def end_silence(request: Request[Any, Any, Any], mute_id: FromPath[str]) -> ASGIResponse:
    """End a silence or an acknowledgement before its time."""
    try:
        found = await _alerting(request).unmute(mute_id)
    except BoardUnavailable as error:
        raise StoreAway(f"The fleet can't be told, nothing has changed: {error}") from None
    if not found:
        raise MuteNotFound(f"There is no silence or acknowledgement '{mute_id[:200]}'.")
    return json_response({"ended": mute_id})


async def _mute(request: Request[Any, Any, Any], kind: Literal["silence", "acknowledge"]) -> ASGIResponse:
    try:
        body = msgspec.json.decode(await read_json(request), type=MuteBody)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"The body must be {{'alert': NAME, 'seconds': N}}: {error}") from None
    if body.all == bool(body.alert or body.model or body.class_name):
        raise InvalidRequest("Name an alert, a model or a class; or set 'all' to true, and name none.", param="alert")
    rules = {rule.name for rule in gateway_of(request).controller.policy.spec.alerts}
    if body.alert and body.alert not in rules:
        known = ", ".join(sorted(rules)) or "none"
        raise InvalidRequest(f"The policy has no alert '{body.alert}'; it has: {known}.", param="alert")
    try:
        mute = await _alerting(request).mute(
            kind,
            rule=body.alert,
            model=body.model,
            class_name=body.class_name,
            seconds=body.seconds,
            by=body.by,
            comment=body.comment,
        )
    except BoardUnavailable as error:
        raise StoreAway(f"The fleet can't be told, nothing has changed: {error}") from None
    return json_response(shown(mute))


def alert_routes() -> list[HTTPRouteHandler]:
    """The handlers of this module, for the app."""
    return [show_alerts, silence, acknowledge, end_silence]
