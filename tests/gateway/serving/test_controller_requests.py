"""The policy on a request's way, over HTTP: decisions, what clients may choose, and what operators can ask."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from gateway.serving.controller import Controller
from policy.file.format import parse_policy
from policy.runtime import PolicyRuntime
from tests.support.live_gateway import MODEL, LiveGateway, running_gateway

POLICY = b"""
version: 1
defaults:
  nodes: 24
  temperature: {default: 0.5, max: 1.0}
classes:
  code: {nodes: 12, heads: 3, tree: 3x1x1}  # a tree that statistics can't change under the tests
  creative: {acceptance: typical}
rules:
  - name: locked
    when: {temperature: {min: 0.31, max: 0.39}}
    use: {client_override: false}
  - name: second-turns
    when: {turn: later}
    use: {method: vanilla}
  - name: hurry
    when: {prompt_tokens: {min: 150}}
    use: {deadline: 1ms}
"""


def classify(prompt: Any) -> str:
    text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    return "code" if "def " in text else "chat"


def controller(text: bytes = POLICY) -> Controller:
    return Controller(PolicyRuntime.from_text(text), classify=classify, replica="test")


@pytest.fixture(scope="module")
def gateway() -> Iterator[LiveGateway]:
    with running_gateway(controller=controller()) as live:
        yield live


def chat(gateway: LiveGateway, text: str = "hi", **more: Any) -> Any:
    messages = more.pop("messages", [{"role": "user", "content": text}])
    return gateway.http.post("/v1/chat/completions", json={"model": MODEL, "messages": messages, **more})


def decision_of(gateway: LiveGateway, response: Any) -> dict[str, Any]:
    return gateway.http.get(f"/admin/decisions/{response.json()['id']}").json()


def test_the_class_decides(gateway: LiveGateway) -> None:
    response = chat(gateway, "def f(): ...")
    plan = gateway.decoder.submitted[-1].plan
    assert (plan.num_heads, plan.max_nodes, plan.rule) == (3, 9, "classes.code")
    assert gateway.decoder.submitted[-1].stats_key == f"{MODEL}|code|low|policy"
    record = decision_of(gateway, response)
    assert record["facts"]["class_name"] == "code"
    assert record["decision"]["policy_version"] == response.json()["decoding"]["policy_version"] == plan.policy_version
    assert record["outcome"]["steps"] == response.json()["decoding"]["steps"]


def test_decisions_are_found_by_request_id_streamed_or_not(gateway: LiveGateway) -> None:
    for stream in (False, True):
        headers = {"x-request-id": f"mine-{stream}"}
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": stream}
        gateway.http.post("/v1/chat/completions", json=body, headers=headers)
        record = gateway.http.get(f"/admin/decisions/mine-{stream}").json()
        assert record["request_id"].startswith("chatcmpl-")
        assert record["outcome"]["steps"] > 0
        assert record["plan"]["rule"] == "default"
    missing = gateway.http.get("/admin/decisions/nobody")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "decision_not_found"


def test_temperature_default_and_clamp_reach_the_engine_and_the_report(gateway: LiveGateway) -> None:
    response = chat(gateway, temperature=1.7)
    assert gateway.decoder.submitted[-1].sampling.temperature == 1.0
    assert "temperature 1.7 (asked for) is clamped to 1 by the policy" in response.json()["decoding"]["reason"]
    assert decision_of(gateway, response)["decision"]["client_temperature"] == 1.7
    chat(gateway)
    assert gateway.decoder.submitted[-1].sampling.temperature == 0.5
    response = chat(gateway, temperature=1.7, decoding={"method": "vanilla"})
    assert "clamped to 1" in response.json()["decoding"]["reason"], "also where the plan is the client's own"


def test_rules_by_turn_and_length(gateway: LiveGateway) -> None:
    turns = [{"role": role, "content": "x"} for role in ("user", "assistant", "user")]
    response = chat(gateway, messages=turns)
    assert response.json()["decoding"]["method"] == "vanilla"
    assert response.json()["decoding"]["rule"] == "second-turns"
    assert gateway.decoder.submitted[-1].stats_key.endswith("|control")
    chat(gateway, "x" * 200)
    deadline_s = gateway.decoder.submitted[-1].deadline_s
    assert deadline_s is not None
    assert deadline_s <= 0.001


def test_the_client_may_choose_within_bounds(gateway: LiveGateway) -> None:
    response = chat(gateway, decoding={"tree": "2x1"})
    assert response.json()["decoding"]["rule"] == "request"
    assert gateway.decoder.submitted[-1].stats_key.endswith("|client")
    for decoding, param in (
        ({"tree": "4x4x4"}, "decoding.tree"),
        ({"heads": 4, "class": "code"}, "decoding.heads"),
        ({"class": "prose"}, "decoding.class"),
    ):
        refused = chat(gateway, decoding=decoding)
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["param"] == param
    assert "code" in chat(gateway, decoding={"class": "prose"}).json()["error"]["message"]


def test_a_class_hint(gateway: LiveGateway) -> None:
    chat(gateway, decoding={"class": "code"})
    assert gateway.decoder.submitted[-1].plan.num_heads == 3
    report = chat(gateway, decoding={"class": "creative"}).json()["decoding"]
    assert report["lossless"] is False
    report = chat(gateway, decoding={"class": "creative", "acceptance": "exact"}).json()["decoding"]
    assert report["lossless"] is True, "a client may always insist on exactness"


def test_where_the_policy_forbids_to_choose(gateway: LiveGateway) -> None:
    for decoding in ({"method": "vanilla"}, {"heads": 2}, {"class": "code"}, {"acceptance": "typical"}):
        refused = chat(gateway, temperature=0.35, decoding=decoding)
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert (error["code"], error["param"]) == ("not_allowed_by_policy", f"decoding.{next(iter(decoding))}")
        assert "locked" in error["message"]
    assert chat(gateway, temperature=0.35, decoding={"acceptance": "exact", "deadline_ms": 60_000}).status_code == 200


def test_text_completions_are_classified_too(gateway: LiveGateway) -> None:
    gateway.http.post("/v1/completions", json={"model": MODEL, "prompt": ["def f(): ...", "x"]})
    assert gateway.decoder.submitted[-1].stats_key == f"{MODEL}|code|low|policy"
    gateway.http.post("/v1/completions", json={"model": MODEL, "prompt": [1, 2, 3]})
    assert gateway.decoder.submitted[-1].stats_key == f"{MODEL}|unclassified|low|policy"


def test_a_policy_is_checked_off_the_loop_and_one_at_a_time(
    gateway: LiveGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one is being read, health is told and answers go on."""
    reading, go_on, now, most = threading.Event(), threading.Event(), 0, 0

    def slow(content: bytes, file: str) -> Any:
        nonlocal now, most
        now, most = now + 1, max(most, now + 1)
        reading.set()
        assert go_on.wait(30)
        now -= 1
        return parse_policy(content, file)

    monkeypatch.setattr("gateway.api.admin.parse_policy", slow)
    with ThreadPoolExecutor(3) as pool:
        asked = [
            pool.submit(gateway.http.post, "/admin/policy/validate", json={"policy": POLICY.decode()}) for _ in range(3)
        ]
        assert reading.wait(30)
        assert gateway.http.get("/healthz").status_code == 200
        assert chat(gateway).status_code == 200
        go_on.set()
        assert [each.result().json()["changes"] for each in asked] == [[], [], []]
    assert most == 1


