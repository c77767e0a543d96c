"""Text that is safe to show: no part of a stop string leaks, nothing else is lost, log-probabilities go with it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.engine.text_stream import TextStream
from backends.types import PositionLogprobs, TokenLogprob
from tests.support.engine_helpers import tokenizer

seeds = st.integers(0, 2**32).map(random.Random)
letters = st.text("ab", min_size=1, max_size=4)


class Pieces:
    """A stream whose tokens are places in a list of text pieces; every token has a log-probability."""

    def __init__(self, stops: tuple[str, ...], pieces: list[str]) -> None:
        self.stream = TextStream(stops, pieces.__getitem__)
        self.pieces = pieces
        self.shown, self.entries = "", []

    def push(self, token: int, *, watch: bool = True) -> str | None:
        start = self.stream.length
        match = self.stream.push(token, watch=watch)
        if match is None or start < self.stream.length:
            self.stream.add_logprobs(start, logprobs(token))
        return match

    def take(self, *, final: bool = False) -> str:
        text, entries = self.stream.take(final=final)
        self.shown += text
        self.entries += [entry.chosen.token_id for entry in entries]
        return text


def logprobs(token: int) -> PositionLogprobs:
    return PositionLogprobs(TokenLogprob(token, str(token), -1.0, b""))


def naive_cut(pieces: list[str], stops: tuple[str, ...], watch_from: int) -> tuple[str, str | None, int]:
    """The whole text cut at the first stop string, how it ended, and how many tokens were used.

    Token by token: a stop counts in the first token that completes one and is watched; of several, the leftmost.
    """
    text = ""
    for i, piece in enumerate(pieces):
        before = len(text)
        text += piece
        if i < watch_from:
            continue
        ends = [
            (start, order)
            for order, stop in enumerate(stops)
            for start in range(len(text) - len(stop) + 1)
            if text[start : start + len(stop)] == stop and start + len(stop) > before
        ]
        if ends:
            start, order = min(ends)
            return text[:start], stops[order], i + 1
    return text, None, len(pieces)


@given(
    st.lists(st.text("abc", max_size=4), max_size=14),
    st.lists(letters, max_size=3).map(tuple),
    st.integers(0, 4),
    seeds,
)
def test_shown_text_is_the_whole_text_cut_once(
    pieces: list[str], stops: tuple[str, ...], watch_from: int, rng: random.Random
) -> None:
    expected, stop, used = naive_cut(pieces, stops, watch_from)
    found = Pieces(stops, pieces)
    match = None
    for i in range(len(pieces)):
        match = found.push(i, watch=i >= watch_from)
        if match is not None:
            break
        if rng.random() < 0.5:
            found.take()
            assert expected.startswith(found.shown), "shown too early"
            held = found.stream.hidden
            assert held == "" or any(one.startswith(held) and one != held for one in stops), "held back for nothing"
    found.take(final=True)
    assert (found.shown, match) == (expected, stop)
    starts = [sum(map(len, pieces[:i])) for i in range(used)]
    kept = [i for i in range(used) if stop is None or starts[i] < len(expected)]
    assert found.entries == kept


def test_a_stop_across_three_tokens_never_shows() -> None:
    found = Pieces(("<end>",), ["Hi <", "en", "d> more", "!"])
    assert (found.push(0), found.take()) == (None, "Hi ")
    assert (found.push(1), found.take()) == (None, "")
    assert (found.push(2), found.take(final=True)) == ("<end>", "")
    assert found.shown == "Hi "


def test_a_false_alarm_is_shown_when_it_is_decided() -> None:
    found = Pieces(("<end>", "ndx"), ["a<e", "nd", "y"])
    assert [(found.push(i), found.take()) for i in range(3)] == [(None, "a"), (None, ""), (None, "<endy")]
    assert found.entries == [0, 1, 2]


def test_what_is_held_back_at_the_end_is_shown() -> None:
    found = Pieces(("###",), ["x##"])
    assert (found.push(0), found.take(), found.take(final=True)) == (None, "x", "##")


def test_log_probabilities_wait_for_their_whole_text() -> None:
    found = Pieces(("yz",), ["xy", "w"])
    found.push(0)
    assert (found.take(), found.entries) == ("x", [])
    found.push(1)
    assert (found.take(), found.entries) == ("yw", [0, 1])


def test_a_token_without_text_goes_with_the_stop_that_follows_it() -> None:
    """Half of a character, say: whether it was asked for text before the stop came must make no difference."""
    for ask_early in (True, False):
        found = Pieces(("é",), ["x", "", "é"])
        found.push(0)
        found.push(1)
        if ask_early:
            found.take()
        assert (found.push(2), found.take(final=True), found.shown) == ("é", "" if ask_early else "x", "x")
        assert found.entries == [0]


def test_the_leftmost_stop_wins_and_the_first_named_of_two_at_one_place() -> None:
    assert Pieces(("cd", "bc"), ["abcd"]).push(0) == "bc"
    assert Pieces(("ab", "abc"), ["abc"]).push(0) == "ab"
    assert Pieces(("abc", "ab"), ["abc"]).push(0) == "abc"


def test_text_before_watching_does_not_complete_a_stop_but_may_begin_one() -> None:
    found = Pieces(("ab",), ["ab", "a", "b"])
    assert [found.push(0, watch=False), found.take()] == [None, "ab"]
    assert [found.push(1, watch=False), found.take()] == [None, ""]
    assert [found.push(2), found.take(final=True)] == ["ab", ""]


@given(st.text(max_size=20), st.lists(st.text(max_size=4), max_size=3))
def test_pieces_of_the_tokenizer_add_up_to_its_text(text: str, cuts: list[str]) -> None:
    """Characters of several tokens come out whole; nothing is lost, whatever the language."""
    tok = tokenizer()
    ids = tok.encode("".join([text, *cuts]))
    detokenizer = tok.detokenizer()
    pieces = [detokenizer.push(token) for token in ids]
    assert "".join(pieces) == tok.decode(ids)
    assert b"".join(map(tok.token_bytes, ids)).decode() == tok.decode(ids)


@given(st.lists(st.integers(0, 259), max_size=40))
def test_no_bytes_break_the_detokenizer(ids: list[int]) -> None:
    """A model may write bytes that are no text; what was shown must stay the beginning of the whole."""
    detokenizer = tokenizer().detokenizer()
    shown = "".join(detokenizer.push(token) for token in ids)
    assert tokenizer().decode(ids).startswith(shown)


@pytest.mark.parametrize("final", [False, True])
def test_an_empty_stream_shows_nothing(final: bool) -> None:
    assert TextStream(("x",), lambda token: "").take(final=final) == ("", ())
