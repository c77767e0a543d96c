"""What clients may send, as msgspec structs. The types are the documentation: OpenAPI is generated from them.

Three kinds of field: honoured ones; ones that change nothing here (``user``, ``metadata``); and OpenAI fields that this
gateway does not honour, declared with :func:`no_op` so that only a value that asks for nothing passes. Any other
field is unknown and refused. Cross-field rules are not here but in ``gateway.validation``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from backends.tree import MAX_DEPTH, MAX_NODES

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
INT32_MAX = 2**31 - 1
MAX_CHOICES = 16
MAX_STOP_STRINGS = 16
MAX_LOGPROBS = 20

NO_OP_KEY = "x-accepted-values"


def no_op(*values: Any, why: str | None = None) -> Meta:
    """Marks a field of OpenAI's that is not honoured: only ``values``, which ask for nothing, are accepted."""
    return Meta(description=why, extra_json_schema={"enum": list(values), NO_OP_KEY: True})


Temperature = Annotated[float, Meta(ge=0, le=2)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Seed = Annotated[int, Meta(ge=INT64_MIN, le=INT64_MAX)]
TokenId = Annotated[int, Meta(ge=0, le=INT32_MAX)]
TokenCount = Annotated[int, Meta(ge=1, le=INT32_MAX)]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
ModelName = Annotated[str, Meta(min_length=1, max_length=256)]
Probability = Annotated[float, Meta(gt=0, le=1)]


class RequestStruct(Struct, forbid_unknown_fields=True):
    """Base of everything that a client sends."""


class StreamOptions(RequestStruct):
    include_usage: bool | None = None
    include_obfuscation: Annotated[Any, no_op(None, False)] = None


class DecodingOptions(RequestStruct):
    """Extension: how to decode this request. Left out, the gateway decides.

    ``tree``: a branching per depth such as ``"4x2x1"``, or a list of paths such as ``[[0], [1], [0, 0]]``.
    ``acceptance`` "typical" is faster and *not* lossless. ``class`` says what kind of answer is asked for where the
    client knows better than the classifier; it must be a class of the policy. ``lookup``: whether to draft from the
    text itself too. ``deadline_ms`` counts from arrival.
    """

    method: Literal["auto", "medusa", "vanilla"] = "auto"
    heads: Annotated[int, Meta(ge=1, le=MAX_DEPTH)] | None = None
    tree: (
        Annotated[str, Meta(min_length=1, max_length=128)]
        | Annotated[
            list[Annotated[list[Annotated[int, Meta(ge=0, lt=MAX_NODES)]], Meta(min_length=1, max_length=MAX_DEPTH)]],
            Meta(min_length=1, max_length=MAX_NODES),
        ]
        | None
    ) = None
    acceptance: Literal["exact", "typical"] | None = None
    class_: Annotated[str, Meta(min_length=1, max_length=63)] | None = field(default=None, name="class")
    lookup: bool | None = None
    deadline_ms: Annotated[int, Meta(ge=1, le=86_400_000)] | None = None


class TextPart(RequestStruct):
    type: Literal["text"]
    text: str


class ChatMessage(RequestStruct):
    """One turn. The fields after ``content`` are those of an assistant message that a client sends back unchanged."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Meta(min_length=1)]
    name: Annotated[Any, no_op(None)] = None
    refusal: Annotated[Any, no_op(None)] = None
    tool_calls: Annotated[Any, no_op(None, [])] = None
    function_call: Annotated[Any, no_op(None)] = None
    audio: Annotated[Any, no_op(None)] = None
    annotations: Annotated[Any, no_op(None, [])] = None


class GenerationFields(RequestStruct, kw_only=True):
    """What both completion endpoints take."""

    model: ModelName
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Meta(ge=0, le=INT32_MAX)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    logit_bias: (
        Annotated[dict[str, Bias], Meta(extra_json_schema={"propertyNames": {"pattern": "^[0-9]+$"}})] | None
    ) = None
    seed: Seed | None = None
    max_tokens: TokenCount | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=INT32_MAX)] | None = None
    ignore_eos: bool | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    decoding: DecodingOptions | None = None
    # Labels for the client's own books: they never change an answer, so taking them ignores nothing.
    user: str | None = None
    metadata: dict[str, str] | None = None


class ChatCompletionRequest(GenerationFields, kw_only=True):
    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # Fields of OpenAI's that are not honoured.
    tools: Annotated[Any, no_op(None, [])] = None
    tool_choice: Annotated[Any, no_op(None, "none", "auto")] = None
    parallel_tool_calls: Annotated[Any, no_op(None, True)] = None
    functions: Annotated[Any, no_op(None, [])] = None
    function_call: Annotated[Any, no_op(None, "none", "auto")] = None
    response_format: Annotated[Any, no_op(None, {"type": "text"})] = None
    modalities: Annotated[Any, no_op(None, ["text"])] = None
    audio: Annotated[Any, no_op(None)] = None
    prediction: Annotated[Any, no_op(None)] = None
    reasoning_effort: Annotated[Any, no_op(None)] = None
    verbosity: Annotated[Any, no_op(None)] = None
    web_search_options: Annotated[Any, no_op(None)] = None
    prompt_cache_retention: Annotated[Any, no_op(None)] = None
    store: Annotated[Any, no_op(None, False)] = None
    service_tier: Annotated[Any, no_op(None, "auto", "default")] = None


class CompletionRequest(GenerationFields, kw_only=True):
    """``prompt``: a string, several strings, token ids, or several lists of token ids. Lists are not mixed."""

    prompt: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    # Fields of OpenAI's that are not honoured. best_of 1 is the default, and n is checked beside it in validation.
    best_of: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    echo: Annotated[Any, no_op(None, False)] = None
    suffix: Annotated[Any, no_op(None, "")] = None
