"""The operators' part of the OpenAPI document: routes whose answers are for people and dashboards, in outline."""

from __future__ import annotations

from typing import Any

from gateway.auth.access import Need
from gateway.auth.keyfile import SCOPES

SECURITY_SCHEME = "apiKey"


def security_schemes() -> dict[str, Any]:
    return {
        SECURITY_SCHEME: {
            "type": "http",
            "scheme": "bearer",
            "description": f"A key of the gateway's key file. Scopes: {', '.join(SCOPES)}. Without a key file none "
            "is asked for.",
        }
    }


def security_of(need: Need) -> list[dict[str, list[str]]]:
    """What a route with this need asks for where there is a key file: the scopes that its key must have."""
    if need == "open":
        return []
    scopes: dict[Need, list[str]] = {"any": [], "metrics": ["admin"]}
    return [{SECURITY_SCHEME: scopes.get(need, [need])}]


def admin_paths(errors: dict[str, Any]) -> dict[str, Any]:
    """``errors``: the response to refused requests, by status."""

    def operation(name: str, summary: str, body: dict[str, Any] | None = None, *more: str) -> dict[str, Any]:
        found = {
            "operationId": name,
            "summary": summary,
            "responses": {
                "200": {"description": summary, "content": {"application/json": {"schema": {"type": "object"}}}},
                **{status: errors[status] for status in ("400", *more)},
            },
        }
        if body is not None:
            found["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
        return found

    text = {"type": "string"}
    policy = {
        "type": "object",
        "additionalProperties": False,
        "required": ["policy"],
        "properties": {"policy": text, "file": text},
    }
    either = {"anyOf": [{"$ref": f"#/components/schemas/{name}Request"} for name in ("ChatCompletion", "Completion")]}
    request_id = {"name": "request_id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    mute_id = {**request_id, "name": "mute_id"}
    mute = {"type": "object"}
    refused = ("413", "415")
    metrics = operation("metrics", "What Prometheus scrapes.", None, "404")
    metrics["responses"]["200"]["content"] = {"text/plain": {"schema": text}}
    return {
        "/admin/policy": {"get": operation("showPolicy", "The policy in force, and the last edit that was refused.")},
        "/admin/policy/validate": {"post": operation("validatePolicy", "A policy's problems.", policy, *refused)},
        "/admin/stats": {"get": operation("showStats", "Statistics, fallbacks, events, health in detail.")},
        "/admin/backends": {"get": operation("showBackends", "Every backend, its health and load.")},
        "/admin/decisions": {
            "get": {
                **operation("listDecisions", "The last decisions, newest first."),
                "parameters": [
                    {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": 1000}}
                ],
            }
        },
        "/admin/decisions/{request_id}": {
            "get": {
                **operation("showDecision", "Why a request was decoded as it was.", None, "404"),
                "parameters": [request_id],
            }
        },
        "/admin/alerts": {"get": operation("showAlerts", "Alerts, their states and mutes.")},
        "/admin/alerts/silence": {"post": operation("silenceAlert", "Silence alerts.", mute, "404", *refused)},
        "/admin/alerts/acknowledge": {"post": operation("ackAlert", "Take an alert on.", mute, "404", *refused)},
        "/admin/alerts/silences/{mute_id}": {
            "delete": {**operation("endSilence", "End a silence.", None, "404"), "parameters": [mute_id]}
        },
        "/metrics": {"get": metrics},
        "/v1/decoding/explain": {
            "post": operation(
                "explainDecoding",
                "What would be done with this request, and why.",
                either,
                "404",
                "429",
                "503",
                *refused,
            )
        },
    }
