"""The decision, its stabiliser and the statistics that it reads. All pure, so no clock and no server."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from backends.tree import CandidateTree
from backends.types import DecodeCounters
from policy.decision import decide, lot
from policy.fallback import USEFUL_ACCURACY, FallbackState
from policy.file.format import parse_policy
from policy.planner import NEGLIGIBLE, propose
from policy.spec import RequestFacts
from policy.stabiliser import RAISE_HOLD_S, Held, stabilise
from policy.statistics.counters import StatsKey, Tally, added_since, pack, sum_counters, temperature_bucket, unpack
from policy.statistics.estimate import Estimate
from policy.statistics.snapshot import KeyStats, LiveStats, live_stats
from tests.support.pace import yardsticks

FACTS = RequestFacts("request-1", "m", "code", model_heads=4)
CODE = [[0.8, 0.08, 0.04], [0.75, 0.08, 0.03], [0.7, 0.08, 0.03], [0.65, 0.08, 0.02]]
CREATIVE = [[0.25, 0.1, 0.05], [0.15, 0.06, 0.03], [0.1, 0.05, 0.02], [0.1, 0.04, 0.02]]


def spec(text: str = "") -> Any:
    return parse_policy(f"version: 1\n{text}".encode(), "policy.yaml")


def steps_of(rates: list[list[float]], steps: int, **more: int) -> DecodeCounters:
    """What ``steps`` steps count when head h is right with these rates, to the nearest step."""
    counters = DecodeCounters(steps=steps, emitted_tokens=steps, **more)
    reached = float(steps)
    for ranks in rates:
        counters.attempts.append(round(reached))
        counters.hits.append([round(reached * rate) for rate in ranks])
        reached *= sum(ranks)
        counters.emitted_tokens += round(reached)
    return counters


def drawn_steps(rates: list[list[float]], steps: int, random: Random) -> DecodeCounters:
    """The same with chance in it: every step is drawn."""
    counters = DecodeCounters(steps=steps, attempts=[0] * len(rates), hits=[[0] * len(ranks) for ranks in rates])
    for _ in range(steps):
        for head, ranks in enumerate(rates):
            counters.attempts[head] += 1
            rank = random.choices(range(len(ranks) + 1), [*ranks, 1 - sum(ranks)])[0]
            if rank == len(ranks):
                break
            counters.hits[head][rank] += 1
    counters.emitted_tokens = steps + sum(map(sum, counters.hits))
    return counters


def measured(rates: list[list[float]], bucket: str = "high", at: float = 0.0) -> LiveStats:
    key = StatsKey("m", "code", bucket, "policy")
    estimates = {key: Estimate().updated(Tally.of(steps_of(rates, 2000)), at)}
    return live_stats(estimates, {}, now=at, source="fleet", previous=LiveStats())


def test_without_statistics_all_that_is_allowed_may_be_used() -> None:
    decision = decide(spec("defaults: {nodes: 20, depth: 3}"), LiveStats(), FACTS, 0.0)
    assert (decision.method, decision.num_heads, decision.max_nodes, decision.tree) == ("medusa", 3, 20, None)
    assert (decision.rule, decision.arm, decision.stats_age_s) == ("default", "policy", None)
    assert "no statistics of code yet" in decision.reason


def test_statistics_without_checked_drafts_are_not_called_missing() -> None:
    """A thousand steps in which no head was asked: it has been measured that nothing was drafted."""
    decision = decide(spec(), measured([]), FACTS, 0.0)
    assert decision.stats_age_s == 0.0
    assert "no statistics" not in decision.reason and "too few drafts of code were checked" in decision.reason


def test_statistics_set_heads_and_nodes_within_bounds() -> None:
    found = decide(spec(), measured(CREATIVE), FACTS, 7.0)
    assert found.num_heads == 3, "the fourth level brings next to nothing"
    assert 10 <= found.max_nodes <= 16
    assert (found.stats_age_s, found.stats_source) == (7.0, "fleet")
    bounded = decide(spec("defaults: {nodes: {min: 3, max: 5}, heads: {min: 4}}"), measured(CREATIVE), FACTS, 7.0)
    assert (bounded.num_heads, bounded.max_nodes) == (4, 5)
    assert "within the policy's bounds" in bounded.reason
    deep = decide(spec(), measured(CODE), FACTS, 7.0)
    assert deep.num_heads == 4
    assert deep.max_nodes > found.max_nodes


def test_trees() -> None:
    given_tree = decide(spec("defaults: {tree: 3x1x1x1x1}"), measured(CODE), FACTS, 0.0)
    assert (given_tree.num_heads, given_tree.max_nodes) == (4, 12)
    assert "cut to the 4 heads of m" in given_tree.reason
    from_statistics = decide(spec("defaults: {tree: measured, nodes: 10}"), measured(CODE), FACTS, 0.0)
    assert from_statistics.tree is not None
    assert len(from_statistics.tree) == from_statistics.max_nodes == 10
    assert from_statistics.tree.nodes[:2] == ((0,), (0, 0))


def test_other_temperatures_help_out() -> None:
    """Statistics of another temperature are better than none."""
    greedy = measured(CREATIVE, bucket="greedy")
    assert decide(spec(), greedy, replace(FACTS, temperature=1.5), 0.0).num_heads == 3


def test_temperature_is_clamped_only_where_the_operator_says_so_and_never_in_silence() -> None:
    free = decide(spec(), LiveStats(), replace(FACTS, temperature=1.9), 0.0)
    assert (free.temperature, free.client_temperature) == (1.9, 1.9)
    limits = spec("defaults: {temperature: {default: 0.6, min: 0.2, max: 1.2}}")
    clamped = decide(limits, LiveStats(), replace(FACTS, temperature=1.9), 0.0)
    assert (clamped.temperature, clamped.client_temperature) == (1.2, 1.9)
    assert "temperature 1.9 (asked for) is clamped to 1.2 by the policy" in clamped.reason
    assert decide(limits, LiveStats(), replace(FACTS, temperature=0.0), 0.0).temperature == 0.2
    default = decide(limits, LiveStats(), FACTS, 0.0)
    assert (default.temperature, default.bucket) == (0.6, "middle")
    assert "temperature 0.6 is the policy's default" in default.reason
    only_max = decide(spec("defaults: {temperature: {max: 0.5}}"), LiveStats(), FACTS, 0.0)
    assert only_max.temperature == 0.5
    assert "OpenAI's default" in only_max.reason


def test_lossy_acceptance_needs_drafts() -> None:
    typical = spec("defaults: {acceptance: typical, deadline: 2s}")
    assert decide(typical, LiveStats(), FACTS, 0.0).acceptance == "typical"
    assert decide(typical, LiveStats(), FACTS, 0.0).deadline_s == 2.0
    assert decide(typical, LiveStats(), replace(FACTS, model_heads=0), 0.0).acceptance == "exact"


def test_control_group_and_probes_are_drawn_by_request_id() -> None:
    ids = [f"chatcmpl-{n}" for n in range(20_000)]
    assert all(0 <= lot(each) < 1 for each in ids)
    policy = spec("defaults: {control: 2%, fallback: {probe: 10%}}")
    normal = [decide(policy, LiveStats(), replace(FACTS, request_id=each), 0.0) for each in ids]
    control = [decision for decision in normal if decision.method == "vanilla"]
    assert 0.015 < len(control) / len(ids) < 0.025
    assert {decision.arm for decision in control} == {"control"}
    fallen = LiveStats(fallbacks={("m", "code"): FallbackState("fallback", 0.0, 0.91)})
    in_fallback = [decide(policy, fallen, replace(FACTS, request_id=each), 0.0) for each in ids]
    probes = [decision for decision in in_fallback if decision.method == "medusa"]
    assert 0.09 < len(probes) / len(ids) < 0.11
    assert {decision.arm for decision in probes} == {"policy"}
    assert all(decision.probes is (decision.method == "medusa") for decision in in_fallback)
    assert "measured speedup 0.910" in next(each for each in in_fallback if each.method == "vanilla").reason
    assert decide(policy, fallen, FACTS, 0.0, probe_due=True).method == "medusa"
    other_class = decide(policy, fallen, replace(FACTS, class_name="chat"), 0.0)
    assert other_class.method == "medusa" or "control" in other_class.reason


def test_a_policy_that_insists_knows_no_fallback() -> None:
    fallen = LiveStats(fallbacks={("m", "code"): FallbackState("fallback", 0.0, 0.5)})
    decision = decide(spec("defaults: {method: medusa, control: 50%}"), fallen, FACTS, 0.0)
    assert (decision.method, decision.arm) == ("medusa", "policy")
    assert decide(spec("defaults: {method: vanilla}"), LiveStats(), FACTS, 0.0).arm == "control"


def test_decide_is_fast() -> None:
    """Some eight microseconds where this was written: a seventh of a yardstick, with 20 rules that all are tried."""
    when = "{{class: code, model: [zz*, b{n}], prompt_tokens: {{min: 100000}}}}"
    rules = (f"  - {{name: r{n}, when: {when.format(n=n)}, use: {{heads: 1}}}}\n" for n in range(20))
    policy = spec("rules:\n" + "".join(rules))
    stats = measured(CODE)
    taken = yardsticks(lambda: decide(policy, stats, FACTS, 1.0), turns=400)
    assert taken <= 0.7, taken


def test_a_proposal_is_what_pays_and_one_level_more() -> None:
    assert propose([[0.5]], [10]) is None, "ten steps say nothing"
    assert propose([], []) is None
    nothing = propose([[0.001, 0.0]], [1000])
    assert nothing is not None
    assert (nothing.heads, nothing.nodes, nothing.tree) == (1, 0, None)
    one = propose([[0.9], [0.8]], [1000, 5])
    assert one is not None
    assert (one.heads, one.nodes) == (2, 2), "the second head has too little evidence, and is let earn some"
    code = propose(CODE, [1000] * 4)
    assert code is not None
    assert code.tree is not None
    most = 1 + sum(CandidateTree.from_accuracies(CODE, 64).survival)
    assert (1 - NEGLIGIBLE) * most <= code.expected_tokens < most
    assert list(code.tree.survival) == sorted(code.tree.survival, reverse=True)


def follow(rates: list[list[float]], held: Held | None, now: float) -> tuple[Held | None, int]:
    held, decision = stabilise(decide(spec(), measured(rates, at=now), FACTS, now), held, now)
    return held, decision.max_nodes


def test_the_stabiliser_ignores_small_changes_and_delays_growth() -> None:
    held, wide = follow(CODE, None, 0.0)
    slightly_less = [[rate * 0.99 for rate in ranks] for ranks in CODE]
    held, kept = follow(slightly_less, held, 1.0)
    assert kept == wide
    held, narrow = follow(CREATIVE, held, 2.0)
    assert narrow < wide, "less is taken at once"
    held, still = follow(CODE, held, 2.0 + RAISE_HOLD_S - 0.1)
    assert still == narrow, "more only after a while"
    held, again = follow(CODE, held, 2.0 + RAISE_HOLD_S)
    assert again == wide


def test_the_stabiliser_lets_go_with_the_policy() -> None:
    _, decision = stabilise(decide(spec(), measured(CREATIVE), FACTS, 0.0), None, 0.0)
    held = Held(decision.num_heads, decision.max_nodes, None, 0.0, "another version")
    wide = decide(spec(), measured(CODE), FACTS, 0.1)
    assert stabilise(wide, held, 0.1)[1] == wide
    vanilla = decide(spec("defaults: {method: vanilla}"), LiveStats(), FACTS, 0.1)
    assert stabilise(vanilla, held, 0.1) == (held, vanilla)
    fixed = decide(spec("defaults: {tree: 2x1}"), measured(CODE), FACTS, 0.1)
    assert stabilise(fixed, held, 0.1)[1].tree == CandidateTree.from_branching([2, 1])


def test_what_is_held_is_told() -> None:
    held, first = stabilise(decide(spec(), measured(CREATIVE), FACTS, 0.0), None, 0.0)
    _, second = stabilise(decide(spec(), measured(CODE), FACTS, 1.0), held, 1.0)
    assert second.stages[-1].name == "hold"
    assert f"{first.max_nodes} nodes are kept" in second.reason


def tokens(rates: list[list[float]], heads: int, nodes: int) -> float:
    """Expected of a step whose tree is the best within these bounds."""
    return 1 + sum(CandidateTree.from_accuracies(rates, 64).clamp(heads=heads, nodes=nodes).survival)


def shift_and_back(seed: int) -> dict[str, float]:
    """Code becomes creative writing under the label "code", and code again.

    Ten steps are counted at a time, or more while nothing changes.
    """
    key, policy = StatsKey("m", "code", "high", "policy"), spec()
    estimate, live, held, now, random = Estimate(), LiveStats(), None, 0.0, Random(seed)

    def plan_after(rates: list[list[float]], steps: int) -> tuple[int, int]:
        nonlocal estimate, live, held, now
        decision = None
        at_a_time = 10 if steps < 1000 else 100
        for _ in range(steps // at_a_time):
            now += 0.025 * at_a_time
            estimate = estimate.updated(Tally.of(drawn_steps(rates, at_a_time, random)), now)
            live = live_stats({key: estimate}, {}, now=now, source="local", previous=live)
            held, decision = stabilise(decide(policy, live, FACTS, now), held, now)
        assert decision is not None
        return decision.num_heads, decision.max_nodes

    code, shifted = plan_after(CODE, 2000), plan_after(CREATIVE, 200)
    shifts, settled = estimate.shifts, plan_after(CREATIVE, 2000)
    back = plan_after(CODE, 400)
    way = code[1] - settled[1]
    return {
        "shifts": shifts,
        "heads over": shifted[0] - settled[0],
        "way left": (shifted[1] - settled[1]) / way,
        "way left back": (code[1] - back[1]) / way,
        "loss": 1 - tokens(CREATIVE, *shifted) / tokens(CREATIVE, 16, 64),
        "loss back": 1 - tokens(CODE, *back) / tokens(CODE, 16, 64),
    }


def test_a_shift_under_one_label_is_followed_within_200_steps() -> None:
    """Noticed in every of ten runs, and the plan has then gone most of its way. It is on the careful side for some
    while yet: too many nodes are only a loose bound for the engine, too few would be a loss."""
    runs = [shift_and_back(seed) for seed in range(10)]
    assert all(run["shifts"] >= 1 for run in runs)
    assert sorted(run["heads over"] for run in runs)[5] == 0
    for name in ("way left", "way left back"):
        left = sorted(run[name] for run in runs)
        assert left[5] <= 0.35, left
        assert left[-1] <= 0.65, left
    assert max(run["loss"] for run in runs) <= 0.05, "a bound that is too tight costs little"
    assert max(run["loss back"] for run in runs) <= 0.05


def test_heads_that_are_seldom_asked_are_found_out_all_the_same() -> None:
    """Where drafts don't pay the engine asks the heads once in many steps; that they went wrong shows even so."""
    random, estimate = Random(3), Estimate()
    for _ in range(40):
        estimate = estimate.updated(Tally.of(drawn_steps(CODE, 50, random)), 0.0)
    seldom = [DecodeCounters(steps=30), DecodeCounters(steps=2, attempts=[2, 0], hits=[[0, 0], [0, 0]])]
    for _ in range(100):
        for delta in seldom:
            estimate = estimate.updated(Tally.of(delta), 1.0)
    assert estimate.shifts >= 1
    accuracy = KeyStats.of(estimate).first_accuracy
    assert accuracy is not None and accuracy < USEFUL_ACCURACY


COUNTS = st.integers(0, 10**12)
COUNTERS = st.builds(
    DecodeCounters,
    steps=COUNTS,
    rows=COUNTS,
    vanilla_us=COUNTS,
    spent_us=COUNTS,
    attempts=st.lists(COUNTS, min_size=3, max_size=3),
    hits=st.lists(st.lists(COUNTS, min_size=2, max_size=2), min_size=3, max_size=3),
)


@settings(max_examples=100)
@given(COUNTERS, COUNTERS)
def test_counters_are_exact(first: DecodeCounters, second: DecodeCounters) -> None:
    assert unpack(pack(first)) == first
    total = sum_counters([first, second])
    assert added_since(total, first) == second
    assert added_since(first, total).steps == 0, "what was counted is never taken back"
    assert added_since(first, None) == first


def test_keys() -> None:
    key = StatsKey("org/model|with bar", "code", "low", "policy")
    assert StatsKey.decode(key.encode()) == key
    assert StatsKey.decode("") is None
    assert StatsKey.decode("a|b|c|d") is None
    assert [temperature_bucket(t) for t in (0, 0.3, 0.5, 0.7, 1.0, 1.5)] == [
        "greedy", "low", "low", "middle", "middle", "high",
    ]  # fmt: skip
