"""Turns are fair: every contestant at every place, rounds end in time, and prompts go on where they were."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from backends.bench.turns import mirrored, prompts_of_round, rotated, rounds_within, take_turns


@given(st.integers(1, 6), st.integers(0, 50))
def test_each_contestant_is_at_each_place_equally_often(count: int, first: int) -> None:
    names = list(range(count))
    for order_of, period in ((rotated, count), (mirrored, 2 * count)):
        orders = [order_of(names, first + turn) for turn in range(period)]
        assert all(sorted(order) == names for order in orders)
        places = Counter((place, name) for order in orders for place, name in enumerate(order))
        assert set(places.values()) == {period // count}


def test_results_come_in_the_order_of_names_whoever_began() -> None:
    asked: list[str] = []

    def measure(name: str) -> int:
        asked.append(name)
        return len(asked)

    assert list(take_turns(("a", "b", "c"), 4, measure).items()) == [("a", 3), ("b", 1), ("c", 2)]
    assert asked == ["b", "c", "a"]


def test_no_round_begins_that_would_end_too_late() -> None:
    times = iter([0.0, 9.0, 18.0, 27.0])
    assert list(rounds_within(10, 28.0, lambda: next(times))) == [0, 1, 2], "a fourth would end after 36 s"
    assert list(rounds_within(1, 0.0)) == [0], "one in any case"
    assert list(rounds_within(3)) == [0, 1, 2]


def test_prompts_go_on_from_round_to_round() -> None:
    assert [prompts_of_round("abcde", turn, 2) for turn in range(3)] == [["a", "b"], ["c", "d"], ["e", "a"]]