def test_explain_decodes_nothing(gateway: LiveGateway) -> None:
    submitted = len(gateway.decoder.submitted)
    body = {"model": MODEL, "messages": [{"role": "user", "content": "def f(): ..."}], "temperature": 1.5}
    told = gateway.http.post("/v1/decoding/explain", json=body).json()
    assert told["decision"]["rule"] == "classes.code"
    assert told["plan"]["max_nodes"] == 9
    assert told["decision"]["temperature"] == 1.0
    assert told["facts"]["prompt_tokens"] > 10
    told = gateway.http.post(
        "/v1/decoding/explain", json={"model": MODEL, "prompt": "x", "decoding": {"method": "vanilla"}}
    ).json()
    assert told["plan"]["rule"] == "request"
    assert len(gateway.decoder.submitted) == submitted
    for broken in ({"model": MODEL}, {"model": MODEL, "prompt": "x", "colour": 1}, {"model": "no", "prompt": "x"}):
        assert gateway.http.post("/v1/decoding/explain", json=broken).status_code in (400, 404)
    assert gateway.http.post(
        "/v1/decoding/explain", content=b"{", headers={"content-type": "application/json"}
    ).is_error


def test_the_policy_in_force_is_shown(gateway: LiveGateway) -> None:
    shown = gateway.http.get("/admin/policy").json()
    assert shown["text"] == POLICY.decode()
    assert shown["rules"] == ["locked", "second-turns", "hurry"]
    assert (shown["rejected"], shown["last_rejection"]) == (0, None)


def test_a_policy_can_be_checked_without_using_it(gateway: LiveGateway) -> None:
    def check(text: str) -> Any:
        return gateway.http.post("/admin/policy/validate", json={"policy": text, "file": "new.yaml"}).json()

    good = check(POLICY.decode().replace("nodes: 12", "nodes: 16"))
    assert good["valid"] is True
    assert good["changes"] == ["classes.code.nodes.high: 12 -> 16"]
    bad = check("version: 1\ndefaults:\n  head: 3\n")
    assert bad["valid"] is False
    assert bad["problems"][0]["line"] == 3
    assert bad["problems"][0]["text"] == "new.yaml:3: defaults.head: unknown field; did you mean 'heads'?"
    assert gateway.http.post("/admin/policy/validate", json={"text": "x"}).status_code == 400


def test_statistics_are_counted_and_shown(gateway: LiveGateway) -> None:
    chat(gateway, "def f(): ...")
    gateway.in_loop(gateway.state.controller.background.count())
    shown = gateway.http.get("/admin/stats").json()
    (code,) = [each for each in shown["classes"] if each["class"] == "code"]
    assert code["tokens_per_step"] > 2
    assert code["speedup"] > 2
    assert code["fallback"]["mode"] == "speculating"
    assert shown["health"]["classifier"] is True
    assert "memory" in shown["health"]["store"]["name"]
    assert any(key.startswith(f"{MODEL}|code|") for key in shown["own_counters"])


def test_a_control_group_decodes_vanilla() -> None:
    with running_gateway(controller=controller(b"version: 1\ndefaults: {control: 50%}\n")) as live:
        methods = [chat(live).json()["decoding"]["method"] for _ in range(40)]
    assert 5 < methods.count("vanilla") < 35
