"""Types that cross package borders. Nothing here imports torch: policy, telemetry and gateway may import this file."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from backends.tree import CandidateTree

Method = Literal["medusa", "vanilla"]
Acceptance = Literal["exact", "typical"]
FinishReason = Literal["stop", "length", "abort", "deadline", "error"]
StepKind = Literal["prefill", "verification", "vanilla"]

START_LOG = "backends.start"
"""The logger of what takes its time at a start, at INFO: shown on the console unless only errors are asked for."""
ENGINE_FAILED = "the engine failed on this request; its log says why"
NOT_FINITE = "the model's logits are not finite"
GRAMMAR_LIMIT = "the grammar asks for more work than one answer is allowed; make it simpler"
GRAMMAR_STUCK = "nothing that the model could say next fits the grammar"
"""What a client is told of a failure (:attr:`TokenChunk.error`)."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. Values are already validated (the gateway checks ranges and names fields).

    ``temperature`` 0 means greedy; so does one so small that float32 could not divide by it. ``top_k`` 0, ``top_p`` 1
    and ``min_p`` 0 switch those filters off.
    ``logprobs`` None: none wanted; 0: of the chosen token only; k: of the chosen one and the k best.
    ``prompt_logprobs``: whether those of the prompt are wanted too, with as many alternatives.
    ``seed`` keys every random number together with the absolute position of the token it draws.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    max_tokens: int = 256
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: bool = False

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5


@dataclass(frozen=True, slots=True)
class DecodingPlan:
    """How one request is decoded, and why.

    ``tree`` None lets the engine plan a tree every step from the heads' own probabilities and the measured cost of a
    row, with at most ``max_nodes`` nodes and ``num_heads`` levels, and with ``lookup`` also from what followed the same
    tokens earlier in the text (on as many levels as it goes). A given tree is used as it is. ``probe``: to find out
    whether drafts pay again, so the heads are asked whatever has been learnt of them. ``adapted_from``: see
    :class:`ModelInfo`; ``deadline``: how long and by whom it was set, in words. Both are only reported.
    """

    method: Method = "medusa"
    num_heads: int = 4
    tree: CandidateTree | None = None
    max_nodes: int = 32
    lookup: bool = True
    acceptance: Acceptance = "exact"
    probe: bool = False
    rule: str = "default"
    reason: str = "default plan"
    policy_version: str = "embedded"
    adapted_from: str = ""
    deadline: str = ""


class GrammarOutlook(Protocol):
    """What a grammar has to say of tokens to come, for drafting: it never touches the state that decides."""

    def forced(self) -> list[int]:
        """The tokens that must follow, as far as they are known; usually none."""
        ...

    def allows(self, token: int) -> bool:
        """Whether the token may come next."""
        ...

    def after(self, tokens: Sequence[int]) -> GrammarOutlook | None:
        """The outlook behind these tokens, itself unchanged; None where they may not come, or nothing may follow."""
        ...


class TokenGrammar(Protocol):
    """Which tokens may come next in one answer: the state of that answer alone, moved on by its accepted tokens.

    Not thread-safe, and never shared by two answers. Nothing here raises: what goes wrong is told by ``error``.
    """

    @property
    def error(self) -> str | None:
        """Why the answer can't go on, for the client; None while it can. For ever, once set."""
        ...

    @property
    def complete_after(self) -> int | None:
        """After how many tokens all was said, so that nothing but the end may follow; None: it was not yet."""
        ...

    @property
    def is_document(self) -> bool:
        """Whether stop strings inside the text are data, and must not cut it."""
        ...

    def outlook(self) -> GrammarOutlook | None:
        """Behind the accepted tokens; None where there is no telling."""
        ...

    def allows(self, token: int) -> bool:
        """Whether :meth:`mask` would leave the token as it is, for a hundredth of its price. False once all is said,
        when nothing but the end may follow."""
        ...

    def prepare(self) -> None:
        """Compute the next mask now. May be called in another thread, as long as nothing else is asked meanwhile."""
        ...

    def mask(self, row: Any) -> None:
        """Set the logits ``row`` [V] (a float32 numpy array, changed in place) of every token that may not come next
        to minus infinity; of all tokens after an error."""
        ...

    def advance(self, token: int) -> None:
        """The token was accepted."""
        ...


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to decode. ``deadline_s``: seconds from submission after which it ends with reason "deadline".

    ``stats_key`` names the counters that this request adds to (class and temperature bucket, say); opaque here.
    ``continues``: the answer goes on from the prompt's text (a text completion); else it is a text of its own.
    ``tenant``, ``cache_salt``: who may find in the cache what this request leaves there.
    ``grammar``: what the answer must follow, opened for this request alone.
    ``trace``: tell of every step (:attr:`TokenChunk.trace`).
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    plan: DecodingPlan
    deadline_s: float | None = None
    stats_key: str = ""
    continues: bool = False
    tenant: str = ""
    cache_salt: str = ""
    grammar: TokenGrammar | None = None
    trace: bool = False


