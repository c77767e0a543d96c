"""From a checked request to what an upstream is sent, and what of it an upstream can't do. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.routing.spec import EXTENSIONS, OTHER_FORMATS, SAMPLING_EXTENSIONS, VLLM_FORMATS, Dialect, Variant
from gateway.wire.requests import ChatCompletionRequest, DecodingOptions, GenerationFields
from gateway.wire.structured import ResponseFormat

_STANDARD = ("top_p", "presence_penalty", "frequency_penalty", "logit_bias", "seed", "max_tokens", "stop", "n")
_CHAT = ("max_completion_tokens", "logprobs", "top_logprobs")
_COMPLETION = ("logprobs",)
_TEMPLATE_FIELDS = ("chat_template_kwargs", "continue_final_message", "add_generation_prompt")
_CHAT_ONLY = ("reasoning_effort", *_TEMPLATE_FIELDS)
# What each extension asks for when it asks for nothing: not worth refusing a request over.
_NEUTRAL: dict[str, Any] = {"top_k": 0, "min_p": 0, "repetition_penalty": 1, "min_tokens": 0, "ignore_eos": False}
_NEUTRAL |= {"grammar": ""}

CHARS_PER_TOKEN = 4
"""Of common tokenizers on English text; an upstream's own is not known here."""


def what_it_lacks(body: GenerationFields, dialect: Dialect, variant: Variant | None = None) -> tuple[str, ...]:
    """Names of the fields of ``body`` that an upstream of ``dialect`` does not honour. One that is known to draft
    nothing does what ``decoding.method: vanilla`` asks for."""
    allowed = EXTENSIONS[dialect]
    lacking = [name for name in _extensions(body) if name not in allowed]
    if dialect == "openai" and not isinstance(body, ChatCompletionRequest) and _wants_format(body):
        lacking.append("response_format")
    if dialect == "openai" and isinstance(body, ChatCompletionRequest):
        lacking += [name for name in _TEMPLATE_FIELDS if getattr(body, name) not in (None, {}, False)]
    if getattr(body, "echo", None):
        # Upstreams are always asked to stream.
        lacking.append("echo")
    if "decoding" not in allowed:
        wishes = decoding_wishes(body.decoding)
        if variant is not None and variant.plain and body.decoding is not None and body.decoding.method == "vanilla":
            wishes = [name for name in wishes if name != "method"]
        lacking += [f"decoding.{name}" for name in wishes]
    if body.decoding is not None and body.decoding.trace:
        # Of any dialect: an upstream's own steps are not relayed.
        lacking.append("decoding.trace")
    return tuple(lacking)


def decoding_wishes(options: DecodingOptions | None) -> list[str]:
    """What of ``decoding`` only whoever decodes can fulfil; class and deadline are the gateway's own to heed."""
    if options is None:
        return []
    return options.asked_fields() + (["acceptance"] if options.acceptance == "exact" else [])


def payload(
    body: GenerationFields,
    prompt: Any,
    dialect: Dialect,
    upstream_model: str,
    temperature: float | None,
    knobs: Mapping[str, Any] | None = None,
) -> tuple[str, dict[str, Any]]:
    """The path below the upstream's URL, and the body. ``prompt``: see :attr:`gateway.serving.call.Call.prompt`.

    Always streamed, whatever the client wants, so that an upstream that hangs is noticed. Labels (``user``,
    ``metadata``) are for this gateway's operator and go no further. ``temperature`` None: the upstream's default.
    ``knobs``: fields by which the policy bounds drafting; the client's own wishes go first.
    """
    chat = isinstance(body, ChatCompletionRequest)
    stream_options = {"include_usage": True}
    if body.stream_options is not None and body.stream_options.continuous_usage_stats and dialect != "openai":
        stream_options["continuous_usage_stats"] = True
    sent: dict[str, Any] = {"model": upstream_model, "stream": True, "stream_options": stream_options}
    sent["messages" if chat else "prompt"] = prompt
    if temperature is not None:
        sent["temperature"] = temperature
    asked = [name for name in _extensions(body) if name != "structured_outputs"]
    for name in (*_STANDARD, *(_CHAT if chat else _COMPLETION), *asked):
        if (value := getattr(body, name)) is not None:
            sent[name] = value
    if isinstance(body, ChatCompletionRequest):
        sent |= _chat_fields(body)
    if body.response_format is not None and _wants_format(body):
        sent["response_format"] = _response_format(body.response_format)
    if body.structured_outputs is not None:
        sent["structured_outputs"] = _without_nulls(body.structured_outputs)
    if "decoding" in EXTENSIONS[dialect] and (wishes := decoding_wishes(body.decoding)):
        options = msgspec.to_builtins(body.decoding)
        sent["decoding"] = {name: options[name] for name in wishes}
    for name, value in (knobs or {}).items():
        sent.setdefault(name, value)
    return ("/chat/completions" if chat else "/completions"), sent


def _chat_fields(body: ChatCompletionRequest) -> dict[str, Any]:
    """What only chat has, as OpenAI and vLLM name it."""
    found = {name: getattr(body, name) for name in _CHAT_ONLY if getattr(body, name) not in (None, {})}
    if body.tools:
        tools = [{"type": "function", "function": _without_nulls(each.function)} for each in body.tools]
        found |= {"tools": tools, "tool_choice": body.tool_choice or "auto"}
        if body.parallel_tool_calls is not None:
            found["parallel_tool_calls"] = body.parallel_tool_calls
    return found


def tokens_of(characters: int) -> int:
    """The tokens of a text by its length: a guess, and never 0 for a text that says something."""
    return -(-characters // CHARS_PER_TOKEN)


def _extensions(body: GenerationFields) -> list[str]:
    names = (*SAMPLING_EXTENSIONS, *VLLM_FORMATS, *OTHER_FORMATS, "cache_salt")
    return [name for name in names if getattr(body, name) not in (None, [], _NEUTRAL.get(name))]


def _wants_format(body: GenerationFields) -> bool:
    return body.response_format is not None and body.response_format.type != "text"


def _response_format(asked: ResponseFormat) -> dict[str, Any]:
    """As OpenAI knows it, whichever server's form the client has used."""
    if asked.schema is not None:
        return {"type": "json_schema", "json_schema": {"name": "answer", "schema": asked.schema}}
    sent = _without_nulls(asked)
    if asked.json_schema is not None:
        sent["json_schema"] = _without_nulls(asked.json_schema)
    return sent


def _without_nulls(value: msgspec.Struct) -> dict[str, Any]:
    return {name: each for name, each in msgspec.structs.asdict(value).items() if each is not None}
