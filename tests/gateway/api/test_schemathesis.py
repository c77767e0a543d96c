"""Bodies made from the served OpenAPI document, good and broken, over the wire: nothing may end in a 5xx.

``positive_data_acceptance`` is left out: rules that span fields (min_tokens against max_tokens, the context window,
ids within the vocabulary) can't be said in JSON Schema, so a body that fits the schema may rightly be refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from tests.support.fakes import PATIENCE_S
from tests.support.live_gateway import LiveGateway, running_gateway

BOUNDED = settings(
    max_examples=150,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=8,
)


BODIES = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
]


@pytest.fixture(scope="module")
def gateway() -> Iterator[LiveGateway]:
    with running_gateway() as live:
        yield live


@pytest.fixture(scope="module")
def schema(gateway: LiveGateway) -> Any:
    return schemathesis.openapi.from_url(f"{gateway.url}/schema/openapi.json")


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("path", BODIES)
def test_generated_bodies(schema: Any, path: str, mode: GenerationMode) -> None:
    @settings(BOUNDED, max_examples=150 if path in BODIES[:2] else 50)
    @given(case=schema[path]["POST"].as_strategy(generation_mode=mode))
    def run(case: Any) -> None:
        case.call_and_validate(excluded_checks=[positive_data_acceptance], timeout=PATIENCE_S)

    run()


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/{model_id}", "/healthz", "/readyz", "/"])
def test_generated_reads(schema: Any, path: str) -> None:
    @settings(BOUNDED, max_examples=10)
    @given(case=schema[path]["GET"].as_strategy())
    def run(case: Any) -> None:
        case.call_and_validate(excluded_checks=[positive_data_acceptance], timeout=PATIENCE_S)

    run()


@pytest.mark.parametrize("path", BODIES)
def test_noise(gateway: LiveGateway, path: str) -> None:
    """Bytes that no schema leads to, and a good request with one field replaced by anything at all."""
    good: dict[str, Any] = {"model": "fake-model"}
    good |= {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}
    fields = st.sampled_from(["model", "messages", "prompt", "stop", "logit_bias", "decoding", "stream_options", "n"])
    http = gateway.http

    @settings(BOUNDED, max_examples=100)
    @given(raw=st.binary(max_size=60), field=fields, value=JSON)
    def run(raw: bytes, field: str, value: Any) -> None:
        headers = {"content-type": "application/json"}
        for response in (
            http.post(path, content=raw, headers=headers),
            http.post(path, json=good | {field: value}),
        ):
            assert response.status_code in (200, 400, 404), response.text

    run()
