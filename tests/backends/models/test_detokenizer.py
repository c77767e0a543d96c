"""Tokens to text, for every family of tokenizers: pieces add up to the whole, whatever the model writes."""

from __future__ import annotations

import random
import re
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backends.engine.sequence import Sequence
from backends.models.detokenizer import CONTEXT, UNDECIDED, ByteDetokenizer, WindowDetokenizer, byte_rules
from backends.models.tokenizer import HfTokenizer
from backends.types import DecodingPlan, GenerationRequest, PositionLogprobs, SamplingParams
from gateway.wire.logprobs import CompletionLogprobsWriter, chat_logprobs
from tests.support.tokenizer_families import FAMILIES, OTHERS, family

seeds = st.integers(0, 2**32).map(random.Random)
names = st.sampled_from(sorted(FAMILIES))
TEXTS = ["the fox", "é", "日本", "🙂", "\n", "  ", "a\nb", "\ufffd", "👩‍👩‍👧", "e\u0301"]
thorough = settings(max_examples=400, suppress_health_check=list(HealthCheck))


def some_ids(tokenizer: HfTokenizer, rng: random.Random) -> list[int]:
    """What a model may write: text, any tokens, bytes in any order, characters that are cut, ids without a token."""
    ids: list[int] = []
    for _ in range(rng.randint(0, 8)):
        kind = rng.random()
        if kind < 0.4:
            ids += tokenizer._powerless.encode(rng.choice(TEXTS)).ids
        elif kind < 0.6:
            ids.append(rng.randrange(len(tokenizer) + 2))
        else:
            raw = rng.choice(["🙂", "é", "日", "\n", "\x7f"]).encode()[: rng.randint(1, 4)]
            ids += [token for byte in raw if (token := byte_token(tokenizer, byte)) is not None]
    return ids


def byte_token(tokenizer: HfTokenizer, byte: int) -> int | None:
    for token in range(len(tokenizer)):
        piece = tokenizer._fast.id_to_token(token)
        if piece == f"<0x{byte:02X}>" or (len(piece or "") == 1 and tokenizer.token_bytes(token) == bytes([byte])):
            return token
    return None


def hf_is_right(tokenizer: HfTokenizer, ids: list[int]) -> bool:
    """Whether the library's own decoding is to be had: it makes U+FFFD of every byte of a run that has one wrong."""
    if tokenizer._rules is None or tokenizer._rules.byte_level:
        return True
    run = b""
    for token in [*(each for each in ids if each not in tokenizer._special), -1]:
        piece = tokenizer._fast.id_to_token(token) if token >= 0 else ""
        if piece is None:
            continue
        if piece.startswith("<0x"):
            run += tokenizer.token_bytes(token)
            continue
        try:
            run.decode()
        except UnicodeDecodeError:
            return False
        run = b""
    return True


def pieces_of(tokenizer: HfTokenizer, ids: list[int], prompt: list[int] | None = None) -> list[str]:
    detokenizer = tokenizer.detokenizer() if prompt is None else tokenizer.detokenizer_after(prompt)
    return [*map(detokenizer.push, ids), detokenizer.flush()]


@thorough
@given(st.sampled_from(sorted([*FAMILIES, *OTHERS])), seeds)
def test_pieces_add_up_to_the_text_of_the_whole(name: str, rng: random.Random) -> None:
    tokenizer = family(name)
    ids = some_ids(tokenizer, rng)
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    if hf_is_right(tokenizer, ids):
        assert tokenizer.decode(ids) == tokenizer._fast.decode(ids)


HALF_SURROGATE = re.compile(rb"\xed[\xa0-\xbf]\Z")


