"""What asks for nothing is accepted, what was given out is taken back, and the rest is refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionMessage

from backends.models.tiny import tiny_tokenizer
from gateway.api.completions import CHAT_BODIES, COMPLETION_BODIES
from gateway.wire.body_levels import Level
from gateway.wire.errors import InvalidRequest
from gateway.wire.no_op import no_op_fields
from gateway.wire.other_servers import as_markdown
from gateway.wire.prompts import plain_messages
from gateway.wire.request_body import BodyDecoder
from gateway.wire.requests import GIVEN_OUT, ChatCompletionRequest, ChatMessage, CompletionRequest
from gateway.wire.responses import AssistantMessage
from gateway.wire.spelling import misspelt
from tests.support.live_gateway import MODEL, LiveGateway, running_gateway
from tests.support.paths import ROOT

CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
    "stream": True,
    "stream_options": {},
    "decoding": {},
}
TEXT: dict[str, Any] = {"model": MODEL, "prompt": "hi", "stream": True, "stream_options": {}, "decoding": {}}
ROUTES: list[tuple[BodyDecoder[Any], type[msgspec.Struct], dict[str, Any]]] = [
    (CHAT_BODIES, ChatCompletionRequest, CHAT),
    (COMPLETION_BODIES, CompletionRequest, TEXT),
]
BOUNDED = settings(max_examples=150)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def copy_of(body: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(body))


def objects_of(value: Any, level: Level) -> Iterator[tuple[dict[str, Any], Level]]:
    """Every object of a body, with the level that it is on."""
    if isinstance(value, list):
        for each in value:
            yield from objects_of(each, level)
    elif isinstance(value, dict):
        yield value, level
        for name, inner in level.inner.items():
            yield from objects_of(value.get(name), inner)


@pytest.mark.parametrize(("decoder", "struct", "good"), ROUTES)
def test_null_means_left_out_everywhere(
    decoder: BodyDecoder[Any], struct: type[msgspec.Struct], good: dict[str, Any]
) -> None:
    wanted = decoder.decode(json.dumps(good).encode())
    body = copy_of(good)
    seen = 0
    for each, level in list(objects_of(body, Level.of(struct))):
        required = {f.encode_name for f in msgspec.structs.fields(level.struct) if f.required}
        for name in (*level.known - required, "guided_something", "whatever", 'a "quoted" name'):
            each.setdefault(name, None)
            seen += 1
    assert seen > 150
    assert decoder.decode(json.dumps(body).encode()) == wanted


@pytest.mark.parametrize(("decoder", "struct", "good"), ROUTES)
def test_no_op_fields_take_what_asks_for_nothing_and_refuse_the_rest_by_name(
    decoder: BodyDecoder[Any], struct: type[msgspec.Struct], good: dict[str, Any]
) -> None:
    wanted = decoder.decode(json.dumps(good).encode())
    for name, accepted, _, instead in no_op_fields(struct):
        for value in accepted:
            read = decoder.decode(json.dumps(good | {name: value}).encode())
            assert msgspec.structs.replace(read, **{name: None}) == wanted
        with pytest.raises(InvalidRequest) as refused:
            decoder.decode(json.dumps(good | {name: {"asks": "for something"}}).encode())
        assert (refused.value.param, refused.value.code) == (name, "unsupported_parameter")
        assert f"'{name}' is not supported" in refused.value.message
        assert instead in refused.value.message


def test_zero_is_not_false() -> None:
    """In one declaration and between two that are alike but for it: Python takes them for equal."""
    accepted = {each.name: each.accepted for each in no_op_fields(ChatCompletionRequest)}
    for name, value in (
        ("no_repeat_ngram_size", 0),
        ("watermark", False),
        ("num_beams", 1),
        ("skip_special_tokens", True),
    ):
        assert [type(each) for each in accepted[name]] == [type(value)]
        for other in (0, 1, False, True):
            body = json.dumps(CHAT | {name: other}).encode()
            if other == value and type(other) is type(value):
                CHAT_BODIES.decode(body)
            else:
                with pytest.raises(InvalidRequest):
                    CHAT_BODIES.decode(body)


def test_the_documented_table_is_the_one_in_force() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    assert as_markdown() in text, "run python -m gateway.wire.other_servers and put its table into docs/api.md"


def test_no_op_fields_that_are_not_of_other_servers_are_documented_too() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    for struct in (ChatCompletionRequest, CompletionRequest, ChatMessage):
        assert [each.name for each in no_op_fields(struct) if f"`{each.name}`" not in text] == []


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("temprature", "temperature"),
        ("temperatrue", "temperature"),
        ("maxTokens", "max_tokens"),
        ("max-tokens", "max_tokens"),
        ("stops", "stop"),
        # Each like something by a loose measure, and none of them meant by it.
        ("length_penalty", None),
        ("prompt_logprobs", None),
        ("options", None),
        ("input", None),
        ("k", None),
        ("x" * 1_000_000, None),
    ],
)
def test_hints_are_for_true_misspellings(name: str, meant: str | None) -> None:
    honoured = Level.of(ChatCompletionRequest).known - {each.name for each in no_op_fields(ChatCompletionRequest)}
    assert misspelt(name, honoured) == meant


# History: what was given out is taken back.


def taken_back(message: dict[str, Any]) -> ChatMessage:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "A"}, message, {"role": "user", "content": "B"}]}
    return CHAT_BODIES.decode(json.dumps(body).encode()).messages[1]


@BOUNDED
@given(text=st.text(max_size=20), added=st.dictionaries(st.text(max_size=12), JSON, max_size=4))
def test_any_message_that_was_given_out_is_accepted_as_history(text: str, added: dict[str, Any]) -> None:
    """``added``: what a relayed upstream may add. What would change the answer can't be among it: it is refused in
    requests, so no upstream is asked for it."""
    ours = msgspec.to_builtins(AssistantMessage(text))
    refused = {each.name for each in no_op_fields(ChatMessage)}
    added = {name: value for name, value in added.items() if name not in refused and name not in ours}
    given_out = ours | added
    parsed = ChatCompletionMessage.model_validate(given_out)
    for message in (
        given_out,
        parsed.model_dump(),
        parsed.model_dump(exclude_unset=True),
        json.loads(parsed.to_json()),
    ):
        if name := message.get("name"):
            message["name"] = name if isinstance(name, str) and name.isidentifier() else None
        assert taken_back(message).text == text


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"content": None}, ""),
        ({}, ""),
        ({"content": []}, ""),
        ({"content": "", "refusal": "I can not"}, "I can not"),
        ({"content": None, "refusal": "I can not"}, "I can not"),
        ({"refusal": "I can not"}, "I can not"),
        ({"content": "x", "refusal": "I can not"}, "x"),
        ({"content": "x", "id": "msg_1", "annotations": [{"type": "url_citation"}]}, "x"),
        ({"reasoning_content": "hm", "id": "msg_1"}, ""),
        ({"content": "x", "tool_calls": [], "function_call": None, "audio": None, "provider_specific_fields": {}}, "x"),
        ({"content": [{"type": "thinking", "thinking": [{}]}, {"type": "text", "text": "x", "annotations": []}]}, "x"),
        ({"content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]}, "x"),
    ],
)
def test_what_an_assistant_said(message: dict[str, Any], text: str) -> None:
    assert taken_back({"role": "assistant", **message}).text == text


@pytest.mark.parametrize("field", [each.name for each in no_op_fields(ChatMessage)])
def test_what_would_change_the_answer_is_refused_in_history_too(field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        taken_back({"role": "assistant", "content": "x", field: [{"id": "call_1"}]})
    assert refused.value.param == f"messages[1].{field}"


@pytest.mark.parametrize("field", sorted(GIVEN_OUT))
def test_other_roles_are_no_answers(field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        taken_back({"role": "user", "content": "x", field: "y"})
    assert (refused.value.param, refused.value.code) == (f"messages[1].{field}", "unknown_parameter")


def test_a_name_is_handed_to_the_template() -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi", "name": "user_proxy"}]}
    messages = plain_messages(CHAT_BODIES.decode(json.dumps(body).encode()).messages)
    tokenizer = tiny_tokenizer()
    tokenizer._hf.chat_template = "{% for m in messages %}{{ m.name }}: {{ m.content }}\n{% endfor %}"
    assert tokenizer.decode(tokenizer.encode_chat(messages)) == "user_proxy: hi\n"


@pytest.fixture(scope="module")
def gateway() -> Iterator[LiveGateway]:
    with running_gateway() as live:
        yield live


def test_an_answer_is_sent_back_by_the_client(gateway: LiveGateway) -> None:
    """Both ways in which people do it."""
    client = gateway.client
    history: list[Any] = [{"role": "user", "content": "hi", "name": "user_proxy"}]
    first = client.chat.completions.create(model=MODEL, messages=history).choices[0].message
    for said in (first, first.model_dump()):
        again = client.chat.completions.create(model=MODEL, messages=[*history, said, history[0]])  # type: ignore[list-item]
        assert again.choices[0].message.content


def test_explain_reads_bodies_as_the_routes_do(gateway: LiveGateway) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "prompt": None, "guided_json": None}
    assert gateway.http.post("/v1/decoding/explain", json=body).status_code == 200
    refused = gateway.http.post(
        "/v1/decoding/explain", json=body | {"stream": True, "stream_options": {"include_obfuscation": True}}
    )
    assert refused.json()["error"]["param"] == "stream_options.include_obfuscation"
