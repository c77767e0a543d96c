"""The drill in small, on fake engines, and its judge, for one that can't see faults proves nothing."""

from __future__ import annotations

import pytest

from tests.drills.drill import compare, drill
from tests.support.debian import binary


@pytest.mark.parametrize(
    ("found", "whole", "verdict"),
    [
        ("abcdef", True, (0, 0)),
        ("abc", False, (0, 0)),
        ("", False, (0, 0)),
        ("abc", True, (0, 3)),
        ("abcbcdef", True, (2, 0)),
        ("abdef", True, (0, 1)),
        ("abd", False, (0, 1)),
        ("abab", False, (2, 0)),
        ("abcdefabcdef", True, (6, 0)),
        ("abXdef", True, (1, 1)),
    ],
)
def test_the_judge(found: str, whole: bool, verdict: tuple[int, int]) -> None:
    assert compare(list("abcdef"), list(found), whole) == verdict


async def test_the_drill_in_small() -> None:
    binary("haproxy")
    report = await drill("fake", replicas=3, seconds=0.4, clients=6, restart=False)
    assert report["broken_promises"] == []
    assert [row["fault"] for row in report["rows"][::3]] == [
        "SIGKILL",
        "SIGTERM drain",
        "Redis restart",
        "cut from Redis",
    ]
    assert all(row["requests"] > 0 for row in report["rows"] if row["phase"] != "before")
    assert all(row["failed"] == 0 for row in report["rows"] if (row["fault"], row["phase"]) != ("SIGKILL", "during"))
    assert set(report["counters"]) == {"r0 (killed)", "r1 (drained)", "r2"}
