"""An alert's states, with any figure at any time."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from policy.alerts import AlertRule
from telemetry.alerts.state_machine import (
    ADOPTED_PATIENCE_S,
    FLAP_WINDOW_S,
    LONGEST_KEEP_S,
    AlertState,
    Change,
    adopted,
    advance,
)

RULE = AlertRule("slow", "speculative_speedup_factor", below=1.0, for_s=10.0, keep_s=20.0)


def run(
    rule: AlertRule, readings: list[tuple[float, float | None]], state: AlertState | None = None
) -> list[tuple[float, Change]]:
    """What changed and when, for (time, value) readings."""
    state, changes = state or AlertState(), []
    for now, value in readings:
        state, change = advance(state, rule, value, now)
        if change is not None:
            changes.append((now, change))
    return changes


def each_second(*parts: tuple[int, float | None]) -> list[tuple[float, float | None]]:
    """(seconds, value) after one another."""
    values = [value for seconds, value in parts for _ in range(seconds)]
    return [(float(second), value) for second, value in enumerate(values)]


def test_the_way_of_an_alert() -> None:
    changes = run(RULE, each_second((5, 1.5), (30, 0.9), (60, 1.5)))
    assert changes == [(5.0, "pending"), (15.0, "firing"), (55.0, "resolved")]


def test_a_dip_is_no_alert_and_a_moment_without_is_no_end() -> None:
    assert run(RULE, each_second((9, 0.9), (1, 1.0), (5, 2.0))) == [(0.0, "pending"), (9.0, "cancelled")]
    assert run(RULE, each_second((20, 0.9), (19, 1.0), (20, 0.9), (19, None), (1, 0.9))) == [
        (0.0, "pending"),
        (10.0, "firing"),
    ]


def test_without_for_it_fires_at_once() -> None:
    rule = AlertRule("down", "medusa_redis_up", below=1.0, keep_s=0.0)
    assert run(rule, each_second((2, 1.0), (1, 0.0), (1, 1.0))) == [(2.0, "firing"), (3.0, "resolved")]


def test_no_evidence_ends_an_alert_like_good_evidence() -> None:
    assert run(RULE, each_second((11, 0.9), (30, None)))[-1] == (31.0, "resolved")


def test_one_that_was_left_firing_must_be_found_clear() -> None:
    clear = [(100.0 + second, 1.2) for second in range(40)]
    assert run(RULE, clear, adopted(100.0)) == [(120.0, "resolved")]
    # Nothing is measured at first: that says nothing yet.
    later = [(100.0 + second, None) for second in range(60)] + [(160.0 + second, 1.2) for second in range(40)]
    assert run(RULE, later, adopted(100.0)) == [(180.0, "resolved")]
    never = [(100.0 + second, None) for second in range(200)]
    assert run(RULE, never, adopted(100.0)) == [(100.0 + ADOPTED_PATIENCE_S + RULE.keep_s, "resolved")]


def test_flapping_is_damped() -> None:
    """A condition that comes and goes every half minute: without damping it would fire 60 times in half an hour."""
    changes = run(RULE, each_second(*[(15, 0.9), (25, 1.5)] * 45))
    fired = [at for at, change in changes if change == "firing"]
    assert len(fired) <= 2
    assert AlertState(fired=(0.0,)).keep_s(RULE) == 20.0
    assert AlertState(fired=(0.0, 1.0, 2.0)).keep_s(RULE) == 80.0
    assert AlertState(fired=(0.0,) * 99).keep_s(RULE) == LONGEST_KEEP_S
    calm = [(4 * FLAP_WINDOW_S + second, value) for second, value in each_second((11, 0.9), (30, 1.5))]
    assert run(RULE, calm, AlertState(fired=(0.0, 1.0, 2.0)))[-1][1] == "resolved", "what is long ago counts no more"


@settings(max_examples=300)
@given(
    st.lists(
        st.tuples(st.floats(0.1, 30.0), st.sampled_from([0.5, 1.0, 1.5, None])),
        max_size=60,
    ),
    st.sampled_from([0.0, 5.0, 40.0]),
    st.sampled_from([0.0, 5.0, 40.0]),
)
def test_whatever_is_measured(steps: list[tuple[float, float | None]], for_s: float, keep_s: float) -> None:
    """Changes come in order; firing follows ``for`` of a broken limit without a break, resolved follows ``keep``
    without one; and nothing is overlooked."""
    rule = AlertRule("a", "speculative_speedup_factor", below=1.0, for_s=for_s, keep_s=keep_s)
    follows: dict[Change | None, set[Change]] = {
        None: {"pending", "firing"},
        "pending": {"firing", "cancelled"},
        "cancelled": {"pending", "firing"},
        "firing": {"resolved"},
        "resolved": {"pending", "firing"},
    }
    state, last, now = AlertState(), None, 0.0
    broken_since: float | None = None
    whole_since: float | None = 0.0
    for seconds, value in steps:
        now += seconds
        holds = value is not None and value < 1.0
        broken_since = (now if broken_since is None else broken_since) if holds else None
        whole_since = None if holds else (now if whole_since is None else whole_since)
        state, change = advance(state, rule, value, now)
        if change is not None:
            assert change in follows[last]
            last = change
        if change == "firing":
            assert broken_since is not None and now - broken_since >= for_s
        if change == "resolved":
            assert whole_since is not None and now - whole_since >= keep_s
        if broken_since is not None and now - broken_since >= for_s:
            assert state.phase == "firing"
        if state.phase == "inactive":
            assert not holds
        if state.phase == "firing" and not holds:
            assert whole_since is not None and now - whole_since < max(LONGEST_KEEP_S, keep_s)
