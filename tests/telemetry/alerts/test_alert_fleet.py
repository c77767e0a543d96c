"""What a fleet agrees on about alerts: one voice per alert, whoever dies and whatever the store does."""

from __future__ import annotations

from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from policy.shared.redis_client import parse_redis_url
from policy.shared.shared_text import MemoryText
from policy.statistics.store import RedisStore
from telemetry.alerts.fleet import (
    GIVE_UP_S,
    LEASE_S,
    LINGER_S,
    Alarm,
    Board,
    Message,
    Mute,
    decode,
    due,
    encode,
    orphans,
    owned_by,
    report,
    with_mute,
    with_told,
)
from telemetry.alerts.sharing import BoardUnavailable, SharedBoard
from tests.support.valkey import ValkeyProcess

ALARM = Alarm(rule="slow", model="m", class_name="code", receivers=("ops",))
REPEATS = {"ops": 600.0}


def said(board: Board, replica: str, firing: bool, now: float) -> Board:
    return report(board, replica, {ALARM.key: ALARM} if firing else {}, f"{replica}-{now:g}", now)


def told(board: Board, replica: str, now: float) -> tuple[Board, list[str]]:
    """``replica`` tells the receiver what is due, and it arrives."""
    messages = due(board, replica, REPEATS, now)
    return with_told(board, messages, now), [message.status for message in messages]


def test_one_of_two_speaks() -> None:
    board = said(said(Board(), "a", True, 0.0), "b", True, 0.5)
    assert [len(owned_by(board, replica, 1.0)) for replica in "ab"] == [1, 0]
    board, first = told(board, "a", 1.0)
    assert first == ["firing"]
    assert due(board, "a", REPEATS, 2.0) == []
    assert said(board, "a", True, 2.0) == board, "nothing new, so nothing to write"
    # The owner finds it clear, the other does not: still firing, and the other's to tell.
    board = said(said(board, "a", False, 3.0), "b", True, 3.5)
    assert [len(owned_by(board, replica, 4.0)) for replica in "ab"] == [0, 1]
    board, second = told(board, "b", 4.0)
    assert second == [], "it was told already"
    board, third = told(said(board, "b", False, 5.0), "b", 5.0)
    assert third == ["resolved"]
    assert said(board, "a", False, 5.0 + LINGER_S + 1).entries == {}


def test_the_owner_dies() -> None:
    board, _ = told(said(said(Board(), "a", True, 0.0), "b", True, 0.0), "a", 1.0)
    for now in (10.0, LEASE_S + 1):
        board = said(board, "b", True, now)
    (entry,) = owned_by(board, "b", LEASE_S + 1)
    assert entry.members.keys() == {"b"}
    assert due(board, "b", REPEATS, LEASE_S + 1) == [], "the receiver knows"
    assert told(said(board, "b", False, 30.0), "b", 30.0)[1] == ["resolved"]


def test_all_of_them_die() -> None:
    board, _ = told(said(Board(), "a", True, 0.0), "a", 1.0)
    assert orphans(board, 5.0) == {}
    assert orphans(board, LEASE_S + 1) == {ALARM.key: ALARM}
    # One that does not adopt it, since its policy has no such rule any more, ends it.
    assert told(said(board, "c", False, LEASE_S + 1), "c", LEASE_S + 1)[1] == ["resolved"]


def test_a_new_beginning_after_the_end() -> None:
    board, _ = told(said(Board(), "a", True, 0.0), "a", 1.0)
    board = said(said(board, "a", False, 2.0), "a", True, 3.0)
    assert told(board, "a", 3.0)[1] == [], "the receiver has not heard of the end, and need not"
    board, end = told(said(board, "a", False, 4.0), "a", 4.0)
    board, begin = told(said(board, "a", True, 5.0), "a", 5.0)
    assert (end, begin) == (["resolved"], ["firing"])


def test_what_was_on_its_way_when_it_ended() -> None:
    """The receiver confirms "firing" after the alert is over: it is told of the end all the same."""
    board = said(Board(), "a", True, 0.0)
    messages = due(board, "a", REPEATS, 0.0)
    board = with_told(said(board, "a", False, 1.0), messages, 2.0)
    assert told(board, "a", 2.0)[1] == ["resolved"]
    late = with_told(said(said(Board(), "a", True, 0.0), "a", False, 1.0), messages, 2.0)
    assert said(late, "a", False, GIVE_UP_S + 2).entries == {}, "and given up at last"


def mute(kind: str, created_at: float, until: float, rule: str = "slow") -> Mute:
    return Mute(id=kind, kind=kind, rule=rule, created_at=created_at, until=until)  # type: ignore[arg-type]


