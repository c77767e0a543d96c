"""Tokens per second of Medusa, of vanilla decoding and of ``transformers`` generate, side by side.

One cell is one class of prompts at one temperature and one number of concurrent requests. In every round of a cell the
contestants take turns in rotating order on the same prompts, so that a noisy moment of a shared machine falls on each
of them alike; a cell reports medians over its rounds. Answers end where the model ends them; what is thrown away
(a static batch goes on until its longest answer is done) don't count.
"""

from __future__ import annotations

import contextlib
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from backends.bench.prompts import PROMPTS
from backends.bench.turns import prompts_of_round, rounds_within, take_turns
from backends.engine.loading import EngineOptions, LoadedCore, build_core, load_parts
from backends.runners.cpu_cores import cpu_name, usable_cores
from backends.runners.paged_attention import ATTENTION_NAME
from backends.types import DecodingPlan, GenerationRequest, GenerationStats, SamplingParams

CONTESTANTS = ("medusa", "vanilla", "generate")


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """``prompts``: by concurrency, how many prompts of a class one round decodes."""

    engine: EngineOptions = field(default_factory=EngineOptions)
    classes: tuple[str, ...] = tuple(PROMPTS)
    temperatures: tuple[float, ...] = (0.0, 0.7)
    concurrencies: tuple[int, ...] = (1, 4, 16)
    rounds: int = 3
    max_tokens: int = 128
    prompts: dict[int, int] = field(default_factory=lambda: {1: 4, 4: 8, 16: 16})
    seconds: float | None = None

    @classmethod
    def quick(cls, engine: EngineOptions) -> BenchOptions:
        """Concurrency 1, greedy, short answers; starts no new round after half a minute."""
        return cls(
            engine, temperatures=(0.0,), concurrencies=(1,), rounds=3, max_tokens=64, prompts={1: 2}, seconds=28.0
        )


@dataclass(slots=True)
class Run:
    """One contestant's part of a round. ``answers``: token ids by prompt."""

    tokens: int
    seconds: float
    answers: list[list[int]]
    stats: list[GenerationStats] = field(default_factory=list)

    @property
    def tps(self) -> float:
        return self.tokens / self.seconds


@dataclass(slots=True)
class Cell:
    name: str
    temperature: float
    concurrency: int
    runs: dict[str, list[Run]] = field(default_factory=lambda: {name: [] for name in CONTESTANTS})

    def measure(self, prompts: Sequence[tuple[int, ...]], turn: int, run: Callable[..., Run]) -> str:
        """A round: ``run(name, cell, prompts, turn)`` of every contestant, in turns; says their tokens per second."""
        runs = take_turns(list(self.runs), turn, lambda name: run(name, self, prompts, turn))
        for name, found in runs.items():
            self.runs[name].append(found)
        return " ".join(f"{name} {found.tps:.0f}" for name, found in runs.items())

    def report(self) -> dict[str, Any]:
        """The cell as ``medusa-gateway bench --json`` prints it. ``nodes``: mean per step that had any."""
        medusa = [stats for run in self.runs["medusa"] for stats in run.stats]
        steps, drafting = sum(s.steps for s in medusa), sum(s.medusa_steps for s in medusa)
        identical = all(a.answers == b.answers for a, b in zip(self.runs["medusa"], self.runs["vanilla"], strict=True))
        return {
            "class": self.name,
            "temperature": self.temperature,
            "concurrency": self.concurrency,
            **{f"{name}_tps": round(statistics.median(run.tps for run in self.runs[name]), 1) for name in CONTESTANTS},
            "tokens_per_step": round(sum(s.emitted_tokens for s in medusa) / steps, 3),
            "nodes": round(sum(s.drafted_tokens for s in medusa) / max(drafting, 1), 2),
            "medusa_over_vanilla": round(
                statistics.median(
                    a.tps / b.tps for a, b in zip(self.runs["medusa"], self.runs["vanilla"], strict=True)
                ),
                3,
            ),
            "identical": identical,
            "rounds": len(self.runs["medusa"]),
        }


