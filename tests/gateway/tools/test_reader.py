"""Thoughts, text and calls out of a model's own words, however these are cut into pieces."""

from __future__ import annotations

import json
from itertools import count, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.tools.reader import AnswerForm, AnswerReader
from gateway.tools.template import CallStyle

NAMES = frozenset({"look", "see"})
TAGGED = AnswerForm(NAMES, CallStyle.TAGGED)
WHOLE = AnswerForm(NAMES, CallStyle.WHOLE)
THINKS = AnswerForm(thinks=True)
THINKING = AnswerForm(NAMES, CallStyle.TAGGED, thinks=True, thinking=True)
FORCED = AnswerForm(NAMES, forced=True)
ONE = AnswerForm(NAMES, CallStyle.TAGGED, one_call=True)
FORMS = [TAGGED, WHOLE, THINKS, THINKING, FORCED, ONE, AnswerForm(NAMES, CallStyle.WHOLE, thinks=True)]
LOOK = '{"name": "look", "arguments": {"at": "<tool_call>é\\n"}}'
FORCED_LOOK = '{"name":"look","arguments":{"at":{"x":1}}}'
PIECES = [
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "[TOOL_CALLS]",
    LOOK,
    FORCED_LOOK,
    '{"name": "other", "arguments": {}}',
    '{"name": "see", "parameters": {}}',
    '{"name": "see", "arguments": "{\\"a\\": 1}"}',
    '{"name": ["see"], "arguments": {}}',
    '{"name": "see", "arguments": 5}',
    f"[{LOOK}, {LOOK}]",
    "\n",
    " ",
    ";",
    "some text",
    "<tool",
    "</thi",
    "{",
    "[",
]
texts = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=9).map("".join)


def read(form: AnswerForm, pieces: list[str], *, complete: bool = True) -> dict[str, Any]:
    """What a client has put together in the end."""
    numbers = count()
    reader = AnswerReader(form, lambda: str(next(numbers)))
    found: dict[str, Any] = {"text": "", "thoughts": "", "calls": []}
    for piece in [*(reader.feed(each) for each in pieces), reader.finish(complete=complete)]:
        found["text"] += piece.text
        found["thoughts"] += piece.thoughts
        for index, begins, arguments in piece.calls or ():
            if begins is not None:
                assert index == len(found["calls"])
                found["calls"].append([*begins, ""])
            found["calls"][index][2] += arguments
    assert reader.calls == len(found["calls"])
    return found


def cut(text: str, places: list[int]) -> list[str]:
    bounds = sorted({min(each, len(text)) for each in places} | {0, len(text)})
    return [text[start:end] for start, end in pairwise(bounds)]


@given(st.sampled_from(FORMS), texts, st.lists(st.integers(0, 200), max_size=12), st.booleans())
def test_however_a_text_is_cut_it_says_the_same(form: AnswerForm, text: str, places: list[int], complete: bool) -> None:
    whole = read(form, [text], complete=complete)
    assert read(form, cut(text, places), complete=complete) == whole
    assert read(form, list(text), complete=complete) == whole


@given(st.sampled_from(FORMS), texts, st.booleans())
def test_a_call_is_sound_or_it_is_text(form: AnswerForm, text: str, complete: bool) -> None:
    found = read(form, list(text), complete=complete)
    for call_id, name, arguments in found["calls"]:
        if not form.forced:
            assert call_id.startswith("call_")
            assert name in NAMES
            assert isinstance(json.loads(arguments), dict)
    if not found["calls"] and not found["thoughts"]:
        # Nothing is lost but newlines at the beginning, and the marks of thoughts that were empty.
        said = text.lstrip("\n") if not form.thinks else text
        assert found["text"] == said or (form.thinks and text.endswith(found["text"]))


@given(st.text(st.characters(exclude_characters="<[{"), max_size=40))
def test_plain_text_passes_at_once(text: str) -> None:
    for form in (TAGGED, AnswerForm(NAMES, CallStyle.TAGGED, thinks=True)):
        reader = AnswerReader(form, str)
        said = reader.feed(text).text
        assert said == text.lstrip("\n") or not text.strip()