@dataclass(slots=True)
class DecodeCounters:
    """Raw sums over decode steps since they were last taken; one object per ``stats_key``. Only ever added to.

    ``attempts[h]``: steps in which head h's guess could be checked, that is, everything before it was emitted in the
    same step. ``hits[h][r]``: of those, how often its guess of rank r was right. ``vanilla_us``: what the same tokens
    would have cost without speculation in the same batches, by the cost table; ``spent_us``: what they did cost by the
    table; ``measured_us``: wall time, shared out evenly over the sequences of each step. ``control_*``: the part that
    came from requests with a vanilla plan.

    From ``requests`` on: sums over whole answers of an upstream, which an engine does not count. ``first_us``: to the
    first word; ``prompt_squares`` and ``first_prompt`` (us times tokens) are what a line through first words by length
    of prompt takes. ``gap_us`` and ``gap_tokens``: after the first piece; ``paces``, ``pace_us`` and ``pace_squares``:
    how many answers had such a time per token, its sum and the sum of its squares.
    """

    steps: int = 0
    medusa_steps: int = 0
    rows: int = 0
    emitted_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    vanilla_us: int = 0
    spent_us: int = 0
    measured_us: int = 0
    control_steps: int = 0
    control_tokens: int = 0
    control_vanilla_us: int = 0
    control_measured_us: int = 0
    requests: int = 0
    failures: int = 0
    prompt_tokens: int = 0
    prompt_squares: int = 0
    first_us: int = 0
    first_prompt: int = 0
    gap_us: int = 0
    gap_tokens: int = 0
    paces: int = 0
    pace_us: int = 0
    pace_squares: int = 0
    attempts: list[int] = field(default_factory=list)
    hits: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of a token under softmax of the model's raw logits: before penalties, grammar and
    temperature."""

    token_id: int
    token: str
    logprob: float
    token_bytes: bytes


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerationStats:
    """Raw counts of one finished (or running) sequence. Rates are derived where they are read.

    Times are of ``time.monotonic``, in seconds, None where it did not come to that: when the sequence left the queue,
    when the step that gave its first token had ended, when it ended, each time it stopped drafting for a while, and
    when it stopped for good since it was behind its deadline.
    ``saved_s``: engine time against vanilla decoding of the same tokens, its share of the batch's; may be negative.
    ``accepted_by``: the accepted ones by who guessed them ("heads", "lookup", "grammar", or another drafter's name).
    ``drafted_grammar_tokens``: candidates that the answer's grammar forced. ``cached_tokens``: of the prompt, those
    whose keys and values were there already. ``preemptions``: how often it lost its memory to others and went on later.
    """

    method: Method
    num_heads: int = 0
    max_nodes: int = 0
    steps: int = 0
    medusa_steps: int = 0
    drafted_tokens: int = 0
    accepted_draft_tokens: int = 0
    accepted_by: Mapping[str, int] = field(default_factory=dict)
    drafted_grammar_tokens: int = 0
    emitted_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    speedup_estimate: float = 1.0
    saved_s: float = 0.0
    reason: str = ""
    acceptance: Acceptance = "exact"
    admitted_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None
    paused_at: tuple[float, ...] = ()
    behind_at: float | None = None

    @property
    def accepted_lookup_tokens(self) -> int:
        """Accepted tokens that were looked up in the text rather than guessed by heads."""
        return self.accepted_by.get("lookup", 0)

    @property
    def accepted_grammar_tokens(self) -> int:
        """Accepted tokens that the answer's grammar forced."""
        return self.accepted_by.get("grammar", 0)

    @property
    def tokens_per_step(self) -> float:
        return self.emitted_tokens / self.steps if self.steps else 0.0

    @property
    def lossless(self) -> bool:
        return self.acceptance == "exact"


class PromptScore(NamedTuple):
    """Log-probability of one token of a prompt, and the best tokens in its place with theirs, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class TracedToken:
    """One token of an answer, and who said it first.

    ``end``: characters of the answer's text up to its end; less than the token's before it where a stop string cut the
    text. ``source``: "model", "head 1" and so on, "lookup", "grammar", or another drafter's name. ``depth``: its level
    in the candidate tree; 0 of the model's own. ``chance``: what its step gave the path to it before it was verified;
    None of the model's own.
    """

    id: int
    end: int
    source: str = "model"
    depth: int = 0
    chance: float | None = None


@dataclass(frozen=True, slots=True)
class StepTrace:
    """One step that gave tokens to one sequence. ``step`` counts from 1.

    ``rows``: the sequence's own in the step: its pending token and ``nodes`` candidates, or a piece of its prompt.
    ``ms``: wall time of the whole step, which other sequences may have shared.
    """

    step: int
    rows: int
    nodes: int
    ms: float
    tokens: tuple[TracedToken, ...]


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """What one step added to one sequence: text that is safe to show, and the tokens behind it.

    ``finish_reason`` is set on the last chunk only, together with ``stats``; ``error`` explains reason "error" to the
    client: never an exception's own words, which may tell paths, addresses or somebody's text.
    ``num_tokens`` counts completion tokens so far, after any cut at a stop. ``cached_tokens``: see
    :class:`GenerationStats`. ``trace``: of the steps behind it, where the request asked for it.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()
    num_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_match: str | int | None = None
    stats: GenerationStats | None = None
    error: str | None = None
    prompt_scores: tuple[PromptScore, ...] = ()
    """In the first chunk, where they are wanted: of all the prompt's tokens but the first."""
    trace: tuple[StepTrace, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The served model as other packages need to know it.

    ``adapted_from``: the model that this one was made from by training it together with its heads; its answers are not
    that model's, and "lossless" means as *this* model decodes. Empty for a model as it was published.
    ``heads_flavour``: the format of its heads' checkpoint. ``heads_stale``: they were trained for another backbone;
    None: it has no heads, or they don't say.
    """

    name: str
    max_model_len: int
    vocab_size: int
    num_heads: int
    dtype: str
    device: str
    created: int = 0
    adapted_from: str = ""
    heads_flavour: str = ""
    heads_stale: bool | None = None


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """A snapshot of how busy an engine is. ``oldest_wait_s``: how long the head of the queue has waited.

    ``kv_pages_used``: those of sequences that run; ``kv_pages_cached``: those that others may find, used or not. Since
    the start: ``cache_evictions``, pages that had to give way; ``cache_prompt_tokens``, of prompts that were looked up,
    and ``cache_hit_tokens``, of these found; ``preemptions``, sequences that lost their memory to older ones.
    """

    running: int
    waiting: int
    kv_pages_used: int
    kv_pages_total: int
    max_running: int
    oldest_wait_s: float = 0.0
    kv_pages_cached: int = 0
    cache_evictions: int = 0
    cache_prompt_tokens: int = 0
    cache_hit_tokens: int = 0
    preemptions: int = 0


class PrefillBudget(NamedTuple):
    """How much of waiting prompts is read beside sequences that decode: ``rows`` tokens a step, or None: as many as
    make the step last at most ``factor`` times as long."""

    rows: int | None = None
    factor: float = 1.5


@runtime_checkable
class PrefillBudgeted(Protocol):
    """A decoder that reads prompts beside its streams."""

    def use_prefill(self, budget: PrefillBudget) -> None:
        """From the next step on. Thread-safe."""
        ...


class StepSample(NamedTuple):
    """One step that emitted tokens.

    ``kind``: "prefill" with prompt rows, else "verification" with candidates, else "vanilla".
    ``seconds``: wall time; ``vanilla_s``: what the cost table says of the same batch without candidates.
    """

    kind: StepKind
    rows: int
    seconds: float
    vanilla_s: float


class GenerationHandle(Protocol):
    """The stream of one submitted request. Iterate it once; ``abort`` is synchronous, idempotent and thread-safe."""

    def __aiter__(self) -> AsyncIterator[TokenChunk]: ...

    def abort(self) -> None: ...


class Decoder(Protocol):
    """An engine as the gateway sees it."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def alive(self) -> bool: ...

    def submit(self, request: GenerationRequest) -> GenerationHandle:
        """Queue a request; call from a running asyncio loop. Raises :class:`EngineStopped` after close."""
        ...

    def load(self) -> EngineLoad: ...

    def take_counters(self) -> dict[str, DecodeCounters]:
        """Counters since the last call, by ``stats_key``, and start new ones. Thread-safe; nothing is taken twice."""
        ...

    def close(self) -> None:
        """Abort what runs, stop the engine thread. Idempotent."""
        ...


@runtime_checkable
class StepSampler(Protocol):
    """A decoder that runs steps of its own, and tells of them."""

    def take_steps(self) -> list[StepSample]:
        """The steps since the last call, or the newest few thousand of them. For one caller; thread-safe."""
        ...


@runtime_checkable
class OptionalFailures(Protocol):
    """A decoder that counts what failed in it and cost nobody an answer."""

    def optional_failures(self) -> dict[str, int]:
        """How often each part has failed since the start. Thread-safe."""
        ...


@dataclass(frozen=True, slots=True)
class DeviceReading:
    """An accelerator's memory in bytes, utilisation from 0 to 1, power in watts; None: it does not tell."""

    memory_used: int
    memory_total: int
    utilization: float | None
    power_w: float | None


@runtime_checkable
class OnDevice(Protocol):
    """A decoder that may run on an accelerator."""

    def device_reading(self) -> DeviceReading | None:
        """How the accelerator stands now; None without one, or where its driver can't be asked. Thread-safe."""
        ...


@runtime_checkable
class CostKeeper(Protocol):
    """A decoder that remembers what its steps cost from one start to the next."""

    def keep_cost(self) -> bool:
        """Store what serving has taught of it since the start, if that is news; whether it was.

        Blocks as long as the stores do; for one caller at a time, from any thread.
        """
        ...


@runtime_checkable
class CostTeller(Protocol):
    """A decoder that decides by a table of what its steps cost."""

    def step_cost(self) -> dict[str, Any]:
        """For people, to be written as JSON: milliseconds by rows and by sequences, and what of it is a guess."""
        ...


class PromptTooLong(ValueError):
    """A text has more tokens than its caller can use; ``tokens``: how many, or a number that it has at least."""

    def __init__(self, tokens: int) -> None:
        super().__init__(f"the text has at least {tokens} tokens")
        self.tokens = tokens


class NoChatTemplate(ValueError):
    """The model takes text completions only."""


class ChatTokenizer(Protocol):
    """Text in, token ids out, for the served model. Over ``most_tokens`` both raise :class:`PromptTooLong`, as far as
    they can tell before they tokenise."""

    def encode(self, text: str, most_tokens: int | None = None) -> list[int]: ...

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        most_tokens: int | None = None,
        variables: Mapping[str, Any] | None = None,
        *,
        continues: bool = False,
    ) -> list[int]:
        """Apply the model's chat template (with the generation prompt) and tokenise. ``variables``: what the template
        may read beside the messages. ``continues``: the prompt ends with the text of the last message."""
        ...

    @property
    def chat_template(self) -> str | None:
        """The source of the template."""
        ...

    @property
    def template_variables(self) -> frozenset[str]:
        """The names that the template reads."""
        ...

    def id_of(self, token: str) -> int | None:
        """The id of the one token that ``token`` is, if there is one."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def texts(self, token_ids: Sequence[int], others: Sequence[Sequence[int]]) -> list[list[tuple[str, bytes]]]:
        """What each token adds to the text behind those before it, as text and bytes; behind it the same of the
        ``others`` that might stand in its place."""
        ...


class RequestRefused(ValueError):
    """A request that the engine can never run. The words are for whoever sent it."""


class EngineStopped(RuntimeError):
    """The engine no longer takes requests (shut down, or its thread died)."""
