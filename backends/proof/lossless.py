"""Proof on demand that speculation changes nothing: tokens and logits against vanilla decoding, bit by bit.

Each prompt is first decoded alone, vanilla. Then all are decoded again with random plans (trees of every shape, depths,
vanilla rows between them), joining and leaving a batch of random size at random moments, with prompts cut into random
chunks. The logits that every emitted token was drawn from are compared as bytes, and the pieces of text that were sent
with the text of the tokens.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from backends.engine.config import EngineConfig
from backends.engine.core import EngineCore
from backends.engine.loading import LoadedCore
from backends.models.tokenizer import HfTokenizer
from backends.runners.base import HeadsRunner, ProposalRequest, Proposals
from backends.tree import CandidateTree, best_first_paths
from backends.types import DecodingPlan, GenerationRequest, SamplingParams, TokenGrammar

Progress = Callable[[int, int], object]
OpenGrammar = Callable[[int], TokenGrammar | None]
"""A new grammar, not yet moved on, for the request of a number: equal ones for equal numbers. None: without one."""


@dataclass(slots=True)
class LosslessReport:
    """Sums over everything that was compared. ``accepted``: draft tokens that were accepted on the way."""

    prompts: int = 0
    tokens: int = 0
    token_mismatches: int = 0
    logit_mismatches: int = 0
    text_mismatches: int = 0
    accepted: int = 0
    # Answers that ended by themselves, and what is wrong with those that break their grammar.
    whole: int = 0
    invalid: list[str] = field(default_factory=list)

    def add(self, other: LosslessReport) -> None:
        self.prompts += other.prompts
        self.tokens += other.tokens
        self.token_mismatches += other.token_mismatches
        self.logit_mismatches += other.logit_mismatches
        self.text_mismatches += other.text_mismatches
        self.accepted += other.accepted
        self.whole += other.whole
        self.invalid += other.invalid

    @property
    def lossless(self) -> bool:
        return not (self.token_mismatches or self.logit_mismatches or self.text_mismatches or self.invalid)


@dataclass(slots=True)
class _Trace:
    tokens: list[int] = field(default_factory=list)
    logits: list[bytes] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    finish_reason: str | None = None

    def note(self, token: int, row: torch.Tensor) -> None:
        self.tokens.append(token)
        self.logits.append(hashlib.blake2b(row.cpu().numpy().tobytes(), digest_size=16).digest())


class PlantedHeads:
    """Heads whose guesses now and then hold the true continuation at a random rank, so that random drafts are accepted.

    ``answers``: prompt tokens -> the continuation that vanilla decoding gave.
    """

    def __init__(
        self,
        heads: HeadsRunner | None,
        answers: dict[tuple[int, ...], list[int]],
        rng: random.Random,
        *,
        num_heads: int,
        vocab_size: int,
    ) -> None:
        self._heads, self._answers, self._rng = heads, answers, rng
        self._vocab_size = vocab_size
        self.num_heads = num_heads
        self._prompt_of: dict[int, tuple[int, ...]] = {}

    def propose(self, request: ProposalRequest) -> list[Proposals]:
        if self._heads is not None and self._rng.random() < 0.5:
            real = self._heads.propose(request)
        else:
            real = [self._junk(request.k) for _ in request.contexts]
        return [self._plant(found, context) for found, context in zip(real, request.contexts, strict=True)]

    def _junk(self, k: int) -> Proposals:
        tokens = np.array([self._rng.sample(range(self._vocab_size), k) for _ in range(self.num_heads)], np.int32)
        probabilities = np.sort(np.array([[self._rng.random() for _ in range(k)] for _ in tokens], np.float32))
        return Proposals(tokens, (probabilities[:, ::-1] / 2).astype(np.float32))

    def _plant(self, found: Proposals, context: list[int]) -> Proposals:
        tokens, siblings = found.tokens.copy(), 0
        for truth in self._continuation(context):
            if self._rng.random() < 0.7 and truth not in tokens[siblings]:
                tokens[siblings, min(int(self._rng.expovariate(1.0)), tokens.shape[1] - 1)] = truth
            held = np.flatnonzero(tokens[siblings] == truth)
            siblings = found.following(siblings)[held[0] if len(held) else 0]
            if siblings < 0:
                break
        return Proposals(tokens, found.probabilities, found.below)

    def _continuation(self, context: list[int]) -> list[int]:
        prompt = self._prompt_of.get(id(context))
        if prompt is None or tuple(context[: len(prompt)]) != prompt:
            prompt = next((p for p in self._answers if tuple(context[: len(p)]) == p), ())
            self._prompt_of[id(context)] = prompt
        return self._answers.get(prompt, [])[len(context) - len(prompt) :]


def verify_lossless(
    loaded: LoadedCore,
    prompts: Sequence[tuple[int, ...]],
    *,
    seed: int,
    max_tokens: int,
    progress: Progress = lambda done, total: None,
    open_grammar: OpenGrammar = lambda number: None,
    judge: Callable[[int, str, bool], str | None] = lambda number, text, whole: None,
) -> LosslessReport:
    """Compare vanilla decoding of each prompt alone with speculative decoding of all in random company.

    ``loaded`` lends its runner, heads and configuration. Prompts must differ from one another. ``open_grammar``: what
    each answer must follow. ``judge`` is shown each answer by its number, and whether it ended by itself, and says what
    is wrong with it, if anything.
    """
    rng = random.Random(seed)
    requests = [_request(i, prompt, rng, max_tokens) for i, prompt in enumerate(prompts)]
    numbers = {request.request_id: i for i, request in enumerate(requests)}

    def planned(request: GenerationRequest, plan: DecodingPlan) -> GenerationRequest:
        grammar = open_grammar(numbers[request.request_id])
        sampling = request.sampling if grammar is None else replace(request.sampling, ignore_eos=False)
        return replace(request, plan=plan, grammar=grammar, sampling=sampling)

    references = _decode(
        loaded,
        [planned(request, DecodingPlan(method="vanilla", num_heads=0)) for request in requests],
        None,
        replace(loaded.core.config, max_running=1),
        rng,
        lambda done: progress(done, 2 * len(requests)),
    )
    answers = {request.prompt_token_ids: references[request.request_id].tokens for request in requests}
    report = LosslessReport(prompts=len(requests))
    done = 0
    while done < len(requests):
        # Company changes in size from group to group, and within one as requests come and go.
        group = requests[done : done + rng.randint(16, 48)]
        planted = PlantedHeads(
            loaded.core.heads,
            {request.prompt_token_ids: answers[request.prompt_token_ids] for request in group},
            rng,
            num_heads=loaded.core.heads.num_heads if loaded.core.heads else 4,
            vocab_size=loaded.info.vocab_size,
        )
        config = replace(loaded.core.config, max_running=rng.randint(1, 16), prefill_rows=rng.randint(3, 64))
        found = _decode(
            loaded,
            [planned(request, _random_plan(rng, planted.num_heads)) for request in group],
            planted,
            config,
            rng,
            lambda count, base=done: progress(len(requests) + base + count, 2 * len(requests)),
            report,
        )
        for request in group:
            trace = found[request.request_id]
            _compare(references[request.request_id], trace, loaded.tokenizer, report)
            whole = trace.finish_reason == "stop"
            report.whole += whole
            if wrong := judge(numbers[request.request_id], "".join(trace.pieces), whole):
                report.invalid.append(wrong)
        done += len(group)
    return report


def _decode(
    loaded: LoadedCore,
    requests: list[GenerationRequest],
    heads: HeadsRunner | None,
    config: EngineConfig,
    rng: random.Random,
    progress: Callable[[int], object],
    report: LosslessReport | None = None,
) -> dict[str, _Trace]:
    traces = {request.request_id: _Trace() for request in requests}
    base = loaded.core
    core = EngineCore(
        base.runner,
        heads,
        loaded.tokenizer,
        config,
        base.cost,
        lambda: 0.0,
        lambda request_id, position, token, row: traces[request_id].note(token, row),
    )
    waiting, finished = list(requests), 0
    while waiting or core.has_work:
        while waiting and (not core.has_work or rng.random() < 0.5):
            core.add(waiting.pop(0))
        for name, chunk in core.step():
            if chunk.error:
                raise RuntimeError(chunk.error)
            traces[name].pieces.append(chunk.text)
            if chunk.stats is not None:
                traces[name].finish_reason = chunk.finish_reason
                finished += 1
                progress(finished)
                if report is not None:
                    report.accepted += chunk.stats.accepted_draft_tokens
    core.check_integrity()
    if failed := {name: times for name, times in core.optional.failures().items() if times}:
        # Answers are right without these parts, but a proof is about decoding with them.
        raise RuntimeError(f"parts of the engine failed: {failed}")
    return traces


def _compare(reference: _Trace, found: _Trace, tokenizer: HfTokenizer, report: LosslessReport) -> None:
    report.tokens += len(reference.tokens)
    texts = {"".join(reference.pieces), "".join(found.pieces), tokenizer.decode(reference.tokens)}
    # The library makes U+FFFD of whole runs of byte tokens when one is wrong; what it reads without any is so.
    by_library = tokenizer.decode_by_library(reference.tokens)
    report.text_mismatches += len(texts if "\ufffd" in by_library else texts | {by_library}) > 1
    length = max(len(reference.tokens), len(found.tokens))
    for i in range(length):
        if reference.tokens[i : i + 1] != found.tokens[i : i + 1]:
            # Past the first difference the texts are not comparable.
            report.token_mismatches += length - i
            report.logit_mismatches += reference.logits[i : i + 1] != found.logits[i : i + 1]
            return
        report.logit_mismatches += reference.logits[i] != found.logits[i]


def _request(index: int, prompt: tuple[int, ...], rng: random.Random, max_tokens: int) -> GenerationRequest:
    sampled = rng.random() < 0.5
    sampling = SamplingParams(
        temperature=rng.choice([0.3, 0.7, 1.0, 1.5]) if sampled else 0.0,
        top_p=rng.choice([1.0, 1.0, 0.9]),
        top_k=rng.choice([0, 0, 40]),
        min_p=rng.choice([0.0, 0.0, 0.05]),
        presence_penalty=rng.choice([0.0, 0.0, 0.0, 0.6]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.0, 0.4]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.0, 1.1]),
        seed=rng.getrandbits(63),
        max_tokens=rng.randint(max(1, max_tokens // 2), max_tokens),
        ignore_eos=rng.random() < 0.5,
    )
    return GenerationRequest(f"lossless-{index}", prompt, sampling, DecodingPlan(method="vanilla"))


def _random_plan(rng: random.Random, num_heads: int) -> DecodingPlan:
    kind = rng.random()
    if kind < 0.1:
        return DecodingPlan(method="vanilla", num_heads=0)
    if kind < 0.4:
        return DecodingPlan(num_heads=rng.randint(1, num_heads), max_nodes=rng.randint(1, 40))
    accuracies = [[rng.random() for _ in range(rng.randint(1, 6))] for _ in range(num_heads)]
    tree = CandidateTree(*best_first_paths(accuracies, rng.randint(1, 30)))
    return DecodingPlan(num_heads=num_heads, tree=tree)
