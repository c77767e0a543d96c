"""What clients may send, as msgspec structs. The types are the documentation: OpenAPI is generated from them.

Three kinds of field: honoured ones; ones that change nothing here (``user``, ``metadata``); and fields of OpenAI's and
of other servers (``gateway.wire.other_servers``) that this gateway does not honour, declared with ``no_op`` so that
only a value that asks for nothing passes. Any other field is unknown and refused, but for null, which always means left
out. Cross-field rules are not here but in ``gateway.wire.validation``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, field

from backends.tree import MAX_DEPTH, MAX_NODES
from gateway.wire.no_op import RequestStruct, no_op
from gateway.wire.structured import StructuredFields
from gateway.wire.tools import MAX_TOOLS, CallId, NamedTool, Tool, ToolCall

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
INT32_MAX = 2**31 - 1
MAX_CHOICES = 16
MAX_STOP_STRINGS = 16
MAX_LOGPROBS = 20

Temperature = Annotated[float, Meta(ge=0, le=2)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Seed = Annotated[int, Meta(ge=INT64_MIN, le=INT64_MAX)]
TokenId = Annotated[int, Meta(ge=0, le=INT32_MAX)]
TokenCount = Annotated[int, Meta(ge=1, le=INT32_MAX)]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
ModelName = Annotated[str, Meta(min_length=1, max_length=256)]
Probability = Annotated[float, Meta(gt=0, le=1)]
# No character that a special token could be made of: templates write names where only they may write. `$` alone would
# let a newline through.
SpeakerName = Annotated[str, Meta(pattern=r"^[\w.-]+$(?!\n)", max_length=64)]


class StreamOptions(RequestStruct):
    """``continuous_usage_stats``: usage so far in every chunk, as vLLM gives it."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Annotated[Any, no_op(False, why="off")] = None


class DecodingOptions(RequestStruct):
    """Extension: how to decode this request. Left out, the gateway decides.

    ``tree``: a branching per depth such as ``"4x2x1"``, or a list of paths such as ``[[0], [1], [0, 0]]``.
    ``acceptance`` "typical" is faster and *not* lossless. ``class`` says what kind of answer is asked for where the
    client knows better than the classifier; it must be a class of the policy. ``lookup``: whether to draft from the
    text itself too. ``deadline_ms`` counts from arrival. ``trace``: tell in the answer what each step did; it changes
    no token, and takes nothing out of the policy's hands.
    """

    method: Literal["auto", "medusa", "vanilla", None] = "auto"
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
    trace: bool | None = None

    def __post_init__(self) -> None:
        self.method = self.method or "auto"

    def asked_fields(self) -> list[str]:
        """The fields by which a client takes the plan into its own hands."""
        asked = [name for name in ("heads", "tree") if getattr(self, name) is not None]
        if self.method != "auto":
            asked.insert(0, "method")
        if self.acceptance == "typical":
            asked.append("acceptance")
        return asked


class TextPart(RequestStruct):
    """``cache_control``: a hint for servers that bill by what they keep; it changes no answer."""

    type: Literal["text"]
    text: str
    cache_control: Any = None


class ChatMessage(RequestStruct):
    """One turn. ``name`` is handed to the chat template; most don't show it.

    An assistant's turn is taken back as any server gave it out: its ``content`` may be null or missing, and then its
    ``refusal``, if any, is what was said. What else servers add to it (``reasoning_content``, ``annotations``, ``id``,
    fields of their own) is accepted and not read; the fields below that are refused would change the answer. Thoughts
    (``reasoning_content``) are shown to templates that know them. A tool's message says which call it answers.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: SpeakerName | None = None
    refusal: Any = None
    cache_control: Any = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: CallId | None = None
    reasoning_content: Any = None
    function_call: Annotated[Any, no_op(instead="send tool_calls")] = None
    audio: Annotated[Any, no_op(instead="put its transcript into content")] = None
    prefix: Annotated[Any, no_op(False, instead="send continue_final_message")] = None
    partial: Annotated[Any, no_op(False, instead="send continue_final_message")] = None

    def __post_init__(self) -> None:
        """What is raised here reaches the client as if msgspec itself had found it."""
        if self.role == "assistant":
            if not self.content:
                self.content = self.refusal if isinstance(self.refusal, str) else ""
        elif self.content is None:
            raise ValueError("Object missing required field `content`")
        elif self.content == []:
            raise ValueError("In `content`: Expected `array` of length >= 1")
        elif self.refusal is not None:
            raise ValueError("In `refusal`: only an assistant's message has it")
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("Object missing required field `tool_call_id`")
        for name, role in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
            if getattr(self, name) and self.role != role:
                raise ValueError(f"In `{name}`: only a message of role {role} has it")

    @property
    def text(self) -> str:
        """What was said. Parts are joined with a newline."""
        return self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content or ())


GIVEN_OUT = frozenset({"id", "reasoning", "reasoning_details", "annotations"})
"""Fields of assistant messages that many servers give out: accepted and not read, even where ``content`` is missing."""
THOUGHTS = frozenset({"thinking", "redacted_thinking", "reasoning"})
"""Types of parts of an assistant's content that are left out, as ``reasoning_content`` is."""


class GenerationFields(StructuredFields, kw_only=True):
    """What both completion endpoints take."""

    model: ModelName
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Meta(ge=-1, le=INT32_MAX)] | None = None
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
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None

    def __post_init__(self) -> None:
        # vLLM's way of switching it off; told in one way from here on.
        if self.top_k == -1:
            self.top_k = 0


class ChatCompletionRequest(GenerationFields, kw_only=True):
    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max", None] = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    # Of other servers, where chat differs from text: thoughts are told apart from the answer.
    separate_reasoning: Annotated[Any, no_op(True, why="thoughts are in reasoning_content")] = None
    reasoning_format: Annotated[Any, no_op("auto", "deepseek", why="thoughts are in reasoning_content")] = None
    # Fields of OpenAI's that are not honoured.
    functions: Annotated[Any, no_op([])] = None
    function_call: Annotated[Any, no_op("none", "auto", why="there are no tools")] = None
    modalities: Annotated[Any, no_op(["text"])] = None
    audio: Annotated[Any, no_op()] = None
    prediction: Annotated[Any, no_op()] = None
    verbosity: Annotated[Any, no_op()] = None
    web_search_options: Annotated[Any, no_op()] = None
    prompt_cache_retention: Annotated[Any, no_op()] = None
    store: Annotated[Any, no_op(False)] = None
    service_tier: Annotated[Any, no_op("auto", "default")] = None
    # Text completion's, as constants of clients that send one body to both routes.
    best_of: Annotated[Any, no_op(1)] = None
    echo: Annotated[Any, no_op(False)] = None
    add_special_tokens: Annotated[Any, no_op(False, why="the chat template has them")] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        # As it is without it.
        if self.top_logprobs == 0 and not self.logprobs:
            self.top_logprobs = None


class CompletionRequest(GenerationFields, kw_only=True):
    """``prompt``: a string, several strings, token ids, or several lists of token ids. Lists are not mixed.

    ``echo``: the answer's text begins with the prompt, and so do its log-probabilities. Not streamed.
    """

    prompt: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
    # 0: nothing but the prompt, echoed.
    max_tokens: Annotated[int, Meta(ge=0, le=INT32_MAX)] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    # Fields of OpenAI's that are not honoured. best_of 1 is the default, and n is checked beside it in validation.
    best_of: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    suffix: Annotated[Any, no_op("")] = None
    add_special_tokens: Annotated[Any, no_op(True, why="prompts in text get those that the model wants")] = None
