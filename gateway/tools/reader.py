"""A model's text as thoughts, text and calls of tools, piece by piece as it comes.

A call is told of when it is whole and one that was offered: what begins like one and is none stays text. One that a
grammar forces is sound from its first token, so its arguments are passed on as they come.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.tools.template import END_THINK, THINK, CallStyle

_CALL, _END_CALL = "<tool_call>", "</tool_call>"
_MISTRAL = "[TOOL_CALLS]"
_ARGUMENTS = '","arguments":'


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """What an answer may hold. ``style`` None: no tools. ``forced``: it is one call, in the form of
    :func:`gateway.tools.forced.forced_call`. ``one_call``: at most one. ``thinks``: thoughts may come first;
    ``thinking``: the prompt ends inside them."""

    names: frozenset[str] = frozenset()
    style: CallStyle | None = None
    forced: bool = False
    one_call: bool = False
    thinks: bool = False
    thinking: bool = False

    @property
    def is_plain(self) -> bool:
        """Nothing but text can be in it."""
        return self.style is None and not self.forced and not self.thinks


@dataclass(slots=True)
class Piece:
    """What a text adds. ``calls``: by index, its id and name when it begins, and more of its arguments."""

    text: str = ""
    thoughts: str = ""
    calls: list[tuple[int, tuple[str, str] | None, str]] | None = None

    def add_call(self, index: int, begins: tuple[str, str] | None, arguments: str) -> None:
        self.calls = [*(self.calls or ()), (index, begins, arguments)]


class AnswerReader:
    """Of one answer. ``new_id`` names its calls."""

    def __init__(self, form: AnswerForm, new_id: Callable[[], str]) -> None:
        self._form = form
        self._new_id = new_id
        self._held = ""
        self._may_think = form.thinks
        self._opened = form.thinking
        self._text_begun = False
        # Newlines at the beginning, after thoughts and after a call belong to none of the text, nor the first ones of
        # thoughts to these.
        self._fresh = not form.is_plain
        self._arguments: list[str] = []
        self.calls = 0
        self.is_cut = False
        """Whether the arguments of a forced call were cut in the middle."""

    @property
    def thinking(self) -> bool:
        """Whether what comes next is a thought, as far as it is known."""
        return self._may_think and self._opened

    @property
    def thought(self) -> bool:
        """Whether there were thoughts, and they are over."""
        return self._opened and not self._may_think

    def feed(self, text: str) -> Piece:
        piece = Piece()
        self._held += text
        if self._may_think:
            self._read_thoughts(piece)
        if not self._may_think:
            if self._form.forced:
                self._read_forced(piece)
            elif self._form.style is CallStyle.TAGGED:
                self._read_tagged(piece)
            elif self._form.style is not CallStyle.WHOLE or not self._may_be_whole():
                self._say(piece, self._take_held())
        return piece

    def finish(self, *, complete: bool) -> Piece:
        """What was held back. ``complete``: the answer was not cut."""
        piece = Piece()
        if self.thinking:
            self._think(piece, self._take_held())
            return piece
        self._may_think = False
        if self._form.forced:
            self._end_forced(piece)
        elif self._form.style is CallStyle.WHOLE and complete and (found := self._whole_calls()):
            for name, arguments in found:
                self._tell_call(piece, name, arguments)
        elif self._form.style is CallStyle.TAGGED and complete and self._held.startswith(_CALL):
            # Its end was a stop, or was left out.
            self._read_call(piece, self._held.removeprefix(_CALL), self._held)
        else:
            self._say(piece, self._held)
        return piece

    def _read_thoughts(self, piece: Piece) -> None:
        if not self._opened:
            begun = self._held.lstrip()
            if begun.startswith(THINK):
                self._opened, self._held = True, begun.removeprefix(THINK)
            elif THINK.startswith(begun):
                return
            else:
                self._may_think = False
                return
        before, mark, after = self._held.partition(END_THINK)
        if mark:
            self._think(piece, before.rstrip("\n"))
            self._held, self._may_think, self._fresh = after, False, True
        else:
            # Newlines before the mark belong to neither.
            shown = before[: len(before) - _overlap(before, END_THINK)].rstrip("\n")
            self._think(piece, shown)
            self._held = before[len(shown) :]

    def _read_tagged(self, piece: Piece) -> None:
        while True:
            before, mark, after = self._held.partition(_CALL)
            if not mark:
                kept = _overlap(before, _CALL)
                self._say(piece, before[: len(before) - kept])
                self._held = before[len(before) - kept :]
                return
            call, end, rest = after.partition(_END_CALL)
            self._say(piece, before)
            if not end:
                self._held = mark + after
                return
            self._held = rest
            self._read_call(piece, call, mark + call + end)

    def _read_call(self, piece: Piece, call: str, written: str) -> None:
        if (found := self._sound_call(_read_json(call))) is None:
            self._say(piece, written)
        else:
            self._tell_call(piece, *found)

    def _tell_call(self, piece: Piece, name: str, arguments: str) -> None:
        if self._form.one_call and self.calls:
            return
        piece.add_call(self.calls, (f"call_{self._new_id()}", name), arguments)
        self.calls += 1
        self._fresh = True

    def _may_be_whole(self) -> bool:
        if self._text_begun:
            return False
        begun = self._held.lstrip()
        return begun[:1] in ("", "{") or _MISTRAL.startswith(begun[: len(_MISTRAL)]) or begun.startswith("[{")

    def _whole_calls(self) -> list[tuple[str, str]]:
        """The calls that the whole answer is; none if it is something else."""
        text = self._held.strip().removeprefix(_MISTRAL).strip()
        read = _read_json(text)
        listed = read if isinstance(read, list) else [read]
        if read is None:
            listed = [_read_json(each) for each in text.split(";")]
        found = [self._sound_call(each) for each in listed]
        return [each for each in found if each is not None] if all(found) else []

    def _sound_call(self, call: Any) -> tuple[str, str] | None:
        """Name and arguments, as JSON text, of a call of a tool that was offered."""
        if not isinstance(call, dict) or not isinstance(call.get("name"), str) or call["name"] not in self._form.names:
            return None
        arguments = call.get("arguments", call.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = _read_json(arguments)
        if not isinstance(arguments, dict):
            return None
        try:
            return call["name"], json.dumps(arguments, ensure_ascii=False)
        except RecursionError:
            return None

    def _read_forced(self, piece: Piece) -> None:
        begins = None
        if self.calls == 0:
            head, mark, rest = self._held.partition(_ARGUMENTS)
            if not mark:
                return
            begins = f"call_{self._new_id()}", head.removeprefix('{"name":"')
            self.calls, self._held = 1, rest
        # The last brace closes the call, and is no argument.
        shown, self._held = self._held[:-1], self._held[-1:]
        if begins or shown:
            self._arguments.append(shown)
            piece.add_call(0, begins, shown)

    def _end_forced(self, piece: Piece) -> None:
        if self.calls == 0:
            self._say(piece, self._held)
        elif _read_json("".join(self._arguments)) is None:
            self.is_cut = True
            if self._held:
                piece.add_call(0, None, self._held)

    def _say(self, piece: Piece, text: str) -> None:
        shown = self._after_newlines(text)
        self._text_begun |= bool(shown)
        piece.text += shown

    def _think(self, piece: Piece, text: str) -> None:
        piece.thoughts += self._after_newlines(text)

    def _after_newlines(self, text: str) -> str:
        if self._fresh:
            text = text.lstrip("\n")
            self._fresh = not text
        return text

    def _take_held(self) -> str:
        held, self._held = self._held, ""
        return held


def _read_json(text: str) -> Any:
    """None for what is no JSON."""
    try:
        return msgspec.json.decode(text.strip())
    except (msgspec.DecodeError, RecursionError):
        return None


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of ``text`` that ``mark`` begins with."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)
