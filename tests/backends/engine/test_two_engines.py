"""Two models, and two engines of one model, in one process: the real engine on tiny models, by `open_backends`."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.routing.backends_file import parse_backends
from gateway.routing.spec import EngineSpec
from gateway.serving.startup import open_backends
from gateway.serving.targets import Backends
from tests.support.live_gateway import LiveGateway, running_gateway

FILE = """\
version: 1
backends:
  - {name: one, kind: engine, model: tiny-random, serves: first, max_running: 2, threads: 1}
  - {name: two, kind: engine, model: tiny-random, serves: first, max_running: 2, threads: 1}
  - {name: other, kind: engine, model: ./other, serves: second, max_running: 2, dtype: float32, threads: 1}
"""
HI: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def backends(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backends]:
    from backends.engine.loading import open_engine
    from backends.models.tiny import tiny_model, tiny_tokenizer

    folder = tmp_path_factory.mktemp("models")
    # The same architecture with other weights: an answer tells which model gave it.
    tiny_model(seed=7).save_pretrained(folder / "other")
    tiny_tokenizer()._hf.save_pretrained(folder / "other")

    def load(spec: EngineSpec) -> Any:
        return open_engine(replace(spec.options, served_name=spec.serves))

    opened = open_backends(parse_backends(FILE.encode(), str(folder / "b.yaml")), 4, load)
    yield opened
    for each in opened.engines:
        each.served.decoder.close()


@pytest.fixture(scope="module")
def gateway(backends: Backends) -> Iterator[LiveGateway]:
    with running_gateway(backends=backends) as live:
        yield live


def ask(gateway: LiveGateway, model: str, **arguments: Any) -> Any:
    settings = {"model": model, "messages": HI, "max_tokens": 40, "temperature": 0, **arguments}
    return gateway.client.chat.completions.create(**settings)


def test_each_model_answers_for_itself(gateway: LiveGateway) -> None:
    assert [each.id for each in gateway.client.models.list()] == ["first", "second"]
    first, second = ask(gateway, "first"), ask(gateway, "second")
    assert (first.model, second.model) == ("first", "second")
    assert first.choices[0].message.content != second.choices[0].message.content
    # tiny-random comes with heads, the saved model without.
    assert (first.decoding["method"], second.decoding["method"]) == ("medusa", "vanilla")


def test_engines_of_one_model_share_the_load_and_answer_alike(gateway: LiveGateway, backends: Backends) -> None:
    alone = {seed: ask(gateway, "first", temperature=1.0, seed=seed).choices[0].message.content for seed in range(8)}
    with ThreadPoolExecutor(8) as pool:
        answers = dict(
            zip(alone, pool.map(lambda seed: ask(gateway, "first", temperature=1.0, seed=seed), alone), strict=True)
        )
    assert {seed: each.choices[0].message.content for seed, each in answers.items()} == alone
    used = {each.decoding["reason"].rpartition("backend ")[2].partition(":")[0] for each in answers.values()}
    assert used == {"one", "two"}
    gateway.wait_idle()
    assert all(each.places.in_flight == 0 for each in backends.all)


def test_statistics_keep_models_apart(gateway: LiveGateway) -> None:
    for model in ("first", "second"):
        ask(gateway, model)
    gateway.in_loop(gateway.state.controller.background.count())
    counted = gateway.http.get("/admin/stats").json()["own_counters"]
    assert {key.partition("|")[0] for key in counted} == {"first", "second"}


def test_one_engine_stops_and_the_other_goes_on(gateway: LiveGateway, backends: Backends, tmp_path: Path) -> None:
    """Last: it leaves the engine closed."""
    backends["one"].served.decoder.close()  # type: ignore[union-attr]
    answered = ask(gateway, "first")
    assert "the only one that can take it (one its engine has stopped)" in answered.decoding["reason"]
    assert gateway.http.get("/readyz").status_code == 200
    backends["two"].served.decoder.close()  # type: ignore[union-attr]
    body = {"model": "first", "messages": HI}
    refused = gateway.http.post("/v1/chat/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unavailable")
    assert ask(gateway, "second").choices[0].message.content
    ready = gateway.http.get("/readyz")
    assert (ready.status_code, ready.json()["error"]["message"]) == (503, "No healthy backend for: first.")
