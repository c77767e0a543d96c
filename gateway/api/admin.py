"""What an operator asks a running gateway: the policy in force, what was measured, and why a request was decoded so.

Routes that say nothing of whom they are for are for keys with the admin scope; see ``gateway.auth``.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from litestar import Request, get, post
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath
from litestar.response.base import ASGIResponse

from gateway.api.completions import chat_call, completion_call
from gateway.api.responses import json_response
from gateway.auth.charging import refuse_early
from gateway.auth.guard import needs
from gateway.serving.call import Call
from gateway.serving.dispatch import refusal, route
from gateway.serving.fleet_lookup import FleetBusy
from gateway.serving.health import health
from gateway.serving.pipeline import Attempt
from gateway.serving.state import gateway_of
from gateway.wire.errors import APIError, InvalidRequest
from gateway.wire.request_body import off_the_loop, read_json
from policy import savings
from policy.config.problems import PolicyError
from policy.diff import differences
from policy.file.format import parse_policy
from policy.shared.redis_client import StoreUnavailable
from policy.spec import PolicySpec

MOST_LISTED = 1000
"""Decisions in one list."""
MOST_ASKED = 200
"""Characters of a name that other replicas are asked about."""
_NULL = msgspec.Raw(b"null")


class DecisionNotFound(APIError):
    status = 404
    type = "invalid_request_error"
    code = "decision_not_found"


class PolicyText(msgspec.Struct, forbid_unknown_fields=True):
    """Body of ``POST /admin/policy/validate``."""

    policy: str
    file: str = "policy.yaml"


@get("/admin/policy")
async def show_policy(request: Request[Any, Any, Any]) -> ASGIResponse:
    """The policy in force, and what became of the last edits."""
    runtime = gateway_of(request).controller.policy
    status = runtime.status
    rejection = status.rejection
    return json_response(
        {
            "file": status.file,
            "version": status.version,
            "loaded_at": status.loaded_at,
            "accepted": status.accepted,
            "rejected": status.rejected,
            "last_rejection": None
            if rejection is None
            else {"at": rejection.at, "problems": rejection.problems, "in_force": status.version},
            "rules": [rule.name for rule in runtime.spec.rules],
            "classes": sorted(runtime.spec.classes),
            "text": runtime.content.decode("utf-8"),
        }
    )


@get("/admin/stats")
async def show_stats(request: Request[Any, Any, Any]) -> ASGIResponse:
    """Statistics, fallbacks and events, and the health of what they come from."""
    controller = gateway_of(request).controller
    sync = controller.background.sync
    return json_response(
        {
            "health": health(controller),
            "access": gateway_of(request).access.as_dict(),
            "policy_version": controller.policy.spec.version,
            "fallback_count": controller.events.fallback_count,
            **controller.statistics.report(controller.clock()),
            "events": [event.as_dict() for event in controller.events.log],
            "rewritten_epochs": sync.rewritten_epochs if sync else 0,
            "own_counters": (own := controller.statistics.book.total()),
            "savings": savings.report(own, controller.savings, controller.policy.spec.cost),
        }
    )


@get("/admin/backends")
async def show_backends(request: Request[Any, Any, Any]) -> ASGIResponse:
    """Every backend: where it stands, what it holds, and how it did."""
    gateway = gateway_of(request)
    return json_response(
        {
            "ready": gateway.ready,
            "required": sorted(gateway.backends.required),
            "backends": [each.as_dict() for each in gateway.backends.all],
        }
    )


@get("/admin/decisions")
async def list_decisions(request: Request[Any, Any, Any]) -> ASGIResponse:
    """The last decisions of this replica, newest first; never what was asked or answered. ``limit``: how many."""
    asked = request.query_params.get("limit", "100")
    limit = int(asked) if asked.isascii() and asked.isdigit() and len(asked) <= 4 else 0
    if not 1 <= limit <= MOST_LISTED:
        raise InvalidRequest(f"'limit' must be an integer from 1 to {MOST_LISTED}.", param="limit")
    found = gateway_of(request).controller.decisions.latest(limit)
    return json_response({"decisions": [each.summary() for each in found]})


@get("/admin/decisions/{request_id:str}")
async def show_decision(request: Request[Any, Any, Any], request_id: FromPath[str]) -> ASGIResponse:
    """Why one request was decoded as it was, by the id of its answer or by its ``x-request-id``.

    Any replica answers: what it has not made itself it asks of the others, which takes up to three seconds.
    """
    controller = gateway_of(request).controller
    found, asked = controller.decision_on(request_id), ""
    if found is None and controller.background.fleet is not None:
        try:
            found = await controller.background.fleet.ask(request_id[:MOST_ASKED])
            asked = " No other replica has answered that it has it."
        except StoreUnavailable:
            asked = " Other replicas could not be asked: the store that they share does not answer."
        except FleetBusy:
            asked = " Other replicas could not be asked: too much is asked of them at once; try again."
    if found is None:
        raise DecisionNotFound(
            f"No decision on '{request_id[:200]}' is kept here: the last few thousand of a replica are.{asked}"
        )
    return json_response(found)


@post("/admin/policy/validate", status_code=200)
async def validate_policy(request: Request[Any, Any, Any]) -> ASGIResponse:
    """Check a policy without using it. 200 either way: ``valid`` says how it went."""
    try:
        body = msgspec.json.decode(await read_json(request), type=PolicyText)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"The body must be {{'policy': TEXT, 'file': NAME}}: {error}") from None
    gateway = gateway_of(request)

    def check(in_force: PolicySpec) -> tuple[str, list[str]]:
        spec = parse_policy(body.policy.encode("utf-8", "replace"), body.file[:200])
        return spec.version, differences(in_force, spec)

    try:
        # In a thread, and one at a time: reading YAML takes seconds for the largest, and streams go on meanwhile.
        async with gateway.validating:
            version, changes = await asyncio.to_thread(check, gateway.controller.policy.spec)
    except PolicyError as error:
        problems = [
            {"line": each.line, "path": each.path, "message": each.message, "text": line}
            for each, line in zip(error.problems, error.lines(), strict=True)
        ]
        return json_response({"valid": False, "problems": problems})
    return json_response({"valid": True, "version": version, "changes": changes})


@post("/v1/decoding/explain", status_code=200, opt=needs("inference"))
async def explain_decoding(request: Request[Any, Any, Any]) -> ASGIResponse:
    """What would be done with this request now, and why. Nothing is decoded or remembered.

    The body is that of a chat completion (``messages``) or of a text completion (``prompt``). It costs a tokenising, so
    it counts as a request of its key, though no tokens, and few are made at a time.
    """
    gateway = gateway_of(request)
    call = await off_the_loop(_call, await read_json(request))
    routed = route(call, request, gateway, dry=True)
    if routed.backend is None:
        raise refusal(call, routed, gateway)
    refuse_early(request.scope, gateway.access)
    ticket = gateway.explaining.admit(1)
    try:
        told = await Attempt(call, routed.backend, routed.class_name, None, request, gateway, routed.arm).explain(
            ticket
        )
        return json_response({**told, "routing": routed.choice.as_dict()})
    finally:
        ticket.close()


def _call(raw: bytes) -> Call:
    # Which of the two bodies it is must be known before it can be decoded strictly.
    try:
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        fields = {}
    # As everywhere, null means left out.
    return completion_call(raw) if fields.get("prompt", _NULL) != _NULL else chat_call(raw)


def admin_routes() -> list[HTTPRouteHandler]:
    """The handlers of this module, for the app."""
    return [show_policy, show_stats, show_backends, list_decisions, show_decision, validate_policy, explain_decoding]