def run_bench(options: BenchOptions, progress: Callable[[str], object] = lambda line: None) -> dict[str, Any]:
    """``{machine, cells: [...]}``. Raises OSError or ValueError for a model or heads that can't be loaded."""
    parts = load_parts(options.engine)
    loaded = build_core(parts, options.engine)
    threads = torch.get_num_threads()
    if loaded.core.runner.kind == "native":
        torch.set_num_threads(1)
    cells = [
        Cell(name, temperature, concurrency)
        for concurrency in options.concurrencies
        for temperature in options.temperatures
        for name in options.classes
    ]
    prompts = {name: [encode_prompt(loaded, text) for text in PROMPTS[name]] for name in options.classes}
    contestants: dict[str, Callable[[Cell, list[tuple[int, ...]], int], Run]] = {
        "medusa": lambda cell, ids, seed: decode(loaded, ids, cell, options.max_tokens, seed, DecodingPlan()),
        "vanilla": lambda cell, ids, seed: decode(
            loaded, ids, cell, options.max_tokens, seed, DecodingPlan(method="vanilla", num_heads=0)
        ),
        "generate": lambda cell, ids, seed: generate(parts.model, loaded, ids, cell, options.max_tokens, seed, threads),
    }
    warm_up = Cell(options.classes[0], 0.0, 1)
    for contestant in contestants.values():
        contestant(warm_up, prompts[options.classes[0]][:1], 0)
    for turn in rounds_within(options.rounds, options.seconds):
        for cell in cells:
            count = options.prompts.get(cell.concurrency, cell.concurrency)
            chosen = prompts_of_round(prompts[cell.name], turn, count)
            speeds = cell.measure(chosen, turn, lambda name, *given: contestants[name](*given))
            progress(f"round {turn + 1}: {cell.name} t={cell.temperature} x{cell.concurrency} {speeds}")
    return {
        "machine": machine(loaded),
        "cost_ms": {str(rows): round(ms, 2) for rows, ms in loaded.core.cost.rows},
        "cells": [cell.report() for cell in cells],
    }


def decode(
    loaded: LoadedCore, prompts: Sequence[tuple[int, ...]], cell: Cell, max_tokens: int, seed: int, plan: DecodingPlan
) -> Run:
    """All prompts through the engine core, with ``cell.concurrency`` of them in flight."""
    core, waiting = loaded.core, list(enumerate(prompts))
    answers: list[list[int]] = [[] for _ in prompts]
    stats = []
    began = time.perf_counter()
    in_flight = 0
    while waiting or core.has_work:
        while waiting and in_flight < cell.concurrency:
            index, ids = waiting.pop(0)
            core.add(request_of(index, ids, cell, max_tokens, seed, plan))
            in_flight += 1
        for request_id, chunk in core.step():
            answers[int(request_id)] += chunk.token_ids
            if chunk.stats is not None:
                stats.append(chunk.stats)
                in_flight -= 1
    return Run(sum(map(len, answers)), time.perf_counter() - began, answers, stats)


def request_of(
    index: int, ids: tuple[int, ...], cell: Cell, max_tokens: int, seed: int, plan: DecodingPlan
) -> GenerationRequest:
    """The ``index``-th request of a run: every contestant of a round draws with the same seeds."""
    sampling = SamplingParams(temperature=cell.temperature, seed=seed * 1000 + index, max_tokens=max_tokens)
    return GenerationRequest(str(index), ids, sampling, plan)


def generate(
    model: Any,
    loaded: LoadedCore,
    prompts: Sequence[tuple[int, ...]],
    cell: Cell,
    max_tokens: int,
    seed: int,
    threads: int,
) -> Run:
    """``transformers`` generate with static batches of ``cell.concurrency`` prompts, padded on the left.

    torch gets all its ``threads`` for it; the engine's own kernels don't use them, and are measured as they are served.
    """
    eos = sorted(loaded.core.config.eos_token_ids)
    answers: list[list[int]] = []
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    began = time.perf_counter()
    for start in range(0, len(prompts), cell.concurrency):
        batch = prompts[start : start + cell.concurrency]
        width = max(map(len, batch))
        ids = torch.tensor([[eos[0]] * (width - len(prompt)) + list(prompt) for prompt in batch], device=model.device)
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch], device=model.device)
        sampling = {"do_sample": True, "temperature": cell.temperature, "top_k": 0} if cell.temperature else {}
        with torch.inference_mode(), _own_attention(model):
            out = model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=max_tokens,
                eos_token_id=eos,
                pad_token_id=eos[0],
                **(sampling or {"do_sample": False}),
            )
        for row in out[:, width:].tolist():
            end = next((i + 1 for i, token in enumerate(row) if token in eos), len(row))
            answers.append(row[:end])
    seconds = time.perf_counter() - began
    if loaded.core.runner.kind == "native":
        torch.set_num_threads(1)
    return Run(sum(map(len, answers)), seconds, answers)


@contextlib.contextmanager
def _own_attention(model: Any) -> Iterator[None]:
    """A model that the engine runs through transformers attends through the engine only; here as it would without."""
    before = model.config._attn_implementation
    if before == ATTENTION_NAME:
        model.set_attn_implementation("sdpa" if getattr(model, "_supports_sdpa", False) else "eager")
    try:
        yield
    finally:
        if before == ATTENTION_NAME:
            model.set_attn_implementation(before)


def machine(loaded: LoadedCore) -> dict[str, Any]:
    """What the numbers were measured on."""
    import transformers

    return {
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "device": torch.cuda.get_device_name() if loaded.info.device.startswith("cuda") else "cpu",
        "dtype": loaded.info.dtype,
        "runner": loaded.core.runner.kind,
        "model": loaded.info.name,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def encode_prompt(loaded: LoadedCore, text: str) -> tuple[int, ...]:
    """A bench prompt as a user's only message."""
    return tuple(loaded.tokenizer.encode_chat([{"role": "user", "content": text}]))
