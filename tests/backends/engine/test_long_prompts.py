"""Much text from one client holds up nobody else, and text that can't fit is not tokenised."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backends.engine.stops import StopWatch
from backends.models.chat_template import ChatTemplate, RenderedTooLong
from backends.types import ModelInfo, PromptTooLong
from gateway.wire.errors import InvalidRequest
from gateway.wire.prompts import encode_messages, encode_prompts
from tests.support.fakes import FakeTokenizer
from tests.support.tokenizer_families import FAMILIES, OTHERS, added, family

seeds = st.integers(0, 2**32).map(random.Random)
PROSE = "the quick brown fox jumps over the lazy dog. "
WORDS = [
    "the quick",
    " ",
    "\n\n  \n",
    "é",
    "日本",
    "🙂",
    "\x04",
    "\x13",
    "a" * 30,
    "\u212b",
    "각",
    "e\u0301",
    "\t",
    "\u3000",
]


def info(max_model_len: int) -> ModelInfo:
    return ModelInfo("m", max_model_len, 260, 0, "float32", "cpu")


async def longest_gap(work: Callable[[], Any]) -> tuple[float, float]:
    """How long a loop that only ticks waits for its turn while ``work`` is done beside it, and how long that takes."""
    over, gaps = asyncio.Event(), [0.0]

    async def tick() -> None:
        last = time.perf_counter()
        while not over.is_set():
            await asyncio.sleep(0)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    ticker = asyncio.create_task(tick())
    await asyncio.sleep(0)
    began = time.perf_counter()
    await work()
    took = time.perf_counter() - began
    over.set()
    await ticker
    return max(gaps), took


@pytest.mark.parametrize("shape", ["prompt", "chat", "prompts", "special tokens", "messages"])
async def test_the_loop_goes_on_while_a_long_text_is_tokenised(shape: str) -> None:
    """`Tokenizer.encode` would keep the interpreter for all of it. On a busy machine a try may fail, not every one."""
    tokenizer, wide = family("chatml", "plain"), info(2**30)
    long = PROSE * 12_000
    messages = [{"role": "user", "content": long if shape == "chat" else "<|im_end|> a" * 40_000}]
    if shape == "messages":
        messages = [{"role": "user", "content": "a"}] * 10_000

    async def work() -> None:
        if shape == "prompt":
            await encode_prompts(tokenizer, [long], 2048, wide)
        elif shape == "prompts":
            await encode_prompts(tokenizer, [PROSE * 12] * 1000, 2048, wide)
        else:
            await encode_messages(tokenizer, messages, 2048, wide)

    tries = []
    for _ in range(4):
        gap, took = await longest_gap(work)
        tries.append(gap / took)
        if gap < took / 3:
            return
    pytest.fail(f"the loop stood still for these parts of the work: {tries}")


async def test_what_is_small_by_itself_but_much_together_is_a_threads_work() -> None:
    tokenizer = FakeTokenizer()
    here = threading.get_ident()

    async def threads_of(work: Any) -> set[bool]:
        tokenizer.threads.clear()
        await work
        return {thread == here for thread in tokenizer.threads}

    message = {"role": "user", "content": "a"}
    wide = info(2**30)
    assert await threads_of(encode_messages(tokenizer, [message] * 3, 2048, wide)) == {True}
    assert await threads_of(encode_messages(tokenizer, [message] * 300, 2048, wide)) == {False}
    assert await threads_of(encode_prompts(tokenizer, ["a"] * 3, 2048, wide)) == {True}
    assert await threads_of(encode_prompts(tokenizer, ["a"] * 300, 2048, wide)) == {False}
    assert await threads_of(encode_prompts(tokenizer, ["a" * 1500] * 2, 2048, wide)) == {False}


async def test_a_text_that_can_not_fit_is_refused_before_it_is_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, small = family("chatml", "plain"), info(100)
    monkeypatch.setattr(tokenizer, "_fast", None)
    monkeypatch.setattr(tokenizer._powerless, "_tokenizer", None)
    for field, work in (
        ("prompt", encode_prompts(tokenizer, [PROSE * 1000], 2048, small)),
        ("prompt[1]", encode_prompts(tokenizer, [[1], PROSE * 1000], 2048, small)),
        ("messages", encode_messages(tokenizer, [{"role": "user", "content": PROSE * 1000}], 2048, small)),
        ("messages", encode_messages(tokenizer, [{"role": "user", "content": "a"}] * 1000, 2048, small)),
    ):
        with pytest.raises(InvalidRequest) as caught:
            await work
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", field)


async def test_a_text_that_may_fit_is_counted_exactly() -> None:
    tokenizer = family("byte-level")
    assert len((await encode_prompts(tokenizer, ["a" * 99], 2048, info(100)))[0]) == 99
    with pytest.raises(InvalidRequest, match="at least 100 tokens"):
        await encode_prompts(tokenizer, ["a" * 100], 2048, info(100))


@settings(max_examples=400, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(sorted([*FAMILIES, *OTHERS])), seeds)
def test_no_text_has_fewer_tokens_than_the_bound_says(name: str, rng: random.Random) -> None:
    tokenizer = family(name, "plain")
    words = rng.choices([*WORDS, *added(tokenizer)], k=rng.choice([1, 3, 20]))
    text = "".join(word * rng.choice([1, 1, 300]) for word in words)
    bound = tokenizer._bound
    least = bound.least_tokens(bound.size(text))
    assert least <= len(tokenizer._fast.encode(text, add_special_tokens=False).ids)
    messages = [{"role": "user", "content": text}]
    exact = len(tokenizer.encode_chat(messages))
    assert len(tokenizer.encode_chat(messages, exact)) == exact
    if exact:
        with pytest.raises(PromptTooLong):
            tokenizer.encode_chat(messages, exact - 1)


@pytest.mark.parametrize("name", sorted([*FAMILIES, *OTHERS]))
def test_no_run_of_one_word_has_fewer_tokens_than_the_bound_says(name: str) -> None:
    """Of white space, of what the vocabulary lacks, of special tokens with it: the shortest tokenisations there are."""
    tokenizer = family(name)
    bound = tokenizer._bound
    for word in (*WORDS, *(token + "  " for token in added(tokenizer))):
        ids = tokenizer._fast.encode(word * 300, add_special_tokens=False).ids
        assert bound.least_tokens(bound.size(word * 300)) <= len(ids), word


def test_bounds_are_given_where_they_can_be() -> None:
    known = {name for name in [*FAMILIES, *OTHERS] if family(name)._bound.longest is not None}
    assert known >= {"byte-level", "llama3", "chatml", "byte-fallback", "mistral", "gemma", "phi3", "unigram"}
    assert known & {"wordpiece", "regex"} <= {"regex"}


def test_a_long_list_of_messages_is_not_rendered_to_its_end() -> None:
    template = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", {})
    sizes: list[int] = []

    def size(text: str) -> int:
        sizes.append(len(text))
        return len(text)

    with pytest.raises(RenderedTooLong):
        template.render([{"role": "user", "content": "abc"}] * 5000, {}, size, 500)
    assert sum(sizes) < 520


@pytest.mark.parametrize("shape", ["same beginning", "one letter", "random"])
def test_long_stop_strings_cost_what_short_ones_do(shape: str) -> None:
    def cost(length: int) -> float:
        rng = random.Random(1)
        if shape == "random":
            stops = ["".join(rng.choices("abcd", k=length)) for _ in range(16)]
        elif shape == "one letter":
            stops = ["a" * (length - i) for i in range(16)]
        else:
            stops = ["ab" * (length // 2 - 1) + f"{i:02}" for i in range(16)]
        watch = StopWatch(tuple(stops))
        text = "a" * (length - 17) + "b" if shape == "one letter" else "ab" * length
        text = "".join(rng.choices("abcd", k=8192)) if shape == "random" else (text * (8192 // len(text) + 1))[:8192]
        for i in range(0, len(text), 4):
            watch.feed(text[i : i + 4])
        return watch.operations / len(text)

    assert cost(1024) < 3 * max(cost(32), 1)
    assert cost(1024) <= 3 * 16


def test_text_outside_of_stops_costs_nothing() -> None:
    watch = StopWatch(tuple("#" * 1024 + str(i) for i in range(16)))
    for _ in range(100):
        watch.feed(PROSE)
    assert (watch.operations, watch.held) == (0, 0)
