"""What clients get back, as msgspec structs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType, field

FinishReasonOut = Literal["stop", "length", "tool_calls"]


class CompletionTokensDetails(Struct):
    reasoning_tokens: int


class Usage(Struct, omit_defaults=True):
    """``completion_tokens_details``: of models that think."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: CompletionTokensDetails | None = None


class DecodingReport(Struct):
    """Extension: how the request was decoded, over all its sequences, and why that way.

    ``accepted_tokens_per_step`` counts every emitted token, so vanilla decoding has 1. ``speedup_estimate`` is against
    vanilla decoding in the same batch. ``accepted_lookup_tokens``: of the accepted ones, those found in the text itself
    rather than guessed by heads; ``drafted_grammar_tokens``, ``accepted_grammar_tokens``: those that the answer's
    grammar forced. ``lossless`` false: the answer may differ from vanilla decoding's.
    ``adapted_from``: the model that the served one was adapted from together with its heads; the answer is the adapted
    model's.
    """

    method: Literal["medusa", "vanilla"]
    heads: int
    nodes: int
    steps: int
    accepted_tokens_per_step: float
    drafted_tokens: int
    accepted_draft_tokens: int
    accepted_lookup_tokens: int
    drafted_grammar_tokens: int
    accepted_grammar_tokens: int
    speedup_estimate: float
    lossless: bool
    reason: str
    rule: str
    policy_version: str
    adapted_from: str | None = None


class RemoteReport(Struct):
    """Extension: the ``decoding`` of an answer that an upstream gave. How it decoded is not known here, so nothing is
    claimed of it; ``upstream`` is what it says of itself, if it is a medusa-gateway too."""

    backend: str
    upstream_model: str
    reason: str
    rule: str
    policy_version: str
    upstream: Any = None
    method: Literal["remote"] = "remote"


class TopLogprob(Struct, gc=False):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobOut(Struct, gc=False):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[TokenLogprobOut]
    refusal: None = None


class CompletionLogprobs(Struct):
    """``text_offset`` counts characters of the returned text that are complete before the token. Null: of an echoed
    prompt's first token, before which nothing stands."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class FunctionOut(Struct):
    name: str
    arguments: str


class ToolCallOut(Struct):
    id: str
    function: FunctionOut
    type: Literal["function"] = "function"


class AssistantMessage(Struct):
    """``content`` is null where the answer is calls of tools only; ``tool_calls`` and ``reasoning_content`` are there
    where the answer has them."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallOut] | UnsetType = UNSET


class ChatChoice(Struct):
    """``stop_reason``, an extension that vLLM has too: the stop string that ended the answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReasonOut
    stop_reason: str | None = None


class ChatCompletion(Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    decoding: DecodingReport
    object: Literal["chat.completion"] = "chat.completion"


class CompletionChoice(Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReasonOut
    stop_reason: str | None = None


class Completion(Struct):
    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    decoding: DecodingReport
    object: Literal["text_completion"] = "text_completion"


class ModelCard(Struct):
    """``max_model_len``, ``num_heads``, ``dtype``, ``device`` (null where only an upstream knows), ``adapted_from`` and
    ``heads_stale`` (null: no heads, or it is not known) are extensions."""

    id: str
    created: int
    owned_by: str
    max_model_len: int | None
    num_heads: int
    dtype: str
    device: str
    adapted_from: str | None = None
    heads_stale: bool | None = None
    object: Literal["model"] = "model"


class ModelList(Struct):
    data: list[ModelCard]
    object: Literal["list"] = "list"


class Health(Struct):
    """``degraded``: what is not as it should be, in words, while requests are answered all the same; or, while
    ``status`` is "starting", what is being done. ``heads_stale``: the models whose heads were trained for another
    backbone."""

    status: Annotated[Literal["ok", "degraded", "starting"], Meta(examples=["ok"])]
    degraded: list[str] = []
    heads_stale: list[str] = []


class Pointer(Struct):
    """What ``GET /`` and ``GET /v1`` answer: where to look."""

    service: str
    version: str
    models: list[str]
    api: str = "/v1"
    openapi: str = "/schema/openapi.json"
    health: str = "/healthz"
    routes: list[str] = field(default_factory=list)
    readiness: str = "/readyz"
