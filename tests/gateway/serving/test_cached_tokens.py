"""The next turn of a conversation says how much of it was found in the cache. Real engine, real client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from backends.engine.loading import EngineOptions, open_engine
from backends.models.tiny import TINY_MODEL_NAME
from gateway.serving.call import ServedModel
from gateway.serving.targets import Backends
from tests.support.access_helpers import entry, keyed_gateway, new_key, write_keys

ALICE, BOB = new_key(), new_key()
Ask = Callable[..., tuple[str, int]]


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """Send a conversation with a key; returns the answer and ``cached_tokens``."""
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    write_keys(path, entry("alice", ALICE), entry("bob", BOB))
    engine = open_engine(EngineOptions(model=TINY_MODEL_NAME, dtype="float32", threads=1))
    served = ServedModel(engine.decoder, engine.tokenizer, engine.grammars)

    with keyed_gateway(path, backends=Backends.of_engines({TINY_MODEL_NAME: served}, 8)) as live:

        def send(key: str, messages: list[Any], *, stream: bool = False, **extra: Any) -> tuple[str, int]:
            with openai.OpenAI(base_url=f"{live.url}/v1", api_key=key, max_retries=0, timeout=30.0) as client:
                asked: dict[str, Any] = {
                    "model": TINY_MODEL_NAME,
                    "messages": messages,
                    "max_tokens": 20,
                    "extra_body": {"ignore_eos": True, **extra},
                }
                if not stream:
                    answer = client.chat.completions.create(**asked)
                    text, usage = answer.choices[0].message.content, answer.usage
                else:
                    text, usage = "", None
                    for chunk in client.chat.completions.create(
                        stream=True, stream_options={"include_usage": True}, **asked
                    ):
                        text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
                        usage = chunk.usage or usage
            assert usage is not None and usage.prompt_tokens_details is not None
            cached = usage.prompt_tokens_details.cached_tokens
            assert cached is not None and cached <= usage.prompt_tokens
            return text or "", cached

        yield send
    engine.decoder.close()


def conversation(text: str, answer: str | None = None) -> list[Any]:
    begin = [{"role": "system", "content": text}, {"role": "user", "content": "Go on, please."}]
    if answer is None:
        return begin
    return [*begin, {"role": "assistant", "content": answer}, {"role": "user", "content": "And then?"}]


@pytest.mark.parametrize("stream", [False, True])
def test_the_next_turn_finds_the_first(ask: Ask, stream: bool) -> None:
    text = f"This is told {'bit by bit' if stream else 'at once'}, and long enough for a page."
    answer, cached = ask(ALICE, conversation(text), stream=stream)
    assert cached == 0
    _, cached = ask(ALICE, conversation(text, answer), stream=stream)
    assert cached >= 16 and cached % 16 == 0


def test_who_has_another_key_finds_nothing(ask: Ask) -> None:
    text = "Only Alice knows this text, and it is long enough for a page."
    answer, _ = ask(ALICE, conversation(text))
    assert ask(BOB, conversation(text, answer))[1] == 0
    assert ask(BOB, conversation(text, answer))[1] > 0
    assert ask(ALICE, conversation(text, answer))[1] > 0


def test_who_has_another_salt_finds_nothing(ask: Ask) -> None:
    text = "With salt this is another text, and it is long enough for a page."
    answer, _ = ask(ALICE, conversation(text), cache_salt="one")
    assert ask(ALICE, conversation(text, answer), cache_salt="two")[1] == 0
    assert ask(ALICE, conversation(text, answer))[1] == 0
    assert ask(ALICE, conversation(text, answer), cache_salt="one")[1] > 0
    assert ask(BOB, conversation(text, answer), cache_salt="one")[1] == 0