@thorough
@given(names, seeds)
def test_all_that_is_certain_is_shown_and_nothing_else(name: str, rng: random.Random) -> None:
    """After every token: the text of all bytes so far, but for the beginning of a character that may still come."""
    tokenizer = family(name)
    ids = some_ids(tokenizer, rng)
    pieces = pieces_of(tokenizer, ids)
    for count in range(len(ids) + 1):
        shown, text = "".join(pieces[:count]), tokenizer.decode(ids[:count])
        raw = b"".join(tokenizer.token_bytes(token) for token in ids[:count])
        if HALF_SURROGATE.search(raw):
            # No character begins so, but Python's decoder waits for the third byte of a surrogate's code all the same.
            assert text == shown + "\ufffd\ufffd"
            continue
        assert text in (shown, shown + "\ufffd")
        if text != shown:
            completions = [b"\x80", b"\xa0\xa0", b"\x80\x80", b"\x90\x80\x80", b"\x80\x80\x80"]
            assert any(not (raw + more).decode("utf-8", "replace").endswith("\ufffd") for more in completions)


@pytest.mark.parametrize("name", ["byte-fallback", "byte-level"])
def test_a_replacement_character_of_the_models_own_is_shown_at_once(name: str) -> None:
    tokenizer = family(name)
    ids = tokenizer._powerless.encode("\ufffd\ufffd").ids
    shown = [piece for piece in pieces_of(tokenizer, ids) if piece.strip()]
    assert "".join(shown) == "\ufffd\ufffd"
    assert pieces_of(tokenizer, ids)[-1] == ""


def test_bytes_that_fit_nowhere_end_no_request() -> None:
    """What raised "Invalid prefix encountered": a character, and behind it a byte that isn't one."""
    tokenizer = family("byte-fallback")
    a = tokenizer._fast.token_to_id("a")
    for raw in (b"\xc3\xa9\xff", b"\n\xf0", b"b\xe6\x97"):
        ids = [a, *(tokenizer._fast.token_to_id(f"<0x{byte:02X}>") for byte in raw), a]
        assert "".join(pieces_of(tokenizer, ids)) == f"a{raw.decode('utf-8', 'replace')}a"


@thorough
@given(st.sampled_from(sorted([*FAMILIES, *OTHERS])), seeds)
def test_a_completion_goes_on_from_its_prompt(name: str, rng: random.Random) -> None:
    tokenizer = family(name)
    prompt, answer = some_ids(tokenizer, rng), some_ids(tokenizer, rng)
    before, text = tokenizer.decode(prompt), "".join(pieces_of(tokenizer, answer, prompt))
    if not before.endswith("\ufffd"):  # may be the beginning of a character
        assert before + text == tokenizer.decode([*prompt, *answer])


def accepted(tokenizer: HfTokenizer, ids: list[int], *, continues: bool, stop: tuple[str, ...] = ()) -> Any:
    """The text and log-probabilities of a sequence that takes ``ids``, with two alternatives at each place."""
    sampling = SamplingParams(max_tokens=len(ids), logprobs=2, ignore_eos=True, stop=stop)
    prompt = tuple(tokenizer._powerless.encode("a").ids)
    request = GenerationRequest("r", prompt, sampling, DecodingPlan(method="vanilla"), continues=continues)
    sequence = Sequence(request, tokenizer, frozenset(), 0.0)
    logits = torch.zeros(1, len(tokenizer) + 2)
    text, entries = "", []
    for token in ids:
        ended = sequence.accept(token, logits, 0)
        chunk = sequence.take_chunk()
        text, entries = text + chunk.text, [*entries, *chunk.logprobs]
        if ended:
            break
    return text, entries, sequence


@settings(max_examples=200, suppress_health_check=list(HealthCheck))
@given(names, seeds, st.booleans())
def test_bytes_of_the_tokens_are_those_of_the_text(name: str, rng: random.Random, continues: bool) -> None:
    tokenizer = family(name)
    ids = some_ids(tokenizer, rng) or [5]
    text, entries, _ = accepted(tokenizer, ids, continues=continues)
    chat = chat_logprobs(entries).content
    assert b"".join(bytes(each.bytes or []) for each in chat).decode("utf-8", "replace") == text
    out = CompletionLogprobsWriter().write(entries)
    assert all(a <= b for a, b in pairwise(out.text_offset))
    for token, entry, offset in zip(out.tokens, entries, out.text_offset, strict=True):
        assert 0 <= offset <= len(text)
        if entry.chosen.token_bytes and "\ufffd" not in token:
            assert text[offset:].startswith(token)


