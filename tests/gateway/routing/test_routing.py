"""The choice among backends, the circuit breaker and the parser of event streams: pure, so by properties."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.routing.choice import SATURATED, Candidate, choose
from gateway.routing.circuit_breaker import (
    Breaker,
    BreakerSettings,
    Permit,
    abandoned,
    answering,
    completed,
    failed,
    started,
)
from gateway.upstream.sse import EventParser, MalformedStream

CLASSES = ("code", "chat")
candidates = st.lists(
    st.builds(
        Candidate,
        name=st.text("abc", min_size=1, max_size=3),
        load=st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0]),
        free=st.integers(0, 4),
        priority=st.integers(0, 2),
        classes=st.none() | st.frozensets(st.sampled_from(CLASSES), min_size=1),
        down=st.none() | st.just("down"),
        lacks=st.none() | st.just("can't"),
        failed=st.none() | st.just("upstream_error"),
        busy=st.booleans(),
    ),
    max_size=6,
    unique_by=lambda each: each.name,
)


def can(each: Candidate, class_name: str, sequences: int) -> bool:
    return (
        (each.classes is None or class_name in each.classes)
        and each.down is each.lacks is each.failed is None
        and each.free >= sequences
    )


@given(candidates, st.sampled_from(CLASSES), st.integers(1, 3))
def test_the_best_of_those_that_can(found: list[Candidate], class_name: str, sequences: int) -> None:
    choice = choose(found, class_name, sequences)
    able = [each for each in found if can(each, class_name, sequences)]
    assert len(choice.verdicts) == len(found)
    assert all(verdict.reason for verdict in choice.verdicts)
    if not able:
        assert choice.name is None
        assert choice.blocked is not None
        return
    chosen = next(each for each in found if each.name == choice.name)
    assert chosen in able
    assert choice.reason
    roomy = [each for each in able if not each.busy and each.load < SATURATED]
    if roomy:
        assert chosen in roomy
        assert chosen.priority == min(each.priority for each in roomy)
        assert chosen.load == min(each.load for each in roomy if each.priority == chosen.priority)
    else:
        assert chosen.load == min(each.load for each in able)
    others = [each for each in found if each not in able]
    assert choose([*others, *able], class_name, sequences).name == choice.name, "who can't is never in the way"


def test_reasons() -> None:
    a, b = Candidate("a", 0.5, 4), Candidate("b", 0.25, 4, priority=1)
    assert choose([a], "chat", 1).reason == "the model's only backend"
    assert choose([a, b], "chat", 1).reason == "priority 0 comes first"
    assert choose([Candidate("a", 1.0, 4), b], "chat", 1).reason == "the only one with room, load 0.25"
    down = Candidate("a", 0.0, 4, down="circuit open after failures")
    assert choose([down, b], "chat", 1).reason == "the only one that can take it (a circuit open after failures)"
    nobody = choose([down, Candidate("c", 0.0, 0)], "chat", 1)
    assert (nobody.name, nobody.blocked) == (None, "full")
    only_code = choose([Candidate("a", 0.0, 4, classes=frozenset({"code"}))], "chat", 1)
    assert (only_code.blocked, only_code.reason) == ("lacks", "a: takes only code, not chat")


@dataclass
class Request:
    permit: Permit
    at: float
    state: str
    answered: bool = False
    settled: bool = field(default=False)


class BreakerMachine(RuleBasedStateMachine):
    """Requests start, answer, complete, fail and are given up in any order, while time passes."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = BreakerSettings(failures=3, open_s=10.0, probes=2)
        self.breaker = Breaker(self.settings)
        self.now = 0.0
        self.out: list[Request] = []

    @rule(seconds=st.sampled_from([0.0, 1.0, 9.0, 10.0, 400.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.breaker.allows(self.now))
    @rule()
    def start(self) -> None:
        state = self.breaker.state(self.now)
        assert state != "open"
        self.breaker, permit = started(self.breaker, self.now)
        self.out.append(Request(permit, self.now, state))

    def _take(self, index: int) -> Request:
        return self.out.pop(index % len(self.out))

    @precondition(lambda self: self.out)
    @rule(index=st.integers(0, 50))
    def answer(self, index: int) -> None:
        request = self.out[index % len(self.out)]
        was = self.breaker
        if not request.answered:
            request.answered = True
            self.breaker = answering(was, request.permit)
            if request.state == "half_open" and was.tripped and request.permit.term == was.term:
                assert not self.breaker.tripped, "a probe's first byte closes the circuit"
            else:
                assert self.breaker == was, "only a probe of this very state has news"

    @precondition(lambda self: self.out)
    @rule(index=st.integers(0, 50))
    def complete(self, index: int) -> None:
        request = self._take(index)
        if not request.answered:
            self.breaker = answering(self.breaker, request.permit)
        was_tripped = self.breaker.tripped
        self.breaker = completed(self.breaker, request.permit)
        assert self.breaker.tripped is was_tripped

    @precondition(lambda self: self.out)
    @rule(index=st.integers(0, 50))
    def fail(self, index: int) -> None:
        request, was = self._take(index), self.breaker
        self.breaker = failed(was, request.permit, self.now)
        if was.tripped and request.permit.term != was.term:
            assert self.breaker == was, "late news of an earlier state changes nothing"
        elif was.tripped:
            assert self.breaker.opened_at == self.now, "a probe that fails opens again"
            assert not self.breaker.allows(self.now)

    @precondition(lambda self: self.out)
    @rule(index=st.integers(0, 50))
    def give_up(self, index: int) -> None:
        request, was = self._take(index), self.breaker
        self.breaker = abandoned(was, request.permit)
        assert self.breaker.tripped is was.tripped

    @invariant()
    def books(self) -> None:
        breaker = self.breaker
        assert 0 <= breaker.probing <= self.settings.probes
        assert 0 <= breaker.failures < self.settings.failures
        if breaker.tripped:
            mine = [each for each in self.out if each.permit.term == breaker.term and not each.answered]
            assert breaker.probing == len(mine), "every probe that ended has made room for another"
            assert breaker.allows(breaker.opened_at) is False
            if not mine:
                assert breaker.allows(breaker.opened_at + breaker.opens_for_s), "it is never left alone for ever"
        else:
            assert breaker.allows(self.now)
        assert breaker.opens_for_s <= self.settings.open_s * 32


TestBreaker = BreakerMachine.TestCase


def test_failures_in_a_row_open_and_each_failed_probe_doubles_the_wait() -> None:
    breaker = Breaker(BreakerSettings(failures=2, open_s=10.0))
    for ok in (False, True, False):
        breaker, permit = started(breaker, 0.0)
        breaker = completed(breaker, permit) if ok else failed(breaker, permit, 0.0)
    assert breaker.state(0.0) == "closed", "not in a row"
    breaker, permit = started(breaker, 0.0)
    breaker = failed(breaker, permit, 0.0)
    now = 0.0
    for wait in (10.0, 20.0, 40.0):
        assert breaker.state(now + wait - 0.1) == "open"
        assert breaker.retry_after_s(now) == wait
        now += wait
        assert breaker.state(now) == "half_open"
        breaker, permit = started(breaker, now)
        assert not breaker.allows(now), "one probe at a time"
        breaker = failed(breaker, permit, now)
    # One that begins well and breaks half way is not well.
    now += 80.0
    breaker, permit = started(breaker, now)
    breaker = failed(answering(breaker, permit), permit, now)
    assert (breaker.state(now), breaker.opens_for_s) == ("open", 160.0)
    now += 160.0
    breaker, permit = started(breaker, now)
    breaker = completed(answering(breaker, permit), permit)
    assert breaker == Breaker(breaker.settings, term=breaker.term)


line = st.text(st.characters(blacklist_characters="\r\n\x00", blacklist_categories=["Cs"]), max_size=12)


@given(
    st.lists(st.tuples(st.lists(line, min_size=1, max_size=3), st.sampled_from(["", ": note", "id: 7", "event: x"]))),
    st.sampled_from(["\n", "\r\n", "\r"]),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_events_come_back_however_they_are_cut(events: list[tuple[list[str], str]], end: str, bom: bool, cuts) -> None:
    text = "\ufeff" if bom else ""
    for data, other in events:
        text += (other + end if other else "") + "".join(f"data: {each}{end}" for each in data) + end
    raw = text.encode()
    parser, found, at = EventParser(), [], 0
    while at < len(raw):
        size = cuts.randint(1, 9)
        found += parser.feed(raw[at : at + size])
        at += size
    # A last CR may still be half of a CR LF.
    found += parser.feed(b"\n") if end == "\r" else []
    assert found == ["\n".join(data).encode() for data, _ in events]


def test_an_event_without_end_is_not_waited_for() -> None:
    parser = EventParser(most=100)
    with pytest.raises(MalformedStream):
        for _ in itertools.repeat(None, 10):
            parser.feed(b"data: " + b"x" * 30 + b"\n")
    with pytest.raises(MalformedStream):
        EventParser(most=100).feed(b"x" * 101)
