"""Tiny random models of every supported architecture, scripted heads, and a driver that records what a core emits."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from backends.cost.step_cost import StepCost
from backends.engine.config import EngineConfig
from backends.engine.core import EngineCore, Observer
from backends.engine.drafters import Drafter
from backends.models.tiny import tiny_tokenizer
from backends.models.tokenizer import HfTokenizer
from backends.runners.base import HeadsRunner, ModelRunner, ProposalRequest, Proposals
from backends.runners.batch import PAGE_SIZE, BatchBuilder, StepBatch
from backends.runners.hf import HfRunner
from backends.runners.native.bindings import NativeUnavailable, load_library
from backends.runners.native.runner import NativeRunner
from backends.speculation.batch_gate import DraftGate
from backends.tree import CandidateTree
from backends.types import DecodingPlan, FinishReason, GenerationRequest, PositionLogprobs, SamplingParams, TokenChunk

VOCAB = 260
EOS = 0
CONTEXT = 192
# Names in transformers, and heads: groups of 2, 4 and 1 query heads to a key head.
ARCHITECTURES = {
    "llama": ("Llama", 4, 2),
    "mistral": ("Mistral", 4, 1),
    "qwen2": ("Qwen2", 8, 4),
    "qwen3": ("Qwen3", 4, 4),
}
RUNNERS = ("native", "transformers")
FLAT_COST = StepCost(rows=((1, 1.0), (64, 1.5)), heads=((1, 0.01),))
"""Rows are nearly free, so that the planner drafts as much as it may."""

tokenizer = cache(tiny_tokenizer)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """For every module that imports it: tiny models gain nothing from threads, and lose a lot on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tiny_lm(architecture: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, layers: int = 2) -> Any:
    """A random model with grouped-query attention; every norm and bias is random too, so that none can be forgotten.

    Tokens that are not plain ASCII are made unlikely: answers are then mostly text.
    """
    import transformers

    name, heads, kv_heads = ARCHITECTURES[architecture]
    config = getattr(transformers, f"{name}Config")(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=16,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        sliding_window=None,
        eos_token_id=EOS,
        bos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, f"{name}ForCausalLM")(config)
        for parameter in model.parameters():
            mean, std = (0.0, 0.25) if parameter.dim() > 1 else (1.0, 0.3)
            torch.nn.init.normal_(parameter, mean, std)
        with torch.no_grad():
            # Ids 4 to 97 are printable ASCII in the tokenizer's alphabet; id 0 ends an answer.
            model.lm_head.weight[98:] *= 0.3
            model.lm_head.weight[:4] *= 0.5
    return model.to(dtype).eval()


def native_or_skip() -> None:
    try:
        load_library()
    except NativeUnavailable as error:
        pytest.skip(f"no native kernels here: {error}")


def make_runner(
    kind: str, model: Any, *, num_pages: int = 160, max_rows: int = 128, threads: int | None = None
) -> NativeRunner | HfRunner:
    """A runner around ``model``; it takes the model over, so give each runner its own."""
    if kind == "transformers":
        return HfRunner(model, num_pages=num_pages, max_rows=max_rows, max_context=CONTEXT)
    native_or_skip()
    return NativeRunner(model, num_pages=num_pages, max_rows=max_rows, max_context=CONTEXT, threads=threads)


@cache
def shared_runner(kind: str, architecture: str = "llama", dtype: torch.dtype = torch.float32) -> ModelRunner:
    """One runner per kind for all tests that only decode with it: cores never run side by side in one test."""
    return make_runner(kind, tiny_lm(architecture, dtype=dtype))


def any_runner() -> ModelRunner:
    """The faster of the runners that are available here, for tests in which the model does not matter."""
    try:
        load_library()
    except NativeUnavailable:
        return shared_runner("transformers")
    return shared_runner("native")


class ScriptedHeads:
    """Heads that know the answers: each guess holds the truth at a random rank, or only junk.

    ``answers``: prompt -> its continuation. Guesses may repeat a token, which real heads never do but a merged
    drafter can.
    """

    def __init__(
        self,
        answers: Mapping[tuple[int, ...], Sequence[int]],
        *,
        seed: int = 0,
        num_heads: int = 4,
        ranks: int = 5,
        hit_rate: float = 0.75,
    ) -> None:
        self.answers, self.num_heads = answers, num_heads
        self._ranks, self._hit_rate = ranks, hit_rate
        self._rng = random.Random(seed)
        self.calls: list[tuple[torch.Tensor, list[list[int]]]] = []

    def propose(self, request: ProposalRequest) -> list[Proposals]:
        assert request.rows is not None and len(request.rows) == len(request.contexts)
        self.calls.append((request.states, [list(context) for context in request.contexts]))
        return [self._guesses(self._rest(context), min(request.k, self._ranks)) for context in request.contexts]

    def _rest(self, context: list[int]) -> Sequence[int]:
        for prompt, answer in self.answers.items():
            if tuple(context[: len(prompt)]) == prompt:
                done = len(context) - len(prompt)
                if list(answer[:done]) == context[len(prompt) :]:
                    return answer[done:]
        return ()

    def _guesses(self, rest: Sequence[int], k: int) -> Proposals:
        tokens = np.array([[self._rng.randrange(VOCAB) for _ in range(k)] for _ in range(self.num_heads)], np.int32)
        probabilities = np.array([[self._rng.random() for _ in range(k)] for _ in range(self.num_heads)], np.float32)
        for depth, token in enumerate(rest[: self.num_heads]):
            if self._rng.random() < self._hit_rate:
                tokens[depth, min(int(self._rng.expovariate(1.5)), k - 1)] = token
        return Proposals(tokens, -np.sort(-probabilities, axis=1))