def test_offsets_of_bytes_that_are_no_character() -> None:
    def offsets(*raw: bytes) -> list[int]:
        entries = [PositionLogprobs(entry_of(each)) for each in raw]
        return CompletionLogprobsWriter().write(entries).text_offset

    assert offsets(b"a", b"\xc3", b"\xa9", b"b") == [0, 1, 1, 2]  # "aéb"
    assert offsets(b"a", b"\xc3", b"b", b"c") == [0, 1, 2, 3]  # "a�bc"
    assert offsets(b"\xe0", b"\x80", b"a") == [0, 1, 2]  # "��a"
    assert offsets(b"\xf0", b"\xf0\x9f", b"\x99\x82", b"a") == [0, 1, 1, 2]  # "�🙂a"
    assert offsets(b"a", b"", b"\xef", b"\xbf\xbd", b"", b"z") == [0, 1, 1, 1, 2, 2]  # "a�z", special tokens between


def entry_of(raw: bytes) -> Any:
    from backends.types import TokenLogprob

    return TokenLogprob(0, raw.decode("utf-8", "replace"), -1.0, raw)


def test_special_tokens_are_named_and_have_no_text() -> None:
    tokenizer = family("byte-level")
    end = tokenizer._fast.token_to_id("<|end|>")
    text, entries, _ = accepted(tokenizer, [end, 70, end, end, 71], continues=True)
    assert entries[0].chosen.token == "<|end|>"
    out = CompletionLogprobsWriter().write(entries)
    assert (len(text), out.text_offset) == (2, [0, 0, 1, 1, 1])


@pytest.mark.parametrize("name", ["byte-level", "byte-fallback"])
def test_what_is_cut_at_the_end_shows_as_a_replacement_character(name: str) -> None:
    """As decoding the tokens shows it; a stop string may hold it, and then it is cut."""
    tokenizer = family(name)
    ids = [byte_token(tokenizer, byte) for byte in "🙂".encode()[:2]]
    assert accepted(tokenizer, ids, continues=True)[0] == "\ufffd"  # type: ignore[arg-type]
    assert accepted(tokenizer, ids, continues=True, stop=("\ufffd",))[0] == ""  # type: ignore[arg-type]


def test_a_stop_of_replacement_characters_hits() -> None:
    tokenizer = family("byte-fallback")
    ids = [tokenizer._fast.token_to_id("\ufffd")] * 9
    text, _, sequence = accepted(tokenizer, ids, continues=True, stop=("\ufffd\ufffd\ufffd",))
    assert (text, sequence.finish_reason, sequence.num_generated) == ("", "stop", 3)


def test_the_cost_of_a_token_does_not_grow() -> None:
    """Neither tokens nor bytes pile up, however long nothing can be shown."""
    for name in FAMILIES:
        tokenizer = family(name)
        for ids in ([byte_token(tokenizer, 0xFF)], [byte_token(tokenizer, 0xF0)], [tokenizer.eos_token_id]):
            detokenizer = tokenizer.detokenizer()
            assert isinstance(detokenizer, ByteDetokenizer)
            for _ in range(50):
                detokenizer.push(ids[0] or 0)
                held = detokenizer._decode.__self__.getstate()[0]  # type: ignore[attr-defined]
                assert len(held) < 4
    for name in OTHERS:
        tokenizer = family(name)
        decoded: list[int] = []

        def decode(ids: list[int], tokenizer: HfTokenizer = tokenizer, decoded: list[int] = decoded) -> str:
            decoded.append(len(ids))
            return tokenizer._fast.decode(ids) + "\ufffd"

        window = WindowDetokenizer(decode, lambda token: True)
        for _ in range(100):
            window.push(3)
        assert max(decoded) <= CONTEXT + UNDECIDED
        assert len(decoded) <= 2 * 100


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "BPEDecoder", "suffix": "</w>"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "CTC"}]},
    ],
)
def test_decoders_that_do_something_else_are_not_taken_for_bytes(decoder: dict[str, Any] | None) -> None:
    assert byte_rules(decoder) is None
