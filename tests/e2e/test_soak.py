"""The judge of the soak: one that can't see faults proves nothing. The soak itself takes a minute: ``make soak``."""

from __future__ import annotations

from typing import Any

import pytest

from tests.drills.soak import wrong_tokens
from tests.drills.soak_report import KINDS, Fault, Outcome, excused, report


@pytest.mark.parametrize(
    ("found", "whole", "wrong"),
    [
        ("the answer", True, 0),
        ("the ans", False, 0),
        ("the ans", True, 3),
        ("the answer, and more", False, 10),
        ("thx answer", True, 1),
        ("", True, 10),
    ],
)
def test_what_is_wrong_is_counted(found: str, whole: bool, wrong: int) -> None:
    assert wrong_tokens("the answer", found, whole=whole) == wrong


def outcome(**more: Any) -> Outcome:
    return Outcome(**{"kind": "short", "replica": "r0", "began": 10.0, "ended": 12.0, **more})


@pytest.mark.parametrize(
    ("fault", "excuses"),
    [
        (Fault("killed", ("r0",), 11.0, 20.0), True),
        (Fault("killed", ("r1",), 11.0, 20.0), False),
        (Fault("killed", ("r0",), 13.0, 20.0), False),
        (Fault("killed", ("r0",), 5.0, 9.0), False),
        (Fault("Redis away", (), 11.0, 20.0), False),
        (Fault("hung", ("upstream",), 11.0), False),
        (Fault("hung", ("short",), 11.0), True),
    ],
)
def test_a_fault_excuses_what_it_hit_while_it_lasted(fault: Fault, excuses: bool) -> None:
    assert excused(outcome(problem="status 503"), [fault]) == excuses


def test_each_broken_promise_is_told() -> None:
    outcomes = [outcome(), outcome(wrong=2), outcome(problem="status 500")]
    told = report(outcomes, [], {}, ([], [], []), ["r0 still holds pages"], 60.0)
    assert [row["kind"] for row in told["rows"]] == list(KINDS)
    assert told["causes"] == {"status 500 (NOT excused)": 1}
    assert told["broken_promises"] == [
        "r0 still holds pages",
        "2 characters wrong in requests of kind 'short'",
        "1 requests of kind 'short' failed for no fault",
    ]


@pytest.mark.parametrize(
    ("seconds", "last", "told"),
    [
        (1800.0, [102.1, 102.3], ["memory grew from 100.0 MB in the second third of the time to 102.2 MB in the last"]),
        (1800.0, [101.9], []),
        (1800.0, [60.0], []),
        (1800.0, [], []),
        (60.0, [150.0], []),
    ],
)
def test_memory_that_grows_to_the_end_of_a_long_run_is_told(seconds: float, last: list[float], told: list[str]) -> None:
    assert report([], [], {}, ([90.0], [100.0], last), [], seconds)["broken_promises"] == told
