"""The OpenAPI document, made from the msgspec structs that decode the requests: it can't drift from what is checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from litestar import get
from litestar.handlers import HTTPRouteHandler
from litestar.response.base import ASGIResponse

from gateway.api.openapi_admin import admin_paths, security_of, security_schemes
from gateway.auth.access import Need
from gateway.auth.guard import needs
from gateway.interfaces.messages_request import CountTokensRequest, MessagesRequest
from gateway.interfaces.responses_request import ResponsesRequest
from gateway.version import package_version
from gateway.wire.errors import ErrorBody
from gateway.wire.requests import ChatCompletionRequest, CompletionRequest
from gateway.wire.responses import ChatCompletion, Completion, Health, ModelCard, ModelList, Pointer, RemoteReport
from gateway.wire.token_requests import Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest

_BODIES: tuple[type[msgspec.Struct], ...] = (
    ChatCompletionRequest,
    CompletionRequest,
    ResponsesRequest,
    MessagesRequest,
    CountTokensRequest,
    TokenizeRequest,
    DetokenizeRequest,
)
"""What clients send."""

_REF = "#/components/schemas/{name}"

_ERRORS = {
    400: "The request is refused; the message names the field and how to mend it.",
    401: "There is no API key, or none that is in force.",
    403: "The API key has not the scope that this route needs.",
    404: "No such model or route.",
    408: "The request did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not application/json.",
    429: "The queue is full, or a limit of the API key is reached. Retry-After says when to try again.",
    431: "The request's line and headers are too large.",
    502: "The upstream that answers for this model failed.",
    504: "The upstream that answers for this model took too long.",
    500: "The engine or the gateway failed.",
    503: "Draining, or the engine is gone. Try again, elsewhere if possible.",
}


def openapi_document(models: Sequence[str], needs_of: Mapping[str, Need] | None = None) -> dict[str, Any]:
    """The document for a gateway that serves ``models``. ``needs_of``: what each path's route needs, where the gateway
    asks for API keys (:func:`gateway.auth.guard.needs_by_path`)."""
    structs: list[type[msgspec.Struct]] = [*_BODIES, ChatCompletion, Completion, Tokenized, Detokenized]
    structs += [ModelList, ModelCard, Health, Pointer, ErrorBody, RemoteReport]
    _, schemas = msgspec.json.schema_components(structs, ref_template=_REF)
    if models:
        for body in _BODIES:
            schemas[body.__name__]["properties"]["model"] = {"type": "string", "enum": list(models)}
    inner = ("StreamOptions", "DecodingOptions", "ResponseFormat", "JsonSchemaFormat", "StructuredOutputs")
    for name in [*(body.__name__ for body in _BODIES), *inner]:
        schemas[name]["additionalProperties"] = {"type": "null", "description": "null always means left out."}
    for name in ("ChatMessage", "TextPart"):
        # An assistant's has whatever its server added; that it is an assistant's takes too many words of schema.
        schemas[name]["additionalProperties"] = {"description": "null, or anything in an assistant's message."}
    for name in ("ChatCompletion", "Completion"):
        # msgspec has no union of two structs without a tag; usage is null where an upstream counted nothing.
        either = [schemas[name]["properties"]["decoding"], {"$ref": _REF.format(name="RemoteReport")}]
        schemas[name]["properties"]["decoding"] = {"anyOf": either}
        usage = [schemas[name]["properties"]["usage"], {"type": "null"}]
        schemas[name]["properties"]["usage"] = {"anyOf": usage}
    name_parameter = {
        "name": "model_id",
        "in": "path",
        "required": True,
        "schema": {"type": "string", "minLength": 1},
        "description": "A served name; a slash in it needs no escaping.",
    }
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "medusa-gateway",
            "version": package_version(),
            "description": "OpenAI-compatible completions, decoded with Medusa trees or vanilla. Fields that are not "
            "listed are refused by name, unless they are null. `decoding` is an extension in requests and responses.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": {
            "/v1/chat/completions": {
                "post": _completion("createChatCompletion", "ChatCompletionRequest", "ChatCompletion")
            },
            "/v1/completions": {"post": _completion("createCompletion", "CompletionRequest", "Completion")},
            "/v1/responses": {"post": _completion("createResponse", "ResponsesRequest", None)},
            "/v1/messages": {"post": _completion("createMessage", "MessagesRequest", None, error=None)},
            "/v1/messages/count_tokens": {"post": _told("countMessageTokens", "CountTokensRequest", None, error=None)},
            **{
                f"{base}/{name}": {"post": _told(f"{name}{base[1:].title()}", f"{name.title()}Request", result)}
                for base in ("", "/v1")
                for name, result in (("tokenize", "Tokenized"), ("detokenize", "Detokenized"))
            },
            "/v1/models": {"get": _read("listModels", "ModelList")},
            "/v1/models/{model_id}": {
                "get": {**_read("retrieveModel", "ModelCard", 404), "parameters": [name_parameter]}
            },
            "/healthz": {"get": _read("health", "Health")},
            "/health": {"get": _read("healthAlias", "Health")},
            "/startupz": {"get": _read("started", "Health", 503)},
            "/readyz": {"get": _read("readiness", "Health", 503)},
            "/": {"get": _read("pointer", "Pointer")},
            "/v1": {"get": _read("apiPointer", "Pointer")},
            "/ui": {"get": _page("page", "The page for people; a browser gets it at / too.")},
            "/ui/{name}": {
                "get": {
                    **_page("pageFile", "A file of the page, the same for everybody."),
                    "parameters": [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}],
                }
            },
            **admin_paths(_responses(tuple(_ERRORS))),
        },
        "components": {"schemas": schemas, "securitySchemes": security_schemes()},
    }
    for path, operations in document["paths"].items():
        asked = [] if needs_of is None else security_of(needs_of[path])
        for operation in operations.values():
            operation["security"] = asked
            if asked:
                operation["responses"] |= _responses((401, 403))
    return document


def _schema(name: str | None) -> dict[str, Any]:
    """None: an object as Anthropic's API, or OpenAI's, has it."""
    return {"application/json": {"schema": {"$ref": _REF.format(name=name)} if name else {"type": "object"}}}


def _responses(statuses: Sequence[int], error: str | None = "ErrorBody") -> dict[str, Any]:
    return {str(status): {"description": _ERRORS[status], "content": _schema(error)} for status in statuses}


def _read(operation: str, result: str, *errors: int) -> dict[str, Any]:
    return {
        "operationId": operation,
        "responses": {"200": {"description": "As asked.", "content": _schema(result)}, **_responses((400, *errors))},
    }


def _page(operation: str, summary: str) -> dict[str, Any]:
    return {
        "operationId": operation,
        "summary": summary,
        "responses": {"200": {"description": summary, "content": {"text/html": {}}}, **_responses((400, 404))},
    }


def _told(operation: str, body: str, result: str | None, error: str | None = "ErrorBody") -> dict[str, Any]:
    return {
        "operationId": operation,
        "requestBody": {"required": True, "content": _schema(body)},
        "responses": {
            "200": {"description": "As asked.", "content": _schema(result)},
            **_responses(tuple(_ERRORS), error),
        },
    }


def _completion(operation: str, body: str, result: str | None, error: str | None = "ErrorBody") -> dict[str, Any]:
    events = {
        "schema": {
            "type": "object",
            "description": "One event. `data` is a chunk in JSON; that of the last event is `[DONE]`.",
            "properties": {"data": {"type": "string"}},
            "required": ["data"],
        }
    }
    success = {
        "description": "The answer, as server-sent events if `stream` is true.",
        "content": {**_schema(result), "text/event-stream": events},
    }
    told = _told(operation, body, result, error)
    told["responses"]["200"] = success
    return told


def openapi_route(models: Sequence[str], needs_of: Mapping[str, Need] | None = None) -> HTTPRouteHandler:
    """``GET /schema/openapi.json``, encoded once; ``/openapi.json`` is where other servers have it."""
    document = msgspec.json.encode(openapi_document(models, needs_of))

    @get(["/schema/openapi.json", "/openapi.json"], opt=needs("any"))
    async def openapi_json() -> ASGIResponse:
        return ASGIResponse(body=document, media_type="application/json", status_code=200)

    return openapi_json
