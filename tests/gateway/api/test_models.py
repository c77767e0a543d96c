"""Models, health, request ids and the OpenAPI document."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import httpx
import openai
import pytest

from gateway.api.admin import admin_routes
from gateway.api.alerts import alert_routes
from gateway.api.openapi import openapi_document
from gateway.auth.guard import needs_by_path
from gateway.http.app import ROUTES
from tests.support.fakes import FakeDecoder
from tests.support.live_gateway import MODEL, LiveGateway, running_gateway


@pytest.fixture(scope="module")
def gateway() -> Iterator[LiveGateway]:
    with running_gateway(new_id=lambda: "made-here") as live:
        yield live


@pytest.fixture(scope="module")
def http(gateway: LiveGateway) -> Iterator[httpx.Client]:
    yield gateway.http


def test_models(gateway: LiveGateway) -> None:
    models = list(gateway.client.models.list())
    assert [model.id for model in models] == [MODEL]
    assert models[0] == gateway.client.models.retrieve(MODEL)
    assert models[0].to_dict()["num_heads"] == 4


def test_an_unknown_model(gateway: LiveGateway) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        gateway.client.models.retrieve("nope")
    assert caught.value.code == "model_not_found"


def test_a_model_with_a_slash_in_its_name() -> None:
    with running_gateway(decoder=FakeDecoder(name="org/model")) as live:
        assert live.http.get("/v1/models/org/model").json()["id"] == "org/model"
        assert live.http.get("/v1/models/org%2Fmodel").json()["id"] == "org/model"


def test_health_and_pointer(http: httpx.Client) -> None:
    assert http.get("/healthz").json() == {"status": "ok", "degraded": [], "heads_stale": []}
    assert http.get("/readyz").json() == {"status": "ok", "degraded": [], "heads_stale": []}
    pointer = http.get("/").json()
    assert pointer["models"] == [MODEL]
    assert http.get(pointer["openapi"]).json()["openapi"] == "3.1.0"


@pytest.mark.parametrize("path", ["/healthz", "/nowhere", "/v1/models/nope"])
def test_a_request_id_comes_back(http: httpx.Client, path: str) -> None:
    assert http.get(path, headers={"x-request-id": "abc-123:x/y"}).headers["x-request-id"] == "abc-123:x/y"
    assert http.get(path).headers["x-request-id"] == "made-here"


@pytest.mark.parametrize("given", [b"", b"with space", b"x" * 129, b"caf\xc3\xa9", b"<script>", b'a"b'])
def test_a_doubtful_request_id_is_replaced(http: httpx.Client, given: bytes) -> None:
    assert http.get("/healthz", headers={b"x-request-id": given}).headers["x-request-id"] == "made-here"


def test_refused_and_streamed_responses_have_a_request_id(http: httpx.Client) -> None:
    body = {"model": MODEL, "prompt": "x", "stream": True}
    assert http.post("/v1/completions", json=body, headers={"x-request-id": "s"}).headers["x-request-id"] == "s"
    assert http.post("/v1/completions", json={}, headers={"x-request-id": "r"}).headers["x-request-id"] == "r"


def test_openapi_describes_what_is_checked() -> None:
    document = openapi_document(["a", "b"])
    schema = document["components"]["schemas"]["ChatCompletionRequest"]
    assert schema["additionalProperties"]["type"] == "null"
    assert schema["properties"]["model"]["enum"] == ["a", "b"]
    assert schema["properties"]["functions"]["enum"] == [None, []]
    assert {"type": "number", "minimum": 0, "maximum": 2} in schema["properties"]["temperature"]["anyOf"]


@pytest.mark.parametrize(
    "module", ["gateway", "gateway.http.app", "gateway.http.server", "gateway.cli", "gateway.commands.serve"]
)
def test_the_gateway_imports_neither_torch_nor_scikit_learn(module: str) -> None:
    check = f"import {module}, sys; sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'sklearn')))"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_the_document_asks_for_the_scopes_that_routes_declare() -> None:
    needs_of = needs_by_path([*ROUTES, *admin_routes(), *alert_routes()])
    document = openapi_document(["a"], needs_of)
    asked = {path: each["security"] for path, found in document["paths"].items() for each in found.values()}
    assert set(asked) <= set(needs_of), "every path of the document has a route"
    assert asked["/healthz"] == asked["/readyz"] == []
    assert asked["/"] == [{"apiKey": []}]
    assert asked["/v1/models/{model_id}"] == asked["/v1/decoding/explain"] == [{"apiKey": ["inference"]}]
    for path in ("/metrics", "/admin/stats", "/admin/decisions/{request_id}", "/admin/alerts/silences/{mute_id}"):
        assert asked[path] == [{"apiKey": ["admin"]}]
    unkeyed = openapi_document(["a"])["paths"]
    assert not any(each["security"] for found in unkeyed.values() for each in found.values())
