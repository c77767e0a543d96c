"""Chat completions through the official client, against a real server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from backends.types import SamplingParams
from gateway.settings import GatewaySettings
from tests.support.fakes import EOS, FakeDecoder, FakeTokenizer, answer_tokens
from tests.support.live_gateway import MODEL, LiveGateway, running_gateway

SAY_HI: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def gateway() -> Iterator[LiveGateway]:
    with running_gateway() as live:
        yield live


@pytest.fixture(scope="module")
def client(gateway: LiveGateway) -> openai.OpenAI:
    return gateway.client


def expected(messages: list[Any], decoder: FakeDecoder, **sampling: Any) -> str:
    """The fake's answer when nothing but sampling decides about it."""
    prompt = tuple(FakeTokenizer().encode_chat(messages))
    params = SamplingParams(**({"max_tokens": 1024} | sampling))
    return FakeTokenizer().decode(answer_tokens(prompt, params, decoder.natural_length))


def test_an_answer(gateway: LiveGateway, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=SAY_HI, temperature=0)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == MODEL
    choice = answer.choices[0]
    assert (choice.index, choice.message.role, choice.finish_reason) == (0, "assistant", "stop")
    assert choice.message.content == expected(SAY_HI, gateway.decoder, temperature=0.0)
    assert choice.logprobs is None
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 4
    assert answer.usage.completion_tokens == gateway.decoder.natural_length + 1
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.completion_tokens_details is None, "drafts are not OpenAI's accepted_prediction_tokens"


def test_the_seed_decides(client: openai.OpenAI) -> None:
    def ask(seed: int | None) -> str | None:
        return client.chat.completions.create(model=MODEL, messages=SAY_HI, seed=seed).choices[0].message.content

    assert ask(7) == ask(7)
    assert ask(7) != ask(8)
    assert ask(-(2**63)) != ask(2**63 - 1)
    assert ask(None) != ask(None), "a missing seed is drawn anew"


def test_a_missing_seed_comes_from_the_state() -> None:
    with running_gateway(new_seed=lambda: 99) as live:
        live.client.chat.completions.create(model=MODEL, messages=SAY_HI)
        assert live.decoder.submitted[0].sampling.seed == 99


def test_n_choices_have_their_own_seeds(gateway: LiveGateway, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=SAY_HI, n=4, seed=7)
    texts = [choice.message.content for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert len(set(texts)) == 4
    assert texts[0] == expected(SAY_HI, gateway.decoder, seed=7), "the first choice is that of n = 1"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 4, "the prompt counts once"
    assert answer.usage.completion_tokens == 4 * (gateway.decoder.natural_length + 1)


def test_max_tokens(client: openai.OpenAI) -> None:
    for limit in ({"max_tokens": 5}, {"max_completion_tokens": 5}):
        answer = client.chat.completions.create(model=MODEL, messages=SAY_HI, **limit)
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 5


def test_the_default_limit_is_the_rest_of_the_context() -> None:
    with running_gateway(GatewaySettings(default_max_tokens=50), FakeDecoder(max_model_len=64)) as live:

        def limit(words: str, **more: Any) -> int:
            live.client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": words}], **more)
            return live.decoder.submitted[-1].sampling.max_tokens

        assert limit("x") == 50
        assert limit("x" * 30) == 32
        assert limit("x", extra_body={"min_tokens": 55}) == 55


def test_stop_strings_cut_the_text(gateway: LiveGateway, client: openai.OpenAI) -> None:
    whole = expected(SAY_HI, gateway.decoder, temperature=0.0)
    stop = whole[10:14]
    answer = client.chat.completions.create(model=MODEL, messages=SAY_HI, temperature=0, stop=["nowhere", stop])
    assert answer.choices[0].message.content == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_all_sampling_fields_reach_the_engine(gateway: LiveGateway, client: openai.OpenAI) -> None:
    client.chat.completions.create(
        model=MODEL,
        messages=SAY_HI,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.1,
        frequency_penalty=-0.2,
        logit_bias={"65": -100, "259": 3},
        seed=-5,
        max_tokens=9,
        stop="###",
        logprobs=True,
        top_logprobs=2,
        extra_body={
            "top_k": 7,
            "min_p": 0.05,
            "repetition_penalty": 1.1,
            "min_tokens": 3,
            "ignore_eos": True,
            "stop_token_ids": [10, 13],
        },
    )
    assert gateway.decoder.submitted[-1].sampling == SamplingParams(
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.05,
        presence_penalty=0.1,
        frequency_penalty=-0.2,
        repetition_penalty=1.1,
        logit_bias={65: -100.0, 259: 3.0},
        seed=-5,
        max_tokens=9,
        min_tokens=3,
        ignore_eos=True,
        stop=("###",),
        stop_token_ids=(10, 13),
        logprobs=2,
    )


@pytest.mark.parametrize("request_", [{"messages": [{"role": "user", "content": "x" * 600}]}, {"max_tokens": 510}])
def test_what_does_not_fit_is_known_by_its_words(client: openai.OpenAI, request_: dict[str, Any]) -> None:
    """LiteLLM looks for OpenAI's words to try a model with a longer context, LangChain for "prompt is too long"."""
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**{"model": MODEL, "messages": SAY_HI, **request_})
    assert refused.value.code == "context_length_exceeded"
    assert refused.value.body["message"].startswith("This model's maximum context length is 512 tokens. However, ")  # type: ignore[index]
    assert "prompt is too long" in str(refused.value)


