"""What another replica of the fleet remembers, asked through the store that they share.

Decisions stay in the memory of the replica that made them: nothing is written for a request. Who looks for one leaves a
question in a small shared text, which every replica reads once a second, and waits for a moment. Questions are few and
expire, so the text stays small whatever happens.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from policy.shared.redis_client import StoreUnavailable
from policy.shared.shared_text import SharedText

PATIENCE_S = 3.0
"""How long an answer is waited for: replicas look once a second."""
LOOK_EVERY_S = 0.2
EXPIRES_S = 10.0
MOST_QUESTIONS = 16
_TRIES = 5
NULL = msgspec.Raw(b"null")

Find = Callable[[str], dict[str, Any] | None]


class _Question(msgspec.Struct, frozen=True):
    """``until``: the store's clock."""

    id: str
    about: str
    by: str
    until: float
    answer: msgspec.Raw = NULL


class FleetBusy(Exception):
    """More is asked at once than the shared text takes."""


class FleetLookup:
    """Used from one event loop. ``find`` gives what this replica remembers under a name."""

    def __init__(self, text: SharedText, replica: str, find: Find) -> None:
        self._text = text
        self._replica = replica
        self._find = find

    async def answer(self) -> None:
        """Answer what others ask, as far as it is known here.

        Raises :class:`policy.shared.redis_client.StoreUnavailable`.
        """

        def answered(questions: list[_Question]) -> list[_Question]:
            return [self._answered(each) for each in questions]

        await self._change(answered)

    async def ask(self, name: str) -> dict[str, Any] | None:
        """What some other replica remembers; None if none has said so in time.

        Raises :class:`policy.shared.redis_client.StoreUnavailable`, or :class:`FleetBusy`.
        """
        question_id = uuid.uuid4().hex[:12]
        _, now = await self._text.load()
        question = _Question(question_id, name, self._replica, now + EXPIRES_S)
        if not await self._change(lambda questions: [*questions, question]):
            raise FleetBusy
        try:
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    await asyncio.sleep(LOOK_EVERY_S)
                    for each in _read((await self._text.load())[0]):
                        if each.id == question_id and each.answer != NULL:
                            return msgspec.json.decode(each.answer)
        except TimeoutError:
            return None
        finally:
            # Else it expires.
            with suppress(StoreUnavailable):
                await self._change(lambda questions: [each for each in questions if each.id != question_id])

    def _answered(self, question: _Question) -> _Question:
        if question.by == self._replica or question.answer != NULL:
            return question
        found = self._find(question.about)
        if found is None:
            return question
        return msgspec.structs.replace(question, answer=msgspec.Raw(msgspec.json.encode(found)))

    async def _change(self, change: Callable[[list[_Question]], list[_Question]]) -> bool:
        """False when there is no room, or others were always faster."""
        for _ in range(_TRIES):
            before, now = await self._text.load()
            questions = [each for each in _read(before) if each.until > now]
            changed = change(questions)
            if len(changed) > max(len(questions), MOST_QUESTIONS):
                return False
            after = msgspec.json.encode(changed).decode() if changed else ""
            if after == before or await self._text.swap(before, after):
                return True
        return False


def _read(text: str) -> list[_Question]:
    """None for what another version, or another program, wrote."""
    try:
        return msgspec.json.decode(text, type=list[_Question]) if text else []
    except msgspec.DecodeError:
        return []
