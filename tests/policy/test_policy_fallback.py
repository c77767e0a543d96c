"""The fallback: a pure state machine, and the same in simulated traffic with the window that feeds it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from backends.types import DecodeCounters
from policy.decision import decide
from policy.fallback import MIN_STEPS, RECENT_ATTEMPTS, RESUME_MARGIN, FallbackState, advance, evidence_span
from policy.file.format import parse_policy
from policy.spec import FallbackSettings, RequestFacts
from policy.statistics.aggregate import Statistics
from policy.statistics.counters import StatsKey, Tally

SETTINGS = FallbackSettings(min_speedup=1.0, window_s=5.0, hold_s=20.0, probe=0.05)


def evidence(speedup: float, steps: float = 500.0) -> Tally:
    return Tally({"steps": steps, "spent_us": 1e6, "vanilla_us": speedup * 1e6})


def test_it_needs_a_whole_window_and_enough_steps() -> None:
    start = FallbackState(since=100.0)
    assert advance(start, SETTINGS, evidence(0.9), 104.9)[1] is None
    assert advance(start, SETTINGS, evidence(0.9, MIN_STEPS - 1), 110.0)[1] is None
    assert advance(start, SETTINGS, Tally(), 110.0) == (FallbackState(since=100.0), None)
    assert advance(start, SETTINGS, evidence(1.0), 110.0)[1] is None, "at the limit it still pays"
    state, transition = advance(start, SETTINGS, evidence(0.99), 105.0, accuracy=0.02)
    assert (state.mode, state.since, state.count) == ("fallback", 105.0, 1)
    assert transition is not None
    assert "0.990 is under min_speedup 1" in transition.reason


def test_a_full_batch_is_no_reason() -> None:
    """Good heads that the engine leaves idle under load cost next to nothing, and are wanted when the load goes."""
    start = FallbackState(since=100.0)
    assert advance(start, SETTINGS, evidence(0.995), 110.0, accuracy=0.6)[1] is None
    assert advance(start, SETTINGS, evidence(0.995), 110.0, accuracy=0.01)[1] is not None
    assert advance(start, SETTINGS, evidence(0.995), 110.0)[1] is None, "heads that were not asked yet"
    for accuracy in (0.6, None):
        assert advance(start, SETTINGS, evidence(0.96), 110.0, accuracy)[1] is not None, "a real loss is one"
    lately = evidence(0.995)
    lately.attempts, lately.hits = [RECENT_ATTEMPTS, 0.0], [[0.0, 1.0], [0.0]]
    assert advance(start, SETTINGS, lately, 110.0, accuracy=0.6)[1] is not None, "they were good, they are not now"
    lately.attempts[0] -= 1.0
    assert advance(start, SETTINGS, lately, 110.0, accuracy=0.6)[1] is None
    strict = replace(SETTINGS, min_speedup=1.1)
    assert advance(start, strict, evidence(1.09), 110.0, accuracy=0.6)[1] is not None, "the operator wants more"


def test_it_comes_back_after_the_hold_and_with_a_margin() -> None:
    fallen = FallbackState("fallback", 100.0, 0.9, 500.0, 1)
    assert advance(fallen, SETTINGS, evidence(2.0), 119.9)[1] is None
    assert advance(fallen, SETTINGS, evidence(1.0 + RESUME_MARGIN / 2), 130.0)[1] is None
    assert advance(fallen, SETTINGS, evidence(2.0, 10), 130.0)[1] is None
    state, transition = advance(fallen, SETTINGS, evidence(1.0 + RESUME_MARGIN), 120.0)
    assert (state.mode, state.since, state.count) == ("speculating", 120.0, 1)
    assert transition is not None
    assert transition.to == "speculating"


def test_what_was_measured_in_the_mode_before_does_not_count() -> None:
    assert evidence_span(FallbackState(since=100.0), SETTINGS, 101.0)[2] == 1.0
    assert evidence_span(FallbackState("fallback", 100.0), SETTINGS, 108.0) == (5.0, 50.0, 8.0)
    assert evidence_span(FallbackState("fallback", 100.0), SETTINGS, 500.0)[2] == 20.0


@dataclass
class Traffic:
    """Requests of one class, one after the other in each of ``lanes``; a step takes 20 ms. ``pays`` is the speedup
    that speculation really has, ``right`` how often the first head is. Nothing here but the policy decides which
    request speculates."""

    pays: float
    right: float = 0.6
    requests_started: int = 0
    now: float = 0.0
    lanes: int = 8
    steps_per_request: int = 40
    speculating: list[int] = field(default_factory=list)
    vanilla: list[int] = field(default_factory=list)
    switches: list[tuple[float, str]] = field(default_factory=list)
    statistics: Statistics = field(default_factory=lambda: Statistics("replica"))

    def run(self, seconds: float, text: str = "") -> None:
        spec = parse_policy(f"version: 1\n{text}".encode(), "policy.yaml")
        for _ in range(round(seconds)):
            # A second: 50 steps in every lane.
            counts = {"policy": 0, "control": 0}
            for _ in range(self.lanes * 50 // self.steps_per_request):
                self.requests_started += 1
                facts = RequestFacts(f"request-{self.requests_started}", "m", "code", model_heads=4)
                decision = decide(spec, self.statistics.live, facts, self.now)
                counts[decision.arm] += self.steps_per_request
            self.now += 1.0
            self.statistics.add_own(
                {
                    StatsKey("m", "code", "high", arm).encode(): DecodeCounters(
                        steps=steps,
                        vanilla_us=round(20_000 * steps * (self.pays if arm == "policy" else 1.0)),
                        spent_us=20_000 * steps,
                        attempts=[steps] if arm == "policy" else [],
                        hits=[[round(steps * self.right)]] if arm == "policy" else [],
                    )
                    for arm, steps in counts.items()
                    if steps
                },
                self.now,
                self.now,
            )
            self.speculating.append(counts["policy"])
            self.vanilla.append(counts["control"])
            for _, transition in self.statistics.refresh(spec, self.now, "local"):
                self.switches.append((self.now, transition.to))


def test_random_heads_under_traffic_and_good_ones_again() -> None:
    traffic = Traffic(pays=1.8)
    traffic.run(60)
    assert traffic.switches == []
    traffic.pays, traffic.right, broken = 0.93, 0.0, traffic.now
    traffic.run(60)
    assert [to for _, to in traffic.switches] == ["fallback"]
    assert traffic.switches[0][0] - broken <= 10
    share = sum(traffic.speculating[-40:]) / sum(traffic.speculating[-40:] + traffic.vanilla[-40:])
    assert 0.02 <= share <= 0.10, "only probes speculate"
    loss = share * (1 - traffic.pays)
    assert loss <= 0.03, "throughput is within 0.97 of vanilla's"
    traffic.pays, traffic.right, mended = 1.8, 0.6, traffic.now
    traffic.run(60)
    assert [to for _, to in traffic.switches] == ["fallback", "speculating"]
    assert traffic.switches[1][0] - mended <= 60
    assert traffic.vanilla[-1] == 0


def test_no_flapping_at_the_limit() -> None:
    """A class that pays next to nothing goes to vanilla once, and stays there."""
    traffic = Traffic(pays=0.999, right=0.01)
    traffic.run(40)
    traffic.pays = 1.001
    traffic.run(600)
    assert [to for _, to in traffic.switches] == ["fallback"]


def test_the_clients_own_trees_are_no_evidence() -> None:
    statistics = Statistics("replica")
    spec = parse_policy(b"version: 1\n", "policy.yaml")
    key = StatsKey("m", "code", "high", "client").encode()
    for second in range(60):
        statistics.add_own({key: DecodeCounters(steps=400, vanilla_us=1, spent_us=100)}, second, second)
        assert statistics.refresh(spec, second, "local") == []


def test_a_policy_that_sets_the_method_ends_a_fallback() -> None:
    traffic = Traffic(pays=0.5)
    traffic.run(20)
    assert traffic.statistics.live.fallbacks["m", "code"].mode == "fallback"
    traffic.run(5, "defaults: {method: medusa}")
    assert traffic.statistics.live.fallbacks == {}


def test_disagreement_with_the_control_group_is_reported() -> None:
    statistics = Statistics("replica")
    spec = parse_policy(b"version: 1\n", "policy.yaml")
    control = DecodeCounters(
        steps=100, control_steps=100, control_vanilla_us=100_000, control_measured_us=112_000, spent_us=1, vanilla_us=1
    )
    speculating = DecodeCounters(steps=100, vanilla_us=300, spent_us=200)
    keys = {
        StatsKey("m", "code", "high", arm).encode(): c for arm, c in (("control", control), ("policy", speculating))
    }
    statistics.add_own(keys, 1.0, 1.0)
    statistics.refresh(spec, 1.0, "local")
    (report,) = statistics.report(2.0)["classes"]
    assert report["last_minute"]["control_measured_over_predicted"] == 1.12
    assert report["last_minute"]["prediction_error"] == 0.12
    assert report["last_minute"]["speedup"]["policy"] == 1.5
    assert (report["class"], report["age_s"]) == ("code", 1.0)