def test_openais_defaults(gateway: LiveGateway, client: openai.OpenAI) -> None:
    client.chat.completions.create(model=MODEL, messages=SAY_HI)
    sampling = gateway.decoder.submitted[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.logprobs) == (1.0, 1.0, 0, None)


def test_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=SAY_HI, temperature=0, logprobs=True, top_logprobs=3, max_tokens=12
    )
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert len(content) == 12
    raw = b"".join(bytes(entry.bytes or []) for entry in content)
    assert raw.decode(errors="ignore") == answer.choices[0].message.content  # the last character may be cut
    assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in content)
    assert all(len(entry.top_logprobs) == 3 for entry in content)


def test_logprobs_of_the_chosen_tokens_only(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=SAY_HI, logprobs=True, max_tokens=3)
    assert answer.choices[0].logprobs is not None
    assert [entry.top_logprobs for entry in answer.choices[0].logprobs.content or []] == [[], [], []]


def test_roles_and_content_parts(gateway: LiveGateway, client: openai.OpenAI) -> None:
    messages: list[Any] = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    ]
    client.chat.completions.create(model=MODEL, messages=messages)
    plain = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    ]
    assert gateway.decoder.submitted[-1].prompt_token_ids == tuple(FakeTokenizer().encode_chat(plain))


def test_an_answer_can_be_sent_back(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(model=MODEL, messages=SAY_HI)
    echo: Any = first.choices[0].message.model_dump()
    again = client.chat.completions.create(model=MODEL, messages=[*SAY_HI, echo, *SAY_HI])
    assert again.choices[0].message.content


def test_a_long_prompt_is_tokenised_off_the_loop() -> None:
    with running_gateway(GatewaySettings(inline_tokenize_chars=100)) as live:
        for length, on_the_loop in ((100, True), (101, False)):
            live.client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x" * length}])
            assert (live.tokenizer.threads[-1] == live.thread.ident) is on_the_loop


async def test_the_async_client(gateway: LiveGateway) -> None:
    async with gateway.async_client() as client:
        answer = await client.chat.completions.create(model=MODEL, messages=SAY_HI, temperature=0)
        assert answer.choices[0].message.content == expected(SAY_HI, gateway.decoder, temperature=0.0)


def test_an_engine_error_is_a_500_and_names_no_internals(gateway: LiveGateway, client: openai.OpenAI) -> None:
    gateway.decoder.fail(at_step=2)
    try:
        with pytest.raises(openai.InternalServerError) as caught:
            client.chat.completions.create(model=MODEL, messages=SAY_HI, n=3)
    finally:
        gateway.decoder.fail(at_step=None)
    assert caught.value.code == "engine_error"
    assert caught.value.type == "server_error"
    gateway.wait_idle()
    gateway.decoder.check_integrity()


def test_an_unexpected_error_is_a_bare_500(gateway: LiveGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(messages: list[dict[str, str]]) -> list[int]:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(gateway.tokenizer, "encode_chat", explode)
    with pytest.raises(openai.InternalServerError) as caught:
        gateway.client.chat.completions.create(model=MODEL, messages=SAY_HI)
    assert caught.value.code == "internal_error"
    assert "secret" not in str(caught.value)
    assert gateway.state.admission.in_flight == 0


def test_a_dead_engine_is_a_503(gateway: LiveGateway, client: openai.OpenAI) -> None:
    gateway.decoder.die()
    try:
        with pytest.raises(openai.APIStatusError) as caught:
            client.chat.completions.create(model=MODEL, messages=SAY_HI)
        assert gateway.http.get("/readyz").status_code == 503
        assert gateway.http.get("/healthz").status_code == 200
    finally:
        gateway.decoder.revive()
    assert caught.value.status_code == 503
    assert caught.value.code == "engine_unavailable"
    assert gateway.state.admission.in_flight == 0
    assert gateway.http.get("/readyz").status_code == 200


def test_a_deadline_keeps_what_there_is() -> None:
    ticks = iter(range(1000))
    decoder = FakeDecoder(clock=lambda: float(next(ticks)))  # each step takes a second of the engine's time
    with running_gateway(GatewaySettings(deadline_s=60.0), decoder, clock=lambda: 0.0) as live:
        answer = live.client.chat.completions.create(
            model=MODEL, messages=SAY_HI, extra_body={"decoding": {"deadline_ms": 5000}}
        )
        assert decoder.submitted[-1].deadline_s == 5.0
        assert answer.choices[0].finish_reason == "length"
        assert answer.choices[0].message.content
        assert "cut at its deadline" in answer.to_dict()["decoding"]["reason"]  # type: ignore[index]
        live.client.chat.completions.create(
            model=MODEL, messages=SAY_HI, extra_body={"decoding": {"deadline_ms": 90_000}}
        )
        assert decoder.submitted[-1].deadline_s == 60.0, "a client can't lengthen the operator's deadline"


def test_eos_is_not_in_the_text(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=SAY_HI, logit_bias={str(EOS): 100})
    assert answer.choices[0].message.content == ""
    assert answer.choices[0].finish_reason == "stop"
