"""Heads that were trained for another backbone are served, and everybody who looks is told."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from backends.engine.loading import EngineOptions, OpenedEngine, open_engine
from backends.heads.format import backbone_fingerprint, save_heads
from backends.models.tiny import tiny_heads, tiny_model, tiny_tokenizer
from gateway.serving.call import ServedModel
from gateway.serving.controller import Controller
from gateway.serving.targets import Backends
from policy.runtime import PolicyRuntime
from telemetry.service import Telemetry
from tests.support.live_gateway import LiveGateway, running_gateway

DEFAULT_POLICY = Path("policy") / "assets" / "default.yaml"
ALERT = "heads-of-another-model"


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveGateway]:
    """Two models with the heads of one of them, under the policy that ships."""
    folder = tmp_path_factory.mktemp("models")
    heads = folder / "heads"
    for name, seed in (("theirs", 0), ("another", 1)):
        tiny_model(seed=seed).save_pretrained(folder / name)
        tiny_tokenizer()._hf.save_pretrained(folder / name)
    about = {"name": "theirs", "hidden_size": 64, "vocab_size": 260}
    fingerprint = backbone_fingerprint(tiny_model(seed=0))
    save_heads(tiny_heads(), heads, config={"backbone": {**about, "fingerprint": fingerprint}})

    def opened(name: str) -> OpenedEngine:
        options = EngineOptions(model=str(folder / name), heads=str(heads), dtype="float32", threads=1, max_running=2)
        return open_engine(options)

    engines = {name: opened(name) for name in ("theirs", "another")}
    served = {name: ServedModel(each.decoder, each.tokenizer) for name, each in engines.items()}
    controller = Controller(PolicyRuntime.from_text(DEFAULT_POLICY.read_bytes()))
    telemetry = Telemetry.from_environment({}, version="1", instance="replica")
    with running_gateway(backends=Backends.of_engines(served, 4), controller=controller, telemetry=telemetry) as live:
        yield live
    for each in engines.values():
        each.decoder.close()


@pytest.mark.parametrize("route", ["/healthz", "/readyz"])
def test_health_names_the_model(gateway: LiveGateway, route: str) -> None:
    answer = gateway.http.get(route)
    assert (answer.status_code, answer.json()) == (
        200,
        {
            "status": "degraded",
            "degraded": ["the heads of another were trained for another backbone"],
            "heads_stale": ["another"],
        },
    )


def test_operators_see_it_by_model_and_backend(gateway: LiveGateway) -> None:
    health = gateway.http.get("/admin/stats").json()["health"]
    assert (health["status"], health["heads_stale"]) == ("degraded", ["another"])
    backends = gateway.http.get("/admin/backends").json()["backends"]
    assert {each["name"]: each["heads_stale"] for each in backends} == {"theirs": False, "another": True}
    models = gateway.http.get("/v1/models").json()["data"]
    assert {each["id"]: each["heads_stale"] for each in models} == {"theirs": False, "another": True}


def test_the_alert_that_ships_fires_for_it(gateway: LiveGateway) -> None:
    deadline = time.monotonic() + 30.0
    while not (
        alerts := [each for each in gateway.http.get("/admin/alerts").json()["alerts"] if each["alert"] == ALERT]
    ):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert {each["model"]: each["state"] for each in alerts} == {"theirs": "inactive", "another": "firing"}
    metrics = gateway.http.get("/metrics").text
    assert 'medusa_heads_stale{backend="another",model="another"} 1.0' in metrics
    assert 'medusa_heads_stale{backend="theirs",model="theirs"} 0.0' in metrics


def test_stale_heads_still_answer_as_the_model_does(gateway: LiveGateway) -> None:
    def answer(method: str) -> str:
        body = {"model": "another", "prompt": "hello", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
        found = gateway.http.post("/v1/completions", json={**body, "decoding": {"method": method}})
        assert found.status_code == 200, found.text
        return found.json()["choices"][0]["text"]

    assert answer("medusa") == answer("vanilla")
