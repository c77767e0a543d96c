"""What alerts do and look at: fallback by an alert, the figures of rules, events."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from backends.types import DecodeCounters
from gateway.serving.controller import Controller
from policy.alerts import SAVINGS_WINDOW_S, AlertRule
from policy.runtime import PolicyRuntime
from policy.spec import RequestFacts
from policy.statistics.aggregate import Statistics
from policy.statistics.counters import Tally
from policy.statistics.store import Prior
from telemetry.alerts.fleet import Alarm
from telemetry.alerts.local_states import AlertBook
from telemetry.alerts.readings import (
    MIN_SAVINGS_S,
    FallbackHistory,
    SavingsHistory,
    StepsLately,
    readings,
    steps_lately,
)
from telemetry.snapshot import Sources, StepWindow, take_figures
from tests.support.fakes import FakeDecoder

POLICY = b"""
version: 1
alerts:
  - {name: kv, metric: medusa_kv_usage, above: 0.9, keep: 5s, actions: [fall_back, event]}
  - {name: other, metric: medusa_kv_usage, above: 0.9, model: n, actions: fall_back}
"""


async def test_an_alert_holds_its_model_in_fallback_until_it_is_resolved() -> None:
    now = [1000.0]
    controller = Controller(PolicyRuntime.from_text(POLICY), clock=lambda: now[0], wall_clock=lambda: now[0])
    engine = FakeDecoder()
    await controller.background.start({"m": engine})
    try:

        async def seconds(count: int, pages: float) -> None:
            for _ in range(count):
                now[0] += 1.0
                engine.count("m|code|high|policy", DecodeCounters(steps=50, vanilla_us=20, spent_us=10))
                controller.background.evaluate_alerts(
                    {"medusa_kv_pages_used": {("m", "b"): pages}, "medusa_kv_pages_limit": {("m", "b"): 10.0}}
                )
                await controller.background.count()

        def decided() -> tuple[str, str]:
            # Not one of those that probe.
            made = controller.decide(RequestFacts("r1", "m", "code", model_heads=4), dry=True)
            return made.method, made.reason

        await seconds(10, 5.0)
        assert decided()[0] == "medusa"
        controller._probed_at["m", "code"] = 1e9
        await seconds(40, 10.0)
        method, reason = decided()
        assert method == "vanilla"
        assert "alert 'kv' fires: medusa_kv_usage is above 0.9 for m: fallback to vanilla" in reason
        assert controller.events.fallbacks["m", "code"] == 1, "held, and not fallen back again and again"
        await seconds(40, 5.0)
        assert decided()[0] == "medusa", "its speedup is 2, so it comes back by itself"
        kinds = [event.kind for event in controller.events.log]
        assert kinds == ["alert_firing", "fallback", "alert_resolved", "resumed"]
    finally:
        await controller.background.stop()


def rule(metric: str, **fields: object) -> AlertRule:
    return AlertRule("a", metric, **{"below": 1.0, **fields})  # type: ignore[arg-type]


def test_readings_need_evidence_and_heed_filters() -> None:
    figures = {
        "speculative_speedup_factor": {("m", "code"): 0.9, ("m", "chat"): 0.8, ("n", "code"): 0.7},
        "medusa_head_accuracy": {
            ("m", "code", "1", "1"): 0.3,
            ("m", "code", "2", "1"): 0.2,
            ("m", "code", "1", "2"): 0.9,
        },
        "medusa_head_accuracy_prior": {("m", "code", "1", "1"): 0.6, ("m", "code", "2", "1"): 0.0},
        "medusa_kv_pages_used": {("m", "x"): 9.0, ("m", "y"): 1.0, ("n", "x"): 5.0},
        "medusa_kv_pages_limit": {("m", "x"): 10.0, ("m", "y"): 10.0, ("n", "x"): 0.0},
        "medusa_queue_oldest_age": {("m", "x"): 9.0, ("m", "y"): 1.0},
        "medusa_redis_up": {(): 0.0},
        "speculative_control_prediction_ratio": {("m", "code"): 0.7, ("m", "chat"): 0.6},
    }
    steps = {
        ("m", "code"): StepsLately(50.0, 49.0),
        ("m", "chat"): StepsLately(49.0, 50.0),
        ("n", "code"): StepsLately(99.0),
    }

    def read(each: AlertRule) -> dict[tuple[str, str], float]:
        return readings(each, figures, steps, {("m", "code"): 2.0})

    speedup = "speculative_speedup_factor"
    assert read(rule(speedup)) == {("m", "code"): 0.9, ("n", "code"): 0.7}
    assert read(rule(speedup, models=("n*",))) == {("n", "code"): 0.7}
    assert read(rule(speedup, classes=("chat",))) == {}
    assert read(rule("speculative_control_prediction_ratio")) == {("m", "chat"): 0.6}, "rests on vanilla steps"
    assert read(rule("medusa_head_accuracy")) == {("m", "code"): 0.3}
    assert read(rule("medusa_head_accuracy", head=2)) == {("m", "code"): 0.2}
    assert read(rule("medusa_head_accuracy_ratio")) == {("m", "code"): 0.5}
    assert read(rule("medusa_head_accuracy_ratio", head=2)) == {}, "nothing to compare with"
    assert read(rule("medusa_kv_usage", below=None, above=0.5)) == {("m", ""): 0.9}, "the worst of its backends"
    assert read(rule("medusa_kv_usage")) == {("m", ""): 0.1}
    assert read(rule("medusa_queue_oldest_age_seconds", below=None, above=5.0)) == {("m", ""): 9.0}
    assert read(rule("medusa_redis_up")) == {("", ""): 0.0}
    assert read(rule("speculative_fallback_count")) == {("m", "code"): 2.0}
    assert read(rule("speculative_fallback_active")) == {}


def test_fallbacks_are_counted_within_a_quarter_of_an_hour() -> None:
    history = FallbackHistory()

    def lately(count: float, now: float) -> float:
        return history.lately({"speculative_fallback_count": {("m", "code"): count}}, now)["m", "code"]

    assert [lately(0.0, 0.0), lately(2.0, 10.0), lately(3.0, 600.0)] == [0.0, 2.0, 3.0]
    assert [lately(3.0, 911.0), lately(3.0, 1501.0)] == [1.0, 0.0]


def test_savings_are_those_of_the_last_hour() -> None:
    history = SavingsHistory()

    def lately(vanilla: float, spent: float, now: float) -> float | None:
        of = {"medusa_vanilla_time": {("m", "code"): vanilla}, "medusa_decode_time": {("m", "code"): spent}}
        return history.lately(of, now).get(("m", "code"))

    assert lately(1000.0, 500.0, 0.0) is None, "what was before is not of this hour"
    assert lately(1000.0 + MIN_SAVINGS_S / 2, 500.0, 10.0) is None, "too little to say"
    assert lately(1100.0, 600.0, 1000.0) == 1.0
    assert lately(1200.0, 650.0, 2000.0) == 0.75
    assert lately(1300.0, 850.0, 4600.0) == 1.25, "250 s for 200, since those of an hour ago"
    assert lately(50.0, 40.0, 4700.0) is None, "replicas count anew"
    assert lately(150.0, 90.0, 4800.0) == 0.5


@given(st.lists(st.tuples(st.floats(0, 900), st.floats(0, 100), st.floats(0, 100)), min_size=2, max_size=300))
def test_savings_keep_little_and_never_more_than_the_window(steps: list[tuple[float, float, float]]) -> None:
    history, now, vanilla, spent = SavingsHistory(), 0.0, 0.0, 0.0
    for pause, more_vanilla, more_spent in steps:
        now, vanilla, spent = now + pause, vanilla + more_vanilla, spent + more_spent
        history.lately({"medusa_vanilla_time": {("m", "c"): vanilla}, "medusa_decode_time": {("m", "c"): spent}}, now)
    (kept,) = history._then.values()
    assert len(kept) <= 64
    assert all(now - moment < SAVINGS_WINDOW_S for moment, *_ in list(kept)[1:])


def test_vanilla_steps_are_evidence_whosever_plan_they_are() -> None:
    statistics = Statistics("a")
    for arm, vanilla in (("policy", 0), ("control", 30), ("client", 20)):
        statistics.add_own({f"m|code|greedy|{arm}": DecodeCounters(steps=40, control_steps=vanilla)}, 1.0, 1000.0)
    assert steps_lately(statistics, 2.0) == {("m", "code"): StepsLately(40.0, 50.0)}
    assert steps_lately(statistics, 100.0) == {("m", "code"): StepsLately(0.0, 0.0)}


def test_an_alert_follows_its_rule() -> None:
    book, slow = AlertBook(), rule("speculative_speedup_factor")
    values = {("m", "code"): 0.5}
    assert [each.change for each in book.evaluate([slow], lambda _: values, 0.0)] == ["firing"]
    (gone,) = book.evaluate([], lambda _: values, 1.0)
    assert (gone.change, gone.withdrawn) == ("resolved", True)
    assert book.tracked == {}
    alarm = Alarm(rule="a", model="m", class_name="code")
    assert not book.adopt(alarm, [], 2.0)
    assert book.adopt(alarm, [slow], 2.0)
    assert [each.key for each in book.firing()] == [alarm.key]


def test_the_long_memory_outlasts_a_sudden_drop() -> None:
    """Heads that were right in 60% of the steps and now are in 10%: the estimates follow at once, the prior not."""
    statistics, key = Statistics("a"), "m|code|high|policy"
    past = Tally.of(DecodeCounters(steps=5000, attempts=[5000], hits=[[3000]]))
    statistics.add_fleet({}, Prior(1, {key: past}), 0.0)
    for second in range(1, 61):
        worse = DecodeCounters(steps=50, vanilla_us=1, spent_us=1, attempts=[50], hits=[[5]])
        statistics.add_own({key: worse}, float(second), 1000.0 + second)
    controller = Controller.plain()
    statistics.refresh(controller.policy.spec, 61.0, "fleet")
    assert statistics.live.by_class["m", "code"].accuracies[0][0] < 0.2
    sources = Sources(statistics, {"b": FakeDecoder(name="m")}, ["m"], ["code"], controller.policy.status)
    figures = take_figures(sources, StepWindow(), 61.0)
    lately = steps_lately(statistics, 61.0)
    (ratio,) = readings(rule("medusa_head_accuracy_ratio"), figures, lately, {}).values()
    assert 0.1 < ratio < 0.2