@dataclass
class Recorded:
    """All that one request gave: what the observer saw, and what its chunks said."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    logits: list[bytes] = field(default_factory=list)
    chunks: list[TokenChunk] = field(default_factory=list)

    @property
    def last(self) -> TokenChunk:
        return self.chunks[-1]

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def sent_ids(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.token_ids]

    @property
    def logprobs(self) -> list[PositionLogprobs]:
        return [entry for chunk in self.chunks for entry in chunk.logprobs]

    @property
    def ending(self) -> tuple[FinishReason | None, str | int | None, int]:
        return self.last.finish_reason, self.last.stop_match, self.last.num_tokens


class Recorder:
    """An observer for :class:`EngineCore`, and a place for chunks, by request."""

    def __init__(self) -> None:
        self.of: dict[str, Recorded] = {}

    def __getitem__(self, request_id: str) -> Recorded:
        return self.of.setdefault(request_id, Recorded())

    def observe(self, request_id: str, position: int, token: int, logits: torch.Tensor) -> None:
        recorded = self[request_id]
        recorded.tokens.append(token)
        recorded.positions.append(position)
        recorded.logits.append(logits.numpy().tobytes())

    def take(self, emissions: Iterable[tuple[str, TokenChunk]]) -> None:
        for request_id, chunk in emissions:
            assert not (self[request_id].chunks and self[request_id].last.finish_reason), "a chunk after the last"
            self[request_id].chunks.append(chunk)


def make_core(
    *,
    runner: ModelRunner | None = None,
    heads: HeadsRunner | None = None,
    observer: Observer | None = None,
    clock: Callable[[], float] = lambda: 0.0,
    tok: HfTokenizer | None = None,
    cost: StepCost = FLAT_COST,
    gate: DraftGate | None = None,
    drafters: Sequence[Drafter] = (),
    **config: Any,
) -> EngineCore:
    settings = {
        "max_model_len": CONTEXT,
        "max_running": 8,
        "max_rows": 96,
        "prefill_rows": 24,
        "proposals": 8,
        "eos_token_ids": frozenset({EOS}),
        **config,
    }
    return EngineCore(
        runner or any_runner(),
        heads,
        tok or tokenizer(),
        EngineConfig(**settings),
        cost,
        clock,
        observer,
        gate,
        drafters=drafters,
    )


def decode(
    requests: Sequence[GenerationRequest],
    *,
    join: Callable[[], bool] = lambda: True,
    **core_options: Any,
) -> Recorder:
    """Run all requests to their end; ``join`` says, before every step, whether one more of them comes in now."""
    recorder = Recorder()
    core = make_core(observer=recorder.observe, **core_options)
    waiting = list(requests)
    while waiting or core.has_work:
        while waiting and (join() or not core.has_work):
            core.add(waiting.pop(0))
        recorder.take(core.step())
        core.check_integrity()
    assert core.load().kv_pages_used == 0
    assert not any(core.optional.failures().values()), "answers don't show that drafts or books have failed"
    return recorder


def request(
    name: str, prompt: Sequence[int], plan: DecodingPlan | None = None, deadline_s: float | None = None, **sampling: Any
) -> GenerationRequest:
    """A greedy request unless ``sampling`` says otherwise; vanilla unless a plan is given."""
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 24, **sampling})
    return GenerationRequest(
        name, tuple(prompt), params, plan or DecodingPlan(method="vanilla"), deadline_s=deadline_s, stats_key="tests"
    )


def random_prompt(rng: random.Random, shortest: int = 1, longest: int = 40) -> tuple[int, ...]:
    return tuple(rng.randrange(4, 98) for _ in range(rng.randint(shortest, longest)))


def random_tree(rng: random.Random, nodes: int, *, depth: int = 4, ranks: int = 5) -> CandidateTree:
    """Any prefix-closed tree: children of random parents at random ranks, siblings in no order."""
    paths: list[tuple[int, ...]] = []
    for _ in range(nodes):
        parent = rng.choice([(), *(path for path in paths if len(path) < depth)])
        path = (*parent, rng.randrange(ranks))
        if path not in paths:
            paths.append(path)
    return CandidateTree(tuple(paths))


def random_parents(rng: random.Random, nodes: int, depth: int = 16) -> list[int]:
    """Parents by row (root 0) of a random tree of at most ``depth`` levels."""
    parents: list[int] = []
    levels = [0]
    for _ in range(nodes):
        parent = rng.choice([row for row, level in enumerate(levels) if level < depth])
        parents.append(parent)
        levels.append(levels[parent] + 1)
    return parents


def path_rows(parents: Sequence[int], row: int) -> list[int]:
    """Rows from below the root down to ``row``."""
    rows: list[int] = []
    while row:
        rows.append(row)
        row = parents[row - 1]
    return rows[::-1]


def scratch_base(runner: ModelRunner) -> int:
    return runner.num_pages * PAGE_SIZE


def chunk_batch(runner: ModelRunner, pages: Sequence[int], tokens: Sequence[int], start: int) -> StepBatch:
    """One chunk of one prompt of which every row's hidden state is wanted, as training or scoring would ask."""
    builder = BatchBuilder(scratch_base(runner))
    builder.add_chunk(pages, tokens, start, last_output=True)
    return with_every_row(builder.build())


def with_every_row(batch: StepBatch) -> StepBatch:
    """The same step, with the hidden state of every row wanted."""
    memory = array("i", [*batch.memory[: batch.ends[-2]], *range(batch.rows)])
    return StepBatch(memory, (*batch.ends[:-1], len(memory)))
