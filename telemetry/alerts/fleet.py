"""What the replicas of a fleet agree on about alerts: which fire, who speaks for them, what receivers have been told.

All of it is one :class:`Board`, kept as text in the store and changed by compare-and-swap
(``telemetry.alerts.sharing``). The functions here are pure; times are the store's wall clock.

An alert fires for the fleet as long as any replica finds it firing: those are its members, each for :data:`LEASE_S` at
a time. One member owns it and tells the receivers, so each hears of it once. When the owner is gone its lease runs out,
and another member takes over with all that was told already; when all members are gone, another replica adopts it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

LEASE_S = 15.0
GIVE_UP_S = 3600.0
"""After this long a receiver that can't be reached is not told any more that an alert is resolved."""
LINGER_S = 60.0
"""An episode is kept for this long after its end: what was on its way to a receiver may still be confirmed."""

Told = Literal["firing", "resolved"]


class Alarm(msgspec.Struct, frozen=True, kw_only=True):
    """One alert that fires: a rule, and the model and class it is about ("" where the figure has none)."""

    rule: str
    model: str = ""
    class_name: str = ""
    severity: str = "warning"
    summary: str = ""
    value: float | None = None
    receivers: tuple[str, ...] = ()
    """Who is to be told; empty: nobody."""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}

    @property
    def key(self) -> str:
        return "|".join((self.rule, self.class_name, self.model))


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One episode of an alarm, from its first member's firing until every receiver knows that it is resolved."""

    alarm: Alarm
    episode: str
    started_at: float
    members: dict[str, float] = {}
    """Until when each replica's word that it fires holds."""
    owner: str = ""
    owner_until: float = 0.0
    ended_at: float | None = None
    told: dict[str, tuple[Told, float]] = {}
    """What each receiver was last told, and when."""

    @property
    def firing(self) -> bool:
        return self.ended_at is None


class Mute(msgspec.Struct, frozen=True, kw_only=True):
    """A silence or an acknowledgement. Empty names match anything.

    A silence keeps alerts from being told at all; an acknowledgement only ends the repetitions, of episodes that had
    begun before it.
    """

    id: str
    kind: Literal["silence", "acknowledge"]
    rule: str = ""
    model: str = ""
    class_name: str = ""
    by: str = ""
    comment: str = ""
    created_at: float
    until: float

    def covers(self, alarm: Alarm) -> bool:
        pairs = ((self.rule, alarm.rule), (self.model, alarm.model), (self.class_name, alarm.class_name))
        return all(not wanted or wanted == found for wanted, found in pairs)


class Board(msgspec.Struct, frozen=True, kw_only=True):
    entries: dict[str, Entry] = {}
    mutes: tuple[Mute, ...] = ()


def encode(board: Board) -> str:
    return msgspec.json.encode(board, order="deterministic").decode()


def decode(text: str) -> Board:
    """An empty board for what another version, or another program, wrote: alerts then start anew."""
    try:
        return msgspec.json.decode(text, type=Board) if text else Board()
    except msgspec.DecodeError:
        return Board()


def report(board: Board, replica: str, firing: Mapping[str, Alarm], new_episode: str, now: float) -> Board:
    """The board after ``replica`` has said which alarms (by key) it finds firing.

    Leases are renewed when a third of them is over; if nothing else has changed, the board is the same.
    ``new_episode`` names what begins here.
    """
    entries = dict(board.entries)
    for key, alarm in firing.items():
        entry = entries.get(key)
        if entry is None or any(status == "resolved" for status, _ in entry.told.values()):
            # A receiver that was told of the end must hear of a new beginning.
            told = {} if entry is None else {name: each for name, each in entry.told.items() if each[0] == "firing"}
            entry = Entry(alarm=alarm, episode=f"{new_episode}.{key}", started_at=now, told=told)
        elif not entry.firing:
            entry = _with(entry, ended_at=None)
        members = dict(entry.members)
        members[replica] = _renewed(members.get(replica, 0.0), now)
        entries[key] = _with(entry, alarm=_steady(entry.alarm, alarm), members=members)
    for key, entry in list(entries.items()):
        members = {
            name: until for name, until in entry.members.items() if until > now and (name != replica or key in firing)
        }
        ended_at = entry.ended_at if members or entry.ended_at is not None else now
        entry = _owned(_with(entry, members=members, ended_at=ended_at), replica, now)
        if _over(entry, now):
            del entries[key]
        else:
            entries[key] = entry
    return _board(board, entries=entries, mutes=tuple(mute for mute in board.mutes if mute.until > now))


def orphans(board: Board, now: float) -> dict[str, Alarm]:
    """Alarms that still fire although every replica that said so is gone."""
    return {
        key: entry.alarm
        for key, entry in board.entries.items()
        if entry.firing and not any(until > now for until in entry.members.values())
    }


