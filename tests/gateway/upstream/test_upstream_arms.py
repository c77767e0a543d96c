"""Arms over the whole gateway: what is measured, chosen, told and remembered; upstreams under a clock of the test's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from gateway.routing.spec import PLAIN, EngineMetrics, HealthCheck, UpstreamSpec, Variant
from gateway.serving.arms import PROBE_EVERY_S
from gateway.serving.controller import Controller
from gateway.serving.targets import Backends, UpstreamTarget
from gateway.upstream.engine_metrics import read_engine_metrics
from gateway.upstream.knobs import knobs
from policy.arms import COLD_REQUESTS
from policy.decision import decide
from policy.runtime import PolicyRuntime
from policy.spec import RequestFacts
from policy.statistics.snapshot import LiveStats
from telemetry.service import Telemetry
from tests.support.live_gateway import LiveGateway, running_gateway
from tests.support.paced_upstream import Clock, PacedUpstream

MODEL = "ours"
POLICY = b"version: 1\ndefaults: {control: 5%, fallback: {min_speedup: 1.05, window: 5s, hold: 10s, probe: 20%}}\n"
SPEC = Variant("spec-k4", "ngram", 4)


class Fleet:
    """A gateway over a plain and a speculative upstream."""

    def __init__(self, policy: bytes = POLICY, **changes: Any) -> None:
        self.clock = Clock()
        self.draw = 0.99
        self.plain = PacedUpstream(self.clock, 0.02)
        self.spec = PacedUpstream(self.clock, 0.01, a_chunk=4)
        self.controller = Controller(
            PolicyRuntime.from_text(policy),
            clock=self.clock,
            wall_clock=self.clock,
            replica="test",
            draw=lambda: self.draw,
        )
        self.targets = [
            self._target("a", PLAIN, self.plain, **changes),
            self._target("b", SPEC, self.spec, **changes),
        ]

    def _target(self, name: str, variant: Variant, transport: PacedUpstream, **changes: Any) -> UpstreamTarget:
        spec = UpstreamSpec(
            name,
            MODEL,
            "http://upstream.test/v1",
            upstream_model="theirs",
            health=HealthCheck(every_s=3600),
            variant=variant,
            **changes,
        )
        return UpstreamTarget(spec, clock=self.clock, transport=transport)


@contextmanager
def serving(fleet: Fleet) -> Iterator[LiveGateway]:
    backends = Backends(fleet.targets, frozenset())
    with running_gateway(backends=backends, controller=fleet.controller, telemetry=Telemetry.off()) as live:
        yield live


def ask(live: LiveGateway, path: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "temperature": 0, **body}
    response = live.http.post(path, json=asked)
    assert response.status_code == 200, response.text
    return response.json()


def arms_of(live: LiveGateway, count: int) -> list[str]:
    return [ask(live)["decoding"]["arm"]["arm"] for _ in range(count)]


def test_the_report_says_arm_evidence_rule_and_what_was_sent() -> None:
    fleet = Fleet()
    with serving(fleet) as live:
        arms_of(live, 2 * COLD_REQUESTS)
        fleet.clock.now += 7
        told = ask(live)["decoding"]
        arm = told["arm"]
        assert (arm["arm"], arm["kind"], arm["rule"]) == ("spec-k4", "speculative", "best")
        assert arm["reason"] in told["reason"]
        plain, spec = arm["evidence"]
        assert (plain["arm"], plain["ms_per_token"], plain["first_token_ms"]) == ("plain", 20.0, 100.0)
        assert (spec["arm"], spec["first_token_ms"]) == ("spec-k4", 100.0)
        # By tokens: eight chunks after the first have four each.
        assert spec["ms_per_token"] == 10.0
        assert spec["age_s"] == 7.0
        assert spec["requests"] == pytest.approx(3, abs=0.2)
        assert plain["expected_ms"] == pytest.approx(100 + 32 * 20, rel=0.01)
        assert told["sent"] == {}
        explained = ask(live, "/v1/decoding/explain")
        assert explained["plan"]["arm"]["arm"] == "spec-k4"
        assert explained["routing"]["candidates"][0]["reason"].startswith("is of arm 'plain'")
        record = live.http.get(f"/admin/decisions/{ask(live)['id']}").json()
        assert record["plan"]["arm"]["rule"] == "best"
        assert record["outcome"]["arm"]["arm"] == "spec-k4"
        listed = live.http.get("/admin/stats").json()["arms"]
        assert {each["arm"] for each in listed} == {"plain", "spec-k4"}


def test_a_streamed_answer_is_measured_and_told_as_well() -> None:
    fleet = Fleet()
    with serving(fleet) as live:
        with live.client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], stream=True
        ) as chunks:
            last = list(chunks)[-1]
        assert last.model_dump()["decoding"]["arm"]["rule"] == "cold"
        assert len(fleet.controller.statistics.arms.cells()) == 1


def test_explaining_remembers_nothing() -> None:
    fleet = Fleet()
    with serving(fleet) as live:
        for _ in range(20):
            ask(live, "/v1/decoding/explain")
        assert arms_of(live, 2) == ["plain", "spec-k4"]
        assert len(fleet.plain.requests) == 1


def test_a_swap_is_followed_and_a_dead_arm_left_at_once_without_a_failed_request() -> None:
    fleet = Fleet()
    with serving(fleet) as live:
        assert set(arms_of(live, 30)[6:]) <= {"spec-k4", "plain"}
        fleet.plain.pace_s, fleet.spec.pace_s = 0.01, 0.02
        fleet.draw = 0.0
        arms_of(live, 60)
        assert arms_of(live, 20).count("plain") >= 18
        fleet.plain.dead = True
        before = len(fleet.spec.requests)
        assert set(arms_of(live, 20)) == {"spec-k4"}
        assert len(fleet.spec.requests) == before + 20


def test_fallback_event_and_the_way_back_are_those_of_engines() -> None:
    fleet = Fleet()
    with serving(fleet) as live:

        def rounds(count: int) -> None:
            for _ in range(count):
                ask(live)
                live.in_loop(fleet.controller.background.count())

        def events() -> list[str]:
            return [each["kind"] for each in live.http.get("/admin/stats").json()["events"]]

        rounds(30)
        assert "fallback" not in events()
        fleet.spec.pace_s = 0.05
        # Who insists on drafting, by the policy or not, would not see it; the choice leaves the arm, and then asks it
        # again now and then, which is the evidence.
        fleet.draw = 0.0
        rounds(150)
        assert "fallback" in events()
        told = ask(live)["decoding"]["arm"]
        assert (told["arm"], told["rule"]) in {("plain", "fallback"), ("spec-k4", "probe")}
        fleet.spec.pace_s = 0.005
        fleet.draw = 0.95
        fleet.clock.now += PROBE_EVERY_S + 60
        rounds(60)
        assert "resumed" in events()
        assert arms_of(live, 10).count("spec-k4") >= 8


def test_a_client_may_ask_for_the_plain_arm() -> None:
    fleet = Fleet()
    with serving(fleet) as live:
        arms_of(live, 8)
        told = ask(live, decoding={"method": "vanilla"})["decoding"]["arm"]
        assert (told["arm"], told["rule"]) == ("plain", "method")
        assert "decoding" not in fleet.plain.requests[-1]


def test_knobs_of_the_policy_are_sent_and_told() -> None:
    policy = b"version: 1\ndefaults: {depth: 2}\n"
    fleet = Fleet(policy, dialect="llamacpp")
    with serving(fleet) as live:
        told = [ask(live)["decoding"] for _ in range(2)]
        assert [each["sent"] for each in told] == [{}, {"speculative.n_max": 2, "speculative.n_min": 0}]
        assert fleet.spec.requests[0]["speculative.n_max"] == 2


def test_only_what_narrows_is_sent() -> None:
    def sent(dialect: Any, variant: Variant | None, policy: bytes) -> dict[str, Any]:
        spec = PolicyRuntime.from_text(policy).spec
        decision = decide(spec, LiveStats(), RequestFacts("id", "m"), 0.0)
        return knobs(dialect, variant, decision)

    depth, plain = b"version: 1\ndefaults: {depth: 3}\n", b"version: 1\ndefaults: {method: vanilla}\n"
    assert sent("llamacpp", SPEC, b"version: 1\n") == {}
    assert sent("llamacpp", Variant("k2", "draft", 2), depth) == {}, "it drafts less anyway"
    assert sent("llamacpp", SPEC, plain) == {"speculative.n_max": 0, "speculative.n_min": 0}
    assert sent("llamacpp", PLAIN, plain) == {}
    assert sent("medusa-gateway", SPEC, depth) == {"decoding": {"heads": 3}}
    assert sent("medusa-gateway", None, depth) == {}, "more heads than it has would be refused"
    assert sent("medusa-gateway", None, plain) == {"decoding": {"method": "vanilla"}}
    assert sent("vllm", SPEC, depth) == {}


VLLM = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="m",engine="0"} 5.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{model_name="m",engine="0"} 3.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{model_name="m",engine="0"} 0.5
# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{engine="0"} 100.0
# TYPE vllm:spec_decode_num_draft_tokens counter
vllm:spec_decode_num_draft_tokens_total{engine="0"} 400.0
# TYPE vllm:spec_decode_num_accepted_tokens counter
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 100.0
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 30.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 70.0
"""


