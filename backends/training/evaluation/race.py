"""Heads against vanilla decoding on the clock, in turns on the same prompts.

The cost table's expectation (:mod:`backends.training.evaluation.assess`) says what heads are worth to the planner; this
says what came of it. Contestants take turns prompt by prompt in rotating order, so that a noisy moment of a shared
machine falls on each of them alike, and a cell has medians over rounds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from backends.bench.turns import take_turns
from backends.engine.core import EngineCore
from backends.training.data.dataset import Answer
from backends.training.evaluation.accuracy import ALL_CLASSES
from backends.types import DecodingPlan, GenerationRequest, GenerationStats, SamplingParams

_VANILLA = DecodingPlan(method="vanilla", num_heads=0, reason="evaluation")


@dataclass(frozen=True, slots=True)
class MeasuredCell:
    """One class of prompts ("all": every class) at one temperature, decoded by one set of heads and vanilla.

    ``tokens_per_s`` and ``speedup`` (over vanilla, on the clock): medians over rounds; ``slowest`` and ``fastest``: the
    speedup of single rounds. ``identical``: whether the answers were those of vanilla decoding.
    """

    label: str
    temperature: float
    tokens_per_s: float
    vanilla_tokens_per_s: float
    speedup: float
    slowest: float
    fastest: float
    tokens_per_step: float
    identical: bool


@dataclass(slots=True)
class _Lap:
    """One contestant's answers to the prompts of one class in one round."""

    seconds: float = 0.0
    tokens: int = 0
    steps: int = 0
    emitted: int = 0
    identical: bool = True

    def __add__(self, other: _Lap) -> _Lap:
        return _Lap(
            self.seconds + other.seconds,
            self.tokens + other.tokens,
            self.steps + other.steps,
            self.emitted + other.emitted,
            self.identical and other.identical,
        )


def decode_prompt(
    core: EngineCore, prompt: Answer, plan: DecodingPlan, sampling: SamplingParams
) -> tuple[list[int], GenerationStats]:
    """The answer to one prompt, alone in the engine. Raises RuntimeError when the engine fails on it."""
    core.add(GenerationRequest(prompt.id, prompt.prompt_ids, sampling, plan))
    answer: list[int] = []
    stats = GenerationStats(plan.method)
    while core.has_work:
        for _, chunk in core.step():
            answer += chunk.token_ids
            if chunk.finish_reason == "error":
                raise RuntimeError(f"the engine failed on prompt {prompt.id}: {chunk.error}")
            stats = chunk.stats or stats
    return answer, stats


def race(
    cores: Sequence[EngineCore],
    prompts: Sequence[Answer],
    temperatures: Sequence[float],
    *,
    rounds: int,
    max_new_tokens: int,
    seed: int,
    log: Callable[[str], object],
    clock: Callable[[], float] = time.perf_counter,
) -> list[list[MeasuredCell]]:
    """Cells by set of heads: ``cores`` have one each, may share a runner, and decode one request at a time.

    Lookup is off, so what is measured are the heads; the gate and the calibration are those of serving.
    """
    for core in cores:
        for plan in (_VANILLA, _plan_of(core)):
            decode_prompt(core, prompts[0], plan, SamplingParams(temperature=0.0, seed=seed, max_tokens=16))
    found: list[list[MeasuredCell]] = [[] for _ in cores]
    for temperature in temperatures:
        # laps[contestant][label][round]; contestant 0 is vanilla decoding.
        laps: list[dict[str, list[_Lap]]] = [{} for _ in (None, *cores)]
        for turn in range(rounds):
            log(f"racing on {len(prompts)} prompts, temperature {temperature:g}, round {turn + 1} of {rounds}")
            for number, prompt in enumerate(prompts):
                sampling = SamplingParams(
                    temperature=temperature, seed=seed * 1_000_003 + number, max_tokens=max_new_tokens
                )
                answers = _laps_on(cores, prompt, sampling, first=turn + number, clock=clock)
                for contestant, (answer, lap) in enumerate(answers):
                    lap.identical = answer == answers[0][0]
                    for label in (ALL_CLASSES, prompt.label or "unlabelled"):
                        rounds_of = laps[contestant].setdefault(label, [])
                        if len(rounds_of) == turn:
                            rounds_of.append(_Lap())
                        rounds_of[turn] += lap
        for cells, mine in zip(found, laps[1:], strict=True):
            cells += [
                _cell(label, temperature, mine[label], laps[0][label])
                for label in (ALL_CLASSES, *sorted(set(mine) - {ALL_CLASSES}))
            ]
    return found


def _plan_of(core: EngineCore) -> DecodingPlan:
    return DecodingPlan(num_heads=core.heads.num_heads if core.heads else 0, lookup=False, reason="evaluation")


def _laps_on(
    cores: Sequence[EngineCore],
    prompt: Answer,
    sampling: SamplingParams,
    *,
    first: int,
    clock: Callable[[], float],
) -> list[tuple[list[int], _Lap]]:
    """Answers and laps by contestant, vanilla first; ``first`` says who begins."""
    contestants = [(cores[0], _VANILLA), *((core, _plan_of(core)) for core in cores)]

    def lap(index: int) -> tuple[list[int], _Lap]:
        core, plan = contestants[index]
        began = clock()
        answer, stats = decode_prompt(core, prompt, plan, sampling)
        return answer, _Lap(clock() - began, len(answer), stats.steps, stats.emitted_tokens)

    return list(take_turns(range(len(contestants)), first, lap).values())


def _cell(label: str, temperature: float, mine: Sequence[_Lap], vanilla: Sequence[_Lap]) -> MeasuredCell:
    speedups = [(a.tokens * b.seconds) / max(b.tokens * a.seconds, 1e-12) for a, b in zip(mine, vanilla, strict=True)]
    return MeasuredCell(
        label,
        temperature,
        tokens_per_s=statistics.median(lap.tokens / max(lap.seconds, 1e-12) for lap in mine),
        vanilla_tokens_per_s=statistics.median(lap.tokens / max(lap.seconds, 1e-12) for lap in vanilla),
        speedup=statistics.median(speedups),
        slowest=min(speedups),
        fastest=max(speedups),
        tokens_per_step=sum(lap.emitted for lap in mine) / max(sum(lap.steps for lap in mine), 1),
        identical=all(lap.identical for lap in mine),
    )
