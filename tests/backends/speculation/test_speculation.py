"""When a sequence stops drafting, and when it tries again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.speculation.backoff import Speculation


def paused(record: Speculation) -> bool:
    return record._pause_left > 0


def bad_step(record: Speculation) -> None:
    record.observe(expected=1.0, accepted=0, vanilla_ms=10.0, step_ms=15.0)


def good_step(record: Speculation) -> None:
    record.observe(expected=1.0, accepted=2, vanilla_ms=10.0, step_ms=15.0)


def steps_until_pause(record: Speculation) -> int:
    for count in range(1, 100):
        bad_step(record)
        if paused(record):
            return count
    raise AssertionError("never paused")


def vanilla_steps(record: Speculation) -> int:
    """Steps without proposals until the heads run again."""
    count = 0
    while not record.wants_proposals:
        record.rest()
        count += 1
    return count


def test_vanilla_plans_never_ask_for_proposals() -> None:
    record = Speculation(enabled=False)
    for _ in range(3):
        assert not record.wants_proposals
        record.rest()
    assert not paused(record)


def test_a_new_record_trusts_the_heads_and_drafts() -> None:
    record = Speculation(enabled=True)
    assert (record.trust, record.wants_proposals, paused(record), record.pauses) == (1.0, True, False, 0)


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(0, 5)), max_size=40))
def test_trust_is_positive_and_moves_towards_the_record(record: list[tuple[float, int]]) -> None:
    speculation = Speculation(enabled=True)
    for expected, accepted in record:
        speculation.observe(expected=expected, accepted=accepted, vanilla_ms=1.0, step_ms=1.0)
        assert 0 < speculation.trust < 30
    for _ in range(150):
        speculation.observe(expected=1.0, accepted=2, vanilla_ms=1.0, step_ms=1.0)
    assert 1.6 < speculation.trust < 2.0


def test_trust_falls_when_drafts_disappoint() -> None:
    record = Speculation(enabled=True)
    for _ in range(100):
        record.observe(expected=2.0, accepted=1, vanilla_ms=10.0, step_ms=1.0)
    assert record.trust == pytest.approx(0.5, abs=0.06)


def test_losing_drafts_pause_with_doubling_lengths_up_to_a_bound() -> None:
    record = Speculation(enabled=True)
    pauses = []
    for _ in range(7):
        assert steps_until_pause(record) >= 6, "judged before there was anything to judge"
        pauses.append(vanilla_steps(record))
        assert paused(record), "the step that tries again has not run yet"
    assert pauses == sorted(pauses)
    assert [later + 1 for later in pauses[1:5]] == [2 * (earlier + 1) for earlier in pauses[:4]]
    assert pauses[-1] == pauses[-2] <= 128
    assert record.pauses == 7


def test_a_try_ends_the_pause() -> None:
    record = Speculation(enabled=True)
    steps_until_pause(record)
    vanilla_steps(record)
    good_step(record)
    assert not paused(record)
    assert record.wants_proposals


def test_lasting_success_forgives() -> None:
    record = Speculation(enabled=True)
    for _ in range(3):
        steps_until_pause(record)
        last = vanilla_steps(record)
    for _ in range(40):
        good_step(record)
    assert not paused(record)
    steps_until_pause(record)
    assert vanilla_steps(record) < last


def test_one_bad_step_among_good_ones_is_no_reason() -> None:
    record = Speculation(enabled=True)
    for i in range(60):
        (bad_step if i % 4 == 3 else good_step)(record)
        assert not paused(record)