def owned_by(board: Board, replica: str, now: float) -> list[Entry]:
    return [entry for entry in board.entries.values() if entry.owner == replica and entry.owner_until > now]


@dataclass(frozen=True, slots=True)
class Message:
    """Something that a receiver is to be told. ``status`` as of this moment. ``withdrawn``: no rule of the policy is
    about it any more."""

    receiver: str
    entry: Entry
    status: Told
    acknowledged: Mute | None = None
    withdrawn: bool = False


def due(board: Board, replica: str, repeat_s: Mapping[str, float], now: float) -> list[Message]:
    """What ``replica`` has to tell now. ``repeat_s``: receivers there are, and how often each wants to be reminded."""
    messages: list[Message] = []
    for entry in owned_by(board, replica, now):
        silence = mute_of(board, "silence", entry, now)
        acknowledged = mute_of(board, "acknowledge", entry, now)
        for name in sorted({*entry.alarm.receivers, *entry.told}):
            if name not in repeat_s:
                continue
            status, at = entry.told.get(name, (None, 0.0))
            if not entry.firing:
                if status == "firing":
                    messages.append(Message(name, entry, "resolved", acknowledged))
                continue
            again = status == "firing" and now - at >= repeat_s[name] and acknowledged is None
            if silence is None and name in entry.alarm.receivers and (status != "firing" or again):
                messages.append(Message(name, entry, "firing", acknowledged))
    return messages


def with_told(board: Board, messages: Sequence[Message], now: float) -> Board:
    """After receivers have confirmed ``messages``."""
    if not messages:
        return board
    entries = dict(board.entries)
    for message in messages:
        key = message.entry.alarm.key
        entry = entries.get(key)
        if entry is not None and entry.episode == message.entry.episode:
            entries[key] = _with(entry, told={**entry.told, message.receiver: (message.status, now)})
    return _board(board, entries=entries)


def with_mute(board: Board, mute: Mute) -> Board:
    return _board(board, mutes=(*board.mutes, mute))


def without_mute(board: Board, mute_id: str) -> Board:
    return _board(board, mutes=tuple(mute for mute in board.mutes if mute.id != mute_id))


def mute_of(board: Board, kind: Literal["silence", "acknowledge"], entry: Entry, now: float) -> Mute | None:
    """The silence or acknowledgement that an entry is under."""
    for mute in board.mutes:
        begun = kind == "silence" or entry.started_at <= mute.created_at
        if mute.kind == kind and mute.until > now and mute.covers(entry.alarm) and begun:
            return mute
    return None


def own_part(board: Board, replica: str) -> Board:
    """What a replica may go on with by itself while the store is away: the entries that it has a part in."""
    own = {key: each for key, each in board.entries.items() if replica in each.members or replica == each.owner}
    return _board(board, entries=own)


def rejoined(shared: Board, local: Board) -> Board:
    """The store's board after it was away, with what this replica knows and the store may have lost.

    ``local`` is its :func:`own_part`. What receivers were told is believed of either.
    """
    entries = dict(shared.entries)
    for key, mine in local.entries.items():
        theirs = entries.get(key)
        if theirs is None:
            entries[key] = mine
        elif theirs.episode == mine.episode:
            told = dict(theirs.told)
            for name, (status, at) in mine.told.items():
                if name not in told or told[name][1] < at:
                    told[name] = status, at
            entries[key] = _with(theirs, told=told)
    known = {mute.id for mute in shared.mutes}
    mutes = (*shared.mutes, *(mute for mute in local.mutes if mute.id not in known))
    return _board(shared, entries=entries, mutes=mutes)


def _renewed(until: float, now: float) -> float:
    return until if until - now > LEASE_S * 2 / 3 else now + LEASE_S


def _owned(entry: Entry, replica: str, now: float) -> Entry:
    """The owner keeps it while its lease runs and, if the alarm fires, while it is a member; else ``replica`` may."""
    may = replica in entry.members if entry.members else not entry.firing
    holds = entry.owner_until > now and (not entry.members or entry.owner in entry.members)
    if entry.owner == replica and holds:
        return _with(entry, owner_until=_renewed(entry.owner_until, now))
    if not holds and may:
        return _with(entry, owner=replica, owner_until=now + LEASE_S)
    return entry


def _over(entry: Entry, now: float) -> bool:
    if entry.ended_at is None:
        return False
    everybody_knows = all(status == "resolved" for status, _ in entry.told.values())
    return now - entry.ended_at > (LINGER_S if everybody_knows else GIVE_UP_S)


def _steady(before: Alarm, after: Alarm) -> Alarm:
    """The figure moves all the time; the board is not rewritten for that alone."""
    same = msgspec.structs.replace(after, value=before.value)
    return before if same == before else after


def _with(entry: Entry, **changes: object) -> Entry:
    return msgspec.structs.replace(entry, **changes)


def _board(board: Board, **changes: object) -> Board:
    return msgspec.structs.replace(board, **changes)
