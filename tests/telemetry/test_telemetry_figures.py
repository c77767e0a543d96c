"""Figures: honest about what is not known, bounded in labels, and what the counters say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from backends.types import DecodeCounters, StepSample
from policy.config.watched_file import FileStatus, Rejection
from policy.file.format import parse_policy
from policy.spec import Cost
from policy.statistics.aggregate import Statistics
from policy.statistics.counters import StatsKey
from policy.statistics.syncing import StoreHealth
from telemetry.catalog import BY_NAME, MOST_CLASSES, MOST_RANKS, OTHER, WINDOW_S
from telemetry.snapshot import BackendState, Figures, Sources, Standing, StepWindow, savings_figures, take_figures
from tests.support.fakes import FakeDecoder

MODEL = "fake-model"
CODE = (MODEL, "code")
ENGINE = (MODEL, "engine-0")
OF_REQUESTS = ("medusa_requests", "medusa_prompt_tokens", "medusa_completion_tokens", "medusa_deadline_cuts")
OF_REQUESTS += ("medusa_cached_prompt_tokens",)
"""Counted as requests end, see test_request_counts.py."""
STANDING = Standing(
    backends=[BackendState(MODEL, "there", up=False, places_used=3, places_limit=8, breaker="open", outcomes={"x": 1})],
    keys=FileStatus("keys", "1-def", 0.0, rejection=Rejection(("line 1",), 0.0, "")),
    hangs={"policy": True},
    redis_latency_s={"limits": 0.001},
    decided_locally=2,
    build=("1.0", "replica"),
    draining=True,
    drain_aborted=1,
)
POLICY = parse_policy(b"version: 1\n", "policy")


def counters(**changed: Any) -> DecodeCounters:
    """Ten steps of two heads, half of them right at first guess."""
    values: dict[str, Any] = {
        "steps": 10,
        "medusa_steps": 8,
        "drafted_tokens": 40,
        "accepted_tokens": 10,
        "emitted_tokens": 20,
        "vanilla_us": 3000,
        "spent_us": 2000,
        "attempts": [10, 5],
        "hits": [[5, 2, 1, 0, 0, 0, 1], [1, 0, 0, 0, 0, 0, 0]],
    }
    return DecodeCounters(**{**values, **changed})


class Bench:
    """Statistics at a time of our own, and the figures of them."""

    def __init__(self) -> None:
        self.statistics = Statistics("replica")
        self.steps = StepWindow()
        self.sources: dict[str, Any] = {}
        self.now = 1000.0

    def count(self, name: tuple[str, str] = CODE, arm: str = "policy", **changed: Any) -> None:
        key = StatsKey(*name, "greedy", arm).encode()
        self.statistics.add_own({key: counters(**changed)}, self.now, self.now)
        self.statistics.refresh(POLICY, self.now, "local")

    def figures(self, classes: tuple[str, ...] = ("code", "chat"), **changed: Any) -> Figures:
        decoders = {ENGINE[1]: FakeDecoder()}
        status = FileStatus("policy", "1-abc", 0.0, accepted=3, rejected=1)
        sources = Sources(self.statistics, decoders, (MODEL,), classes, status, **changed)
        return take_figures(sources, self.steps, self.now)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_rates_are_of_the_policys_own_requests_in_the_last_minute(bench: Bench) -> None:
    bench.count()
    bench.count(arm="client", drafted_tokens=1000, accepted_tokens=0, spent_us=9_000_000)
    figures = bench.figures()
    assert figures["speculative_acceptance_rate"] == {CODE: 0.25}
    assert figures["speculative_speedup_factor"] == {CODE: 1.5}
    accuracy = figures["medusa_head_accuracy"]
    assert accuracy[(*CODE, "1", "1")] == 0.5
    assert accuracy[(*CODE, "2", "1")] == 0.2
    assert {int(rank) for *_, rank in accuracy} == set(range(1, MOST_RANKS + 1))
    assert figures["medusa_head_accuracy_prior"][(*CODE, "1", "1")] == 0.5


def test_what_was_not_measured_lately_has_no_value(bench: Bench) -> None:
    bench.count()
    bench.now += WINDOW_S + 1
    figures = bench.figures()
    assert not {"speculative_acceptance_rate", "speculative_speedup_factor", "medusa_head_accuracy"} & set(figures)
    assert "medusa_redis_up" not in figures, "no store was tried yet"
    assert "medusa_verification_step_ratio" not in figures
    assert figures["speculative_emitted_tokens"] == {CODE: 20}, "a count stays"


def test_counts_are_those_of_every_arm_and_bucket(bench: Bench) -> None:
    for arm in ("policy", "control", "client"):
        bench.count(arm=arm)
    figures = bench.figures(fallbacks={CODE: 2})
    expected = {"steps": 30, "drafts": 24, "draft_tokens": 120, "accepted_tokens": 30, "emitted_tokens": 60}
    assert {name: figures[f"speculative_{name}"][CODE] for name in expected} == expected
    assert figures["speculative_fallback_count"] == {CODE: 2}


def test_a_class_begins_with_no_fallbacks(bench: Bench) -> None:
    bench.count((MODEL, "chat"))
    assert bench.figures()["speculative_fallback_count"] == {(MODEL, "chat"): 0}


def test_labels_are_bounded_whatever_was_counted(bench: Bench) -> None:
    for number in range(200):
        bench.count((MODEL, f"made-up-{number}"), emitted_tokens=1)
        bench.count((f"model-{number}", "code"), emitted_tokens=1)
    figures = bench.figures()
    emitted = figures["speculative_emitted_tokens"]
    assert emitted == {(MODEL, OTHER): 200, (OTHER, "code"): 200}
    for name, values in figures.items():
        if "model" in BY_NAME[name].labels:
            assert {labels[0] for labels in values} <= {MODEL, OTHER}
    # A policy of very many classes: as many as are allowed, and one for the rest.
    many = bench.figures(classes=tuple(f"made-up-{number}" for number in range(200)))["speculative_emitted_tokens"]
    assert len({class_name for model, class_name in many if model == MODEL}) == MOST_CLASSES + 1
    assert sum(many.values()) == 400


def test_the_control_group_shows_how_far_the_cost_table_is_off(bench: Bench) -> None:
    bench.count(arm="control", control_vanilla_us=1000, control_measured_us=1200)
    assert bench.figures()["speculative_control_prediction_ratio"] == {CODE: pytest.approx(1.2)}


def test_steps_are_compared_with_vanilla_ones_of_the_same_batch(bench: Bench) -> None:
    verification = StepSample("verification", 40, 0.030, 0.020)
    vanilla = StepSample("vanilla", 8, 0.011, 0.010)
    bench.steps.add(ENGINE[1], [verification, vanilla, StepSample("prefill", 200, 0.5, 0.4)], bench.now)
    figures = bench.figures()
    assert figures["medusa_verification_step_ratio"] == {ENGINE: pytest.approx(1.5)}
    assert figures["medusa_vanilla_step_duration"] == {ENGINE: pytest.approx(0.015)}
    bench.now += WINDOW_S
    bench.steps.add(ENGINE[1], [], bench.now)
    assert "medusa_vanilla_step_duration" not in bench.figures()


@pytest.mark.parametrize(("ok", "expected"), [(True, 1.0), (False, 0.0)])
def test_the_rest_is_told_as_it_is(bench: Bench, ok: bool, expected: float) -> None:
    alert = ("slow", "warning", *CODE)
    figures = bench.figures(store=StoreHealth("redis", ok=ok), alerts={alert: 2})
    assert figures["medusa_redis_up"] == {(): expected}
    assert figures["medusa_policy_reloads"] == {("accepted",): 2, ("rejected",): 1}
    assert figures["medusa_alert_state"] == {alert: 2}
    assert figures["medusa_engine_up"] == {ENGINE: 1}
    assert figures["medusa_heads_stale"] == {ENGINE: 0}
    assert figures["medusa_kv_pages_limit"] == {ENGINE: 64}
    (device,) = figures["medusa_device_power"]
    assert device[:2] == ENGINE and figures["medusa_device_power"][device] == 300.0
    assert figures["medusa_device_memory_used"][device] / figures["medusa_device_memory_limit"][device] == 0.25
    assert figures["medusa_device_utilization_ratio"][device] == 0.5
    assert figures["medusa_kv_use_ratio"][ENGINE] == figures["medusa_kv_pages_used"][ENGINE] / 64


def test_every_figure_is_in_the_catalogue_with_all_its_labels(bench: Bench) -> None:
    bench.count()
    bench.count(arm="control", control_vanilla_us=1000, control_measured_us=1200)
    bench.steps.add(ENGINE[1], [StepSample("verification", 40, 0.03, 0.02)], bench.now)
    figures: Mapping[str, Any] = bench.figures(
        store=StoreHealth("redis", ok=True),
        alerts={("a", "info", *CODE): 0},
        standing=STANDING,
        cost=Cost(2.5),
    )
    figures = {**figures, **savings_figures({("code", "a tenant"): 3.0}, Cost(2.5))}
    histograms = {name for name, metric in BY_NAME.items() if metric.kind == "histogram"}
    assert set(figures) == set(BY_NAME) - histograms - set(OF_REQUESTS)
    for name, values in figures.items():
        assert all(len(labels) == len(BY_NAME[name].labels) for labels in values)


def test_how_the_process_stands(bench: Bench) -> None:
    figures = bench.figures(standing=STANDING)
    there = (MODEL, "there")
    assert figures["medusa_backend_up"] == {there: 0}
    assert figures["medusa_backend_breaker_state"] == {there: 2}
    assert figures["medusa_backend_requests"] == {(*there, "x"): 1}
    assert (figures["medusa_places_used"], figures["medusa_places_limit"]) == ({there: 3}, {there: 8})
    assert (figures["medusa_policy_rejected"], figures["medusa_keys_rejected"]) == ({(): 0}, {(): 1})
    assert figures["medusa_policy_info"] == {("1-abc",): 1}
    assert figures["medusa_file_hangs"] == {("policy",): 1}
    assert figures["medusa_optional_failures"] == {(*ENGINE, "heads"): 0}
    assert (figures["medusa_draining"], figures["medusa_drain_aborted"]) == ({(): 1}, {(): 1})