def test_figures_of_engines_are_read() -> None:
    figures = read_engine_metrics(VLLM)
    assert (figures.running, figures.waiting, figures.kv_use, figures.acceptance) == (5, 3, 0.5, 0.25)
    assert figures.accepted_at == (70, 30)
    later = read_engine_metrics(VLLM.replace("400.0", "500.0").replace(" 100.0", " 150.0"))
    assert later.since(figures).acceptance == 0.5
    assert later.since(figures).running == 5, "gauges are of now"
    llama = read_engine_metrics("llamacpp:requests_processing 2\nllamacpp:requests_deferred 1\n")
    assert (llama.running, llama.waiting, llama.acceptance) == (2, 1, None)


def test_an_engines_own_figures_are_its_load_and_explanation() -> None:
    fleet = Fleet(metrics=EngineMetrics(every_s=3600), max_running=10)
    fleet.spec.metrics = VLLM
    with serving(fleet) as live:
        while fleet.targets[1].engine_report() == {"age_s": None, "error": None}:
            live.in_loop(_turn())
        told = ask(live, "/v1/decoding/explain")
        assert [each["load"] for each in told["plan"]["arm"]["evidence"]][1] == 0.9
        backend = live.http.get("/admin/backends").json()["backends"][1]
        assert backend["engine"]["acceptance"] == 0.25


async def _turn() -> None:
    """One turn of the loop."""
