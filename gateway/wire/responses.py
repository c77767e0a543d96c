"""What clients get back, as msgspec structs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType, field

from backends.types import TracedToken

FinishReasonOut = Literal["stop", "length", "tool_calls"]


class CompletionTokensDetails(Struct):
    reasoning_tokens: int


class PromptTokensDetails(Struct):
    """``cached_tokens``: those that were read for an earlier request, and did not have to be read again."""

    cached_tokens: int = 0


class Usage(Struct, omit_defaults=True):
    """``completion_tokens_details``: of models that think."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: CompletionTokensDetails | None = None
    prompt_tokens_details: PromptTokensDetails | None = None

    @property
    def cached_tokens(self) -> int:
        return 0 if self.prompt_tokens_details is None else self.prompt_tokens_details.cached_tokens


class TracedStep(Struct, gc=False):
    """What one step did for one choice; see :class:`backends.types.StepTrace`."""

    choice: int
    step: int
    rows: int
    nodes: int
    ms: float
    tokens: list[TracedToken]


class DecodingReport(Struct):
    """Extension: how the request was decoded, over all its sequences, and why that way.

    ``accepted_tokens_per_step`` counts every emitted token, so vanilla decoding has 1. ``speedup_estimate`` is against
    vanilla decoding in the same batch. ``accepted_lookup_tokens``: of the accepted ones, those found in the text itself
    rather than guessed by heads; ``drafted_grammar_tokens``, ``accepted_grammar_tokens``: those that the answer's
    grammar forced. ``lossless`` false: the answer may differ from vanilla decoding's.
    ``adapted_from``: the model that the served one was adapted from together with its heads; the answer is the adapted
    model's. ``trace``: the steps, where the request asked for them; streams have them in events of their own.
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
    trace: list[TracedStep] | UnsetType = UNSET


class ArmEvidence(Struct):
    """What was known of an arm when it was weighed. ``load``: sequences over those that run at once, this one included.
    ``age_s``: since its last answer. Null: not measured yet."""

    arm: str
    load: float
    load_bucket: str
    suspect: bool = False
    expected_ms: float | None = None
    first_token_ms: float | None = None
    ms_per_token: float | None = None
    requests: float = 0.0
    failure_share: float = 0.0
    age_s: float | None = None
    measured_at_load: str | None = None


class ArmReport(Struct):
    """Extension: which of a model's arms (upstreams that decode differently) answered, by which rule, and the evidence
    on all of them."""

    arm: str
    kind: Literal["plain", "speculative"]
    rule: str
    reason: str
    evidence: list[ArmEvidence]


class RemoteReport(Struct):
    """Extension: the ``decoding`` of an answer that an upstream gave. How it decoded is not known here, so nothing is
    claimed of it; ``upstream`` is what it says of itself, if it is a medusa-gateway too. ``arm``: null where the model
    has none. ``sent``: what it was told of drafting. ``engine``: its own figures, where they are read."""

    backend: str
    upstream_model: str
    reason: str
    rule: str
    policy_version: str
    upstream: Any = None
    arm: ArmReport | None = None
    sent: dict[str, Any] = {}
    engine: dict[str, Any] | None = None
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