@pytest.mark.parametrize(
    ("form", "text", "said", "calls"),
    [
        (TAGGED, f"So:\n<tool_call>\n{LOOK}\n</tool_call>", "So:\n", ["look"]),
        (TAGGED, f"<tool_call>{LOOK}</tool_call>\n<tool_call>{LOOK}</tool_call>\nand", "and", ["look", "look"]),
        (TAGGED, f"<tool_call>\n{LOOK}", "", ["look"]),
        (TAGGED, "<tool_call>{broken}</tool_call>", "<tool_call>{broken}</tool_call>", []),
        (TAGGED, '<tool_call>{"name": "other", "arguments": {}}</tool_call>', None, []),
        (TAGGED, "a < b", "a < b", []),
        (TAGGED, "a <tool", "a <tool", []),
        (ONE, f"<tool_call>{LOOK}</tool_call><tool_call>{LOOK}</tool_call>", "", ["look"]),
        (WHOLE, '{"name": "see", "parameters": {"a": 1}}', "", ["see"]),
        (WHOLE, f"[TOOL_CALLS][{LOOK}, {LOOK}]", "", ["look", "look"]),
        (WHOLE, f"{LOOK}; {LOOK}", "", ["look", "look"]),
        (WHOLE, '{"a": 1}', '{"a": 1}', []),
        (WHOLE, f"{LOOK} and more", f"{LOOK} and more", []),
        (WHOLE, f"Well: {LOOK}", f"Well: {LOOK}", []),
    ],
)
def test_calls_in_text(form: AnswerForm, text: str, said: str | None, calls: list[str]) -> None:
    found = read(form, [text])
    assert found["text"] == (text if said is None else said)
    assert [call[1] for call in found["calls"]] == calls


def test_a_call_that_is_cut_stays_text() -> None:
    text = f"So <tool_call>\n{LOOK[:-1]}"
    assert read(TAGGED, [text], complete=False) == {"text": text, "thoughts": "", "calls": []}
    assert read(WHOLE, [LOOK], complete=False) == {"text": LOOK, "thoughts": "", "calls": []}


def test_arguments_of_a_forced_call_come_as_they_are_written() -> None:
    reader = AnswerReader(FORCED, lambda: "0")
    assert reader.feed('{"name":"look","argum').calls is None
    assert reader.feed('ents":{"a').calls == [(0, ("call_0", "look"), '{"')]
    assert reader.feed('":1}').calls == [(0, None, 'a":1')]
    assert reader.feed("}").calls == [(0, None, "}")]
    assert reader.finish(complete=True).calls is None
    assert not reader.is_cut


@pytest.mark.parametrize("end", range(len(FORCED_LOOK)))
def test_a_forced_call_cut_by_a_limit_is_told_so(end: int) -> None:
    reader = AnswerReader(FORCED, lambda: "0")
    pieces = [*map(reader.feed, FORCED_LOOK[:end]), reader.finish(complete=False)]
    arguments = "".join(each for piece in pieces for _, _, each in piece.calls or ())
    text = "".join(piece.text for piece in pieces)
    begun = '{"name":"look","arguments":'
    if reader.calls:
        assert begun + arguments in (FORCED_LOOK[:end], FORCED_LOOK[:-1])
        assert reader.is_cut
    else:
        assert text == FORCED_LOOK[:end]


@pytest.mark.parametrize(
    ("form", "text", "thoughts", "said"),
    [
        (THINKS, "<think>\na\n</think>\n\nb", "a", "b"),
        (THINKS, "\n <think>a</think>b", "a", "b"),
        (THINKS, "a <think>b</think>", "", "a <think>b</think>"),
        (THINKS, "<think>a", "a", ""),
        (THINKS, "<thin", "", "<thin"),
        (THINKS, "<think></think>\nb</think>", "", "b</think>"),
        (THINKING, f"a</think><tool_call>{LOOK}</tool_call>", "a", ""),
        (THINKING, f"<tool_call>{LOOK}</tool_call>", f"<tool_call>{LOOK}</tool_call>", ""),
    ],
)
def test_thoughts(form: AnswerForm, text: str, thoughts: str, said: str) -> None:
    found = read(form, list(text))
    assert (found["thoughts"], found["text"]) == (thoughts, said)
