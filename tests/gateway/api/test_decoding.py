"""The ``decoding`` extension: how a request asks for a plan, and how the answer reports what was done."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from backends.tree import CandidateTree
from backends.types import DecodingPlan, GenerationStats, ModelInfo
from gateway.serving.controller import Controller
from gateway.serving.planning import check_options, plan_for
from gateway.serving.results import ChoiceResult, decoding_report
from gateway.wire.errors import InvalidRequest
from gateway.wire.requests import DecodingOptions
from gateway.wire.validation import choice_seed
from policy.spec import RequestFacts
from tests.support.fakes import FakeDecoder
from tests.support.live_gateway import MODEL, LiveGateway, running_gateway

INFO = ModelInfo("m", max_model_len=100, vocab_size=1000, num_heads=4, dtype="float32", device="cpu")
HEADLESS = replace(INFO, num_heads=0)
REPORT_FIELDS = {
    "method",
    "heads",
    "nodes",
    "steps",
    "accepted_tokens_per_step",
    "drafted_tokens",
    "accepted_draft_tokens",
    "accepted_lookup_tokens",
    "drafted_grammar_tokens",
    "accepted_grammar_tokens",
    "speedup_estimate",
    "lossless",
    "reason",
    "rule",
    "policy_version",
    "adapted_from",
}


@pytest.fixture(scope="module")
def gateway() -> Iterator[LiveGateway]:
    with running_gateway() as live:
        yield live


def ask(gateway: LiveGateway, decoding: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    answer = gateway.client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hi"}],
        temperature=0,
        extra_body={} if decoding is None else {"decoding": decoding},
        **more,
    )
    return answer.to_dict()


def test_medusa_is_the_default(gateway: LiveGateway) -> None:
    report: Any = ask(gateway)["decoding"]
    assert set(report) == REPORT_FIELDS
    assert (report["method"], report["heads"], report["lossless"], report["rule"]) == ("medusa", 4, True, "default")
    assert report["accepted_tokens_per_step"] > 2
    assert report["accepted_draft_tokens"] <= report["drafted_tokens"]
    assert "Medusa heads" in report["reason"]


def test_the_answer_does_not_depend_on_the_plan(gateway: LiveGateway) -> None:
    plans = [None, {"method": "vanilla"}, {"heads": 1}, {"tree": "4x2x1"}, {"tree": [[0], [0, 0], [1]]}]
    contents = [ask(gateway, plan)["choices"][0]["message"]["content"] for plan in plans]
    assert len(set(contents)) == 1


def test_vanilla_on_request(gateway: LiveGateway) -> None:
    report: Any = ask(gateway, {"method": "vanilla"})["decoding"]
    assert (report["method"], report["heads"], report["nodes"], report["rule"]) == ("vanilla", 0, 0, "request")
    assert report["accepted_tokens_per_step"] == 1.0
    assert report["speedup_estimate"] == 1.0


def test_a_tree_reaches_the_engine(gateway: LiveGateway) -> None:
    report: Any = ask(gateway, {"method": "medusa", "tree": "3x1"})["decoding"]
    assert gateway.decoder.submitted[-1].plan.tree == CandidateTree.from_branching([3, 1])
    assert (report["heads"], report["nodes"]) == (2, 6)
    assert report["reason"] == "the request set method, tree"


def test_typical_acceptance_is_labelled_lossy(gateway: LiveGateway) -> None:
    report: Any = ask(gateway, {"acceptance": "typical"})["decoding"]
    assert gateway.decoder.submitted[-1].plan.acceptance == "typical"
    assert report["lossless"] is False


def test_counts_are_summed_over_choices(gateway: LiveGateway) -> None:
    one: Any = ask(gateway)["decoding"]
    three: Any = ask(gateway, n=3)["decoding"]
    for field in ("steps", "drafted_tokens", "accepted_draft_tokens"):
        assert three[field] == 3 * one[field]
    assert three["accepted_tokens_per_step"] == one["accepted_tokens_per_step"]


def test_a_model_without_heads() -> None:
    with running_gateway(decoder=FakeDecoder(num_heads=0)) as live:
        report: Any = ask(live)["decoding"]
        assert (report["method"], report["reason"]) == ("vanilla", "fake-model has no Medusa heads")
        response = live.http.post(
            "/v1/completions", json={"model": MODEL, "prompt": "x", "decoding": {"method": "medusa"}}
        )
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "decoding.method"


@pytest.mark.parametrize(
    ("options", "info", "param"),
    [
        (DecodingOptions(method="medusa"), HEADLESS, "decoding.method"),
        (DecodingOptions(heads=1), HEADLESS, "decoding.heads"),
        (DecodingOptions(tree="1"), HEADLESS, "decoding.tree"),
        (DecodingOptions(heads=5), INFO, "decoding.heads"),
        (DecodingOptions(tree=[[0], [0, 0]], heads=1), INFO, "decoding.tree"),
        (DecodingOptions(tree=[[200]]), replace(INFO, vocab_size=100), "decoding.tree"),
        (DecodingOptions(method="vanilla", acceptance="typical"), INFO, "decoding.acceptance"),
    ],
)
def test_plans_that_cannot_be(options: DecodingOptions, info: ModelInfo, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_options(options, info)
    assert caught.value.param == param


def planned(options: DecodingOptions | None, info: ModelInfo) -> DecodingPlan:
    """Under the shortest policy."""
    facts = RequestFacts("an id", info.name, "unclassified", model_heads=info.num_heads)
    check_options(options, info)
    return plan_for(options, info, Controller.plain().decide(facts))


def test_plans() -> None:
    assert planned(None, INFO) == planned(DecodingOptions(), INFO)
    assert planned(None, INFO).num_heads == 4
    assert planned(DecodingOptions(heads=2), INFO).num_heads == 2
    assert planned(DecodingOptions(heads=3, tree="2x1"), INFO).num_heads == 2, "no more heads than the tree uses"
    assert planned(DecodingOptions(acceptance="typical"), HEADLESS).acceptance == "exact", "vanilla is always exact"
    assert planned(DecodingOptions(method="medusa"), INFO).rule == "request"


def stats(**counts: Any) -> GenerationStats:
    return GenerationStats(method="medusa", **counts)


def test_a_report_weighs_speedups_by_steps() -> None:
    results = [
        ChoiceResult(stats=stats(steps=30, emitted_tokens=60, speedup_estimate=2.0, reason="as planned")),
        ChoiceResult(stats=stats(steps=10, emitted_tokens=10, speedup_estimate=1.0, reason="as planned")),
    ]
    report = decoding_report(DecodingPlan(reason="why"), results)
    assert report.speedup_estimate == 1.75
    assert report.accepted_tokens_per_step == 1.75
    assert report.reason == "why; as planned"


def test_a_report_of_an_engine_that_fell_back() -> None:
    result = ChoiceResult(stats=GenerationStats(method="vanilla", steps=5, emitted_tokens=5, reason="fell back"))
    report = decoding_report(DecodingPlan(reason="default"), [result])
    assert (report.method, report.reason) == ("vanilla", "default; fell back")
    result = ChoiceResult(stats=GenerationStats(method="medusa", steps=5, reason="default; went vanilla"))
    assert decoding_report(DecodingPlan(reason="default"), [result]).reason == "default; went vanilla"


def test_a_report_of_an_adapted_model_says_so() -> None:
    result = ChoiceResult(stats=stats(steps=1, emitted_tokens=1, speedup_estimate=1.0, reason="as planned"))
    report = decoding_report(DecodingPlan(reason="why", adapted_from="m"), [result])
    assert report.adapted_from == "m"
    assert "this model was adapted from m: its answers are its own" in report.reason
    assert decoding_report(DecodingPlan(), [result]).adapted_from is None


def test_a_report_without_stats() -> None:
    report = decoding_report(DecodingPlan(), [ChoiceResult()])
    assert (report.method, report.steps, report.accepted_tokens_per_step) == ("medusa", 0, 0.0)


def test_choice_seeds_are_int64_and_distinct() -> None:
    seeds = [choice_seed(base, choice) for base in (0, 1, -1, 2**63 - 1, -(2**63)) for choice in range(16)]
    assert len(set(seeds)) == len(seeds)
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
    assert choice_seed(5, 0) == 5
    assert choice_seed(5, 1) == 7134611160154358618, "answers to a request with n and a seed stay what they were"