def test_silences_and_acknowledgements() -> None:
    fired = said(Board(), "a", True, 0.0)
    silenced = with_mute(fired, mute("silence", 0.0, 50.0))
    assert due(silenced, "a", REPEATS, 1.0) == []
    silenced = said(silenced, "a", True, 14.0)
    assert due(with_mute(fired, mute("silence", 0.0, 50.0, "other")), "a", REPEATS, 1.0) != []
    later = said(said(said(silenced, "a", True, 26.0), "a", True, 38.0), "a", True, 51.0)
    assert (later.mutes, told(later, "a", 51.0)[1]) == ((), ["firing"]), "it still fires when the silence is over"

    board, _ = told(fired, "a", 0.0)
    for now in range(10, 700, 10):
        board = said(board, "a", True, float(now))
    assert [message.status for message in due(board, "a", REPEATS, 690.0)] == ["firing"], "a reminder"
    seen = with_mute(board, mute("acknowledge", 600.0, 2000.0))
    assert due(seen, "a", REPEATS, 690.0) == []
    assert told(said(seen, "a", False, 691.0), "a", 691.0)[1] == ["resolved"]
    # An acknowledgement is of what had begun; the next episode is told.
    anew = with_mute(said(Board(), "a", True, 700.0), mute("acknowledge", 600.0, 2000.0))
    assert told(anew, "a", 700.0)[1] == ["firing"]


def test_nonsense_in_the_store_is_an_empty_board() -> None:
    board = with_mute(said(Board(), "a", True, 0.0), mute("silence", 0.0, 9.0))
    assert decode(encode(board)) == board
    assert decode("") == decode("{") == decode('{"entries": 7}') == Board()


class FleetMachine(RuleBasedStateMachine):
    """Three replicas that see an alarm come and go, die, come back as others, and tell a receiver that may be away."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.board = Board()
        self.firing = {"a": False, "b": False, "c": False}
        self.heard: list[str] = []

    @rule(seconds=st.floats(0.5, 20.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(replica=st.sampled_from("abc"), firing=st.booleans())
    def reports(self, replica: str, firing: bool) -> None:
        self.firing[replica] = firing
        self.board = decode(encode(said(self.board, replica, firing, self.now)))

    @rule(replica=st.sampled_from("abc"), arrives=st.booleans())
    def tells(self, replica: str, arrives: bool) -> None:
        messages: list[Message] = due(self.board, replica, REPEATS, self.now)
        if arrives:
            self.heard += [message.status for message in messages]
            self.board = with_told(self.board, messages, self.now)

    @precondition(lambda self: self.board.entries)
    @rule()
    def everybody_reports_clear_and_tells(self) -> None:
        for replica in "abc":
            self.reports(replica, False)
        for _ in range(3):
            for replica in "abc":
                self.tells(replica, True)
                self.reports(replica, False)
            self.now += LEASE_S
        assert self.heard[-1:] in ([], ["resolved"]), "in the end the receiver knows that it is over"
        self.now += GIVE_UP_S
        self.reports("a", False)
        assert self.board.entries == {}

    @invariant()
    def one_voice(self) -> None:
        assert sum(len(owned_by(self.board, replica, self.now)) for replica in "abc") <= 1

    @invariant()
    def no_end_without_a_beginning(self) -> None:
        for before, after in zip(["resolved", *self.heard], self.heard, strict=False):
            assert after == "firing" or before == "firing"


FleetMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestFleet = FleetMachine.TestCase


async def test_two_replicas_on_a_real_server_that_is_killed(tmp_path: Path) -> None:
    server = ValkeyProcess(tmp_path).start()
    stores = [RedisStore(parse_redis_url(server.url)) for _ in "ab"]
    clock = [0.0]
    a, b = (
        SharedBoard(store.shared_text("alerts"), name, lambda: clock[0])
        for store, name in zip(stores, "ab", strict=True)
    )

    def says(replica: str, firing: bool):  # type: ignore[no-untyped-def]
        return lambda board, now: said(board, replica, firing, now)

    try:
        await a.edit(says("a", True))
        await b.edit(says("b", True))
        await a.edit(lambda board, now: with_told(board, due(board, "a", REPEATS, now), now))
        await b.edit(says("b", True))
        assert a.now > 1e9, "the server's clock counts"
        assert b.board.entries[ALARM.key].told.keys() == {"ops"}
        server.kill()
        for each, name in ((a, "a"), (b, "b")):
            board = await each.edit(says(name, True))
            assert not each.shared
            assert board.entries.keys() == {ALARM.key}, "each goes on with what it has a part in"
            assert due(board, name, REPEATS, each.now) == []
            try:
                await each.edit_shared(lambda board, _: board)
            except BoardUnavailable as error:
                assert "Connection" in str(error)
            else:
                raise AssertionError("the fleet can't have been told")
        server.start()  # with nothing in it
        await b.edit(says("b", True))
        board = await a.edit(says("a", True))
        assert a.shared
        (entry,) = board.entries.values()
        assert (entry.members.keys(), entry.told.keys()) == ({"a", "b"}, {"ops"}), "what was known is known again"
    finally:
        for store in stores:
            await store.close()
        server.kill()


async def test_edits_of_many_replicas_all_count() -> None:
    text = MemoryText(lambda: 0.0)
    boards = [SharedBoard(text, str(number), lambda: 0.0) for number in range(5)]
    for each in boards:
        await each.edit(lambda board, now, each=each: said(board, each._replica, True, now))
    assert decode((await text.load())[0]).entries[ALARM.key].members.keys() == set("01234")
