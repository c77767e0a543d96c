"""Proof on demand that speculation changes nothing: tokens and logits against vanilla decoding, bit by bit.

Each prompt is first decoded alone, vanilla. Then all are decoded again with random plans (trees of every shape, depths,
vanilla rows between them), joining and leaving a batch of random size at random moments, with prompts cut into random
chunks. The logits that every emitted token was drawn from are compared as bytes, and the pieces of text that were sent
with the text of the tokens. :class:`Strain` adds what memory does: beginnings that are found in the cache, pages that
run out, sequences that lose theirs and go on later, requests that leave and come again.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from backends.engine.config import EngineConfig
from backends.engine.core import EngineCore
from backends.engine.kv_cache import PageManager
from backends.engine.loading import LoadedCore
from backends.models.tokenizer import HfTokenizer
from backends.runners.base import HeadsRunner, ModelRunner, ProposalRequest, Proposals
from backends.tree import CandidateTree, best_first_paths
from backends.types import DecodingPlan, GenerationRequest, PositionLogprobs, SamplingParams, TokenGrammar

Progress = Callable[[int, int], object]
OpenGrammar = Callable[[int], TokenGrammar | None]
"""A new grammar, not yet moved on, for the request of a number: equal ones for equal numbers. None: without one."""


_TURNS = 0.3
"""Chance, with a cache, that a prompt comes again with its answer and more."""
_LONGEST_TAIL = 8
_PREEMPTIONS = 0.05
"""Chance before each step, with few pages, that the youngest loses its own though there is no need."""
_ABORTS = 0.02
"""Chance before each step, under strain, that some request leaves and is sent again."""


@dataclass(frozen=True, slots=True)
class Strain:
    """What the second decoding does beside drafting. ``cache``: prompts share what is computed of their beginnings.
    ``pages``: no more than so many, or two or four times as many, unless the longest prompt with its answer needs more;
    None: all there are. Sequences lose theirs at random moments too."""

    cache: bool = False
    pages: int | None = None

    def __bool__(self) -> bool:
        return self.cache or self.pages is not None


NO_STRAIN = Strain()


@dataclass(slots=True)
class LosslessReport:
    """Sums over everything that was compared. ``accepted``: draft tokens that were accepted on the way; ``cached``:
    prompt tokens that were not computed; ``preemptions``, ``evictions``, ``aborts``: see :class:`Strain`."""

    prompts: int = 0
    tokens: int = 0
    token_mismatches: int = 0
    logit_mismatches: int = 0
    text_mismatches: int = 0
    accepted: int = 0
    cached: int = 0
    preemptions: int = 0
    evictions: int = 0
    aborts: int = 0
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
        self.cached += other.cached
        self.preemptions += other.preemptions
        self.evictions += other.evictions
        self.aborts += other.aborts
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
    logprobs: list[PositionLogprobs] = field(default_factory=list)
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
            prompt = max((p for p in self._answers if tuple(context[: len(p)]) == p), key=len, default=())
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
    strain: Strain = NO_STRAIN,
) -> LosslessReport:
    """Compare vanilla decoding of each prompt alone with speculative decoding of all in random company.

    ``loaded`` lends its runner, heads and configuration. Prompts must differ from one another. ``open_grammar``: what
    each answer must follow. ``judge`` is shown each answer by its number, and whether it ended by itself, and says what
    is wrong with it, if anything.
    """
    rng = random.Random(seed)
    requests = [_request(i, prompt, rng, max_tokens) for i, prompt in enumerate(prompts)]
    if strain:
        # Another stream of numbers: the same prompts get the same options with and without strain.
        more = random.Random(f"{seed} strain")
        requests = [
            replace(each, sampling=replace(each.sampling, logprobs=more.choice([None, None, None, 0, 2])))
            for each in requests
        ]
    numbers = {request.request_id: i for i, request in enumerate(requests)}

    def planned(request: GenerationRequest, plan: DecodingPlan) -> GenerationRequest:
        grammar = open_grammar(numbers[request.request_id])
        sampling = request.sampling if grammar is None else replace(request.sampling, ignore_eos=False)
        return replace(request, plan=plan, grammar=grammar, sampling=sampling)

    followers: list[GenerationRequest] = []
    num_heads = loaded.core.heads.num_heads if loaded.core.heads else 4

    def again(request: GenerationRequest) -> GenerationRequest:
        return planned(request, _random_plan(rng, num_heads))

    def follow(request: GenerationRequest, answer: list[int]) -> GenerationRequest | None:
        """The next turn of a conversation, sometimes: prompt and answer come again, and more behind them."""
        if not strain.cache or rng.random() > _TURNS:
            return None
        name = f"{request.request_id}+"
        numbers[name] = len(numbers)
        tail = rng.choice(prompts)[-rng.randint(1, _LONGEST_TAIL) :]
        turn = replace(request, request_id=name, prompt_token_ids=(*request.prompt_token_ids, *answer, *tail))
        followers.append(turn)
        return again(turn)

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
        followers.clear()
        planted = PlantedHeads(
            loaded.core.heads,
            {request.prompt_token_ids: answers[request.prompt_token_ids] for request in group},
            rng,
            num_heads=num_heads,
            vocab_size=loaded.info.vocab_size,
        )
        config = replace(loaded.core.config, max_running=rng.randint(1, 16), prefill_rows=rng.randint(3, 64))
        found = _decode(
            loaded,
            [again(request) for request in group],
            planted,
            config,
            rng,
            lambda count, base=done: progress(len(requests) + base + count, 2 * len(requests)),
            report,
            strain,
            again=again,
            follow=follow,
        )
        if followers:
            plain = [planned(request, DecodingPlan(method="vanilla", num_heads=0)) for request in followers]
            references |= _decode(
                loaded, plain, None, replace(loaded.core.config, max_running=1), rng, lambda count: None
            )
            report.prompts += len(followers)
            group = [*group, *followers]
        for request in group:
            trace = found[request.request_id]
            _compare(references[request.request_id], trace, loaded.tokenizer, report)
            whole = trace.finish_reason == "stop"
            report.whole += whole
            if wrong := judge(numbers[request.request_id], "".join(trace.pieces), whole):
                report.invalid.append(wrong)
        done += len(group) - len(followers)
    return report


def _decode(
    loaded: LoadedCore,
    requests: list[GenerationRequest],
    heads: HeadsRunner | None,
    config: EngineConfig,
    rng: random.Random,
    progress: Callable[[int], object],
    report: LosslessReport | None = None,
    strain: Strain = NO_STRAIN,
    again: Callable[[GenerationRequest], GenerationRequest] = lambda request: request,
    follow: Callable[[GenerationRequest, list[int]], GenerationRequest | None] = lambda request, answer: None,
) -> dict[str, _Trace]:
    """``again``: a request as it is sent again after it has left. ``follow``: what comes after one and its answer."""
    traces = {request.request_id: _Trace() for request in requests}
    base = loaded.core
    runner: Any = base.runner
    if strain.cache:
        config = replace(config, prefix_cache="tenant")
    if strain.pages is not None:
        longest = max(len(request.prompt_token_ids) + request.sampling.max_tokens for request in requests)
        pages = strain.pages * rng.choice([1, 2, 4])
        config = replace(config, spare_pages=rng.choice([0, 0, 1, 2]))
        runner = _FewerPages(runner, max(pages, PageManager.pages_for(longest)))
    core = EngineCore(
        runner,
        heads,
        loaded.tokenizer,
        config,
        base.cost,
        lambda: 0.0,
        lambda request_id, position, token, row: traces[request_id].note(token, row),
    )
    waiting, finished = list(requests), 0
    known = {request.request_id: request for request in requests}
    while waiting or core.has_work:
        while waiting and (not core.has_work or rng.random() < 0.5):
            core.add(waiting.pop(0))
        if strain:
            core.check_integrity()
            if strain.pages is not None and rng.random() < _PREEMPTIONS and core.scheduler.running:
                core.scheduler.preempt_youngest(0.0)
            if rng.random() < _ABORTS:
                leaving = rng.choice(list(known.values()))
                if core.scheduler.holds(leaving.request_id):
                    core.abort(leaving.request_id)
                    traces[leaving.request_id] = _Trace()
                    waiting.append(again(leaving))
                    if report is not None:
                        report.aborts += 1
        for name, chunk in core.step():
            if chunk.error:
                raise RuntimeError(chunk.error)
            traces[name].pieces.append(chunk.text)
            traces[name].logprobs += chunk.logprobs
            if chunk.stats is not None:
                traces[name].finish_reason = chunk.finish_reason
                finished += 1
                progress(finished)
                if report is not None:
                    report.accepted += chunk.stats.accepted_draft_tokens
                    report.cached += chunk.stats.cached_tokens
                    report.preemptions += chunk.stats.preemptions
                ended, answer = known[name], traces[name].tokens
                longest = len(ended.prompt_token_ids) + len(answer) + _LONGEST_TAIL + ended.sampling.max_tokens
                turn = follow(ended, answer) if core.scheduler.fits(longest) else None
                if turn is not None:
                    traces[turn.request_id], known[turn.request_id] = _Trace(), turn
                    waiting.append(turn)
    core.check_integrity()
    if report is not None:
        report.evictions += core.load().cache_evictions
    if failed := {name: times for name, times in core.optional.failures().items() if times}:
        # Answers are right without these parts, but a proof is about decoding with them.
        raise RuntimeError(f"parts of the engine failed: {failed}")
    return traces


class _FewerPages:
    """A runner of which only the first ``num_pages`` pages are used; candidates lie behind those."""

    def __init__(self, runner: ModelRunner, num_pages: int) -> None:
        self._runner, self.num_pages = runner, min(num_pages, runner.num_pages)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


def _compare(reference: _Trace, found: _Trace, tokenizer: HfTokenizer, report: LosslessReport) -> None:
    report.tokens += len(reference.tokens)
    texts = {"".join(reference.pieces), "".join(found.pieces), tokenizer.decode(reference.tokens)}
    # The library makes U+FFFD of whole runs of byte tokens when one is wrong; what it reads without any is so.
    by_library = tokenizer.decode_by_library(reference.tokens)
    report.text_mismatches += len(texts if "\ufffd" in by_library else texts | {by_library}) > 1
    report.text_mismatches += reference.logprobs != found.logprobs
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
