"""Load sweep: adaptive decoding against vanilla and static trees, over classes of prompts and numbers of requests.

As in :mod:`backends.bench.decoding`, contestants take turns on the same prompts in rotating order, and cells report
medians over rounds. A ratio is the median of the ratios of runs that stood side by side in one round.

A cell is a load that goes on: as soon as an answer ends, the next prompt takes its place, and the clock stops when none
is left to do so. The end of a batch, where ever fewer requests are in flight, would be counted as a load that it isn't.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, cycle
from typing import Any

from backends.bench.decoding import Cell, Run, decode, encode_prompt, machine, request_of
from backends.bench.prompts import PROMPTS
from backends.bench.turns import prompts_of_round, rounds_within
from backends.engine.loading import EngineOptions, LoadedCore, load_core
from backends.tree import CandidateTree
from backends.types import DecodingPlan

DEFAULT_TREE = "3x2x1"
STATIC_TREES = ("1", "1x1", "2x1", "2x1x1", DEFAULT_TREE, "4x2x1x1")


@dataclass(frozen=True, slots=True)
class SweepOptions:
    """``least_prompts``: in a round of a cell half as many prompts follow as are in flight, but no fewer than this."""

    engine: EngineOptions = field(default_factory=EngineOptions)
    classes: tuple[str, ...] = (*PROMPTS, "mixed")
    concurrencies: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    temperature: float = 0.0
    rounds: int = 3
    max_tokens: int = 48
    least_prompts: int = 4


def run_sweep(options: SweepOptions, progress: Callable[[str], object] = lambda line: None) -> dict[str, Any]:
    """``{machine, cells: [...]}``; raises as :func:`backends.bench.decoding.run_bench` does."""
    loaded = load_core(options.engine)
    prompts = {name: [encode_prompt(loaded, text) for text in texts] for name, texts in PROMPTS.items()}
    prompts["mixed"] = list(chain.from_iterable(zip(*prompts.values(), strict=True)))
    plans = {
        "adaptive": DecodingPlan(),
        "vanilla": DecodingPlan(method="vanilla", num_heads=0),
        **{shape: _static(shape) for shape in STATIC_TREES},
    }
    cells = [
        Cell(name, options.temperature, concurrency, {contestant: [] for contestant in plans})
        for concurrency in options.concurrencies
        for name in options.classes
    ]
    warm_up = prompts[options.classes[0]][:2]
    decode(loaded, warm_up, cells[0], options.max_tokens, 0, plans["adaptive"])

    def run(name: str, cell: Cell, chosen: Sequence[tuple[int, ...]], turn: int) -> Run:
        return sustain(loaded, chosen, cell, options.max_tokens, turn, plans[name])

    for turn in rounds_within(options.rounds):
        for cell in cells:
            count = cell.concurrency + max(cell.concurrency // 2, options.least_prompts)
            chosen = prompts_of_round(prompts[cell.name], turn, count)
            speeds = cell.measure(chosen, turn, run)
            progress(f"round {turn + 1}: {cell.name} x{cell.concurrency} {speeds}")
    return {"machine": machine(loaded), "cells": [report_cell(cell) for cell in cells]}


def sustain(
    loaded: LoadedCore, prompts: Sequence[tuple[int, ...]], cell: Cell, max_tokens: int, seed: int, plan: DecodingPlan
) -> Run:
    """Tokens and time while ``cell.concurrency`` of the prompts are in flight; :class:`Run` without answers.

    The first are at different points of their answers, as in a load that has gone on for a while: their prompts are
    read before the clock starts, and each stops after another share of ``max_tokens``. Answers that are unfinished when
    no prompt is left are given up: reading their prompts was in the time, as reading the first ones' was not. What ends
    before the clock starts is replaced all the same.
    """
    core, pool, sent, left = loaded.core, cycle(prompts), 0, len(prompts) - cell.concurrency

    def send(limit: int) -> None:
        nonlocal sent
        core.add(request_of(sent, next(pool), cell, limit, seed, plan))
        sent += 1

    # The longest first: prompts are read in turn, and few should end before all have begun.
    for place in range(cell.concurrency, 0, -1):
        send(-(-max_tokens * place // cell.concurrency))
    reading, tokens, began = set(map(str, range(cell.concurrency))), 0, time.perf_counter()
    while True:
        emitted = core.step()
        ended = sum(chunk.finish_reason is not None for _, chunk in emitted)
        if reading:
            reading.difference_update(request_id for request_id, _ in emitted)
            began = time.perf_counter()
        else:
            tokens += sum(len(chunk.token_ids) for _, chunk in emitted)
            left -= ended
            if left < 0:
                break
        for _ in range(ended):
            send(max_tokens)
    seconds = time.perf_counter() - began
    for index in range(sent):
        core.abort(str(index))
    return Run(tokens, seconds, [])


def report_cell(cell: Cell) -> dict[str, Any]:
    """A cell as ``medusa-gateway bench sweep --json`` prints it."""
    medians = {name: statistics.median(run.tps for run in runs) for name, runs in cell.runs.items()}
    best = max(STATIC_TREES, key=lambda shape: medians[shape])
    return {
        "class": cell.name,
        "concurrency": cell.concurrency,
        "adaptive_tps": round(medians["adaptive"], 1),
        "vanilla_tps": round(medians["vanilla"], 1),
        "default_tree_tps": round(medians[DEFAULT_TREE], 1),
        "best_static_tps": round(medians[best], 1),
        "best_static": best,
        "adaptive_over_vanilla": _ratio(cell.runs["adaptive"], cell.runs["vanilla"]),
        "adaptive_over_best_static": _ratio(cell.runs["adaptive"], cell.runs[best]),
    }


def _ratio(above: list[Run], below: list[Run]) -> float:
    return round(statistics.median(a.tps / b.tps for a, b in zip(above, below, strict=True)), 3)


def _static(shape: str) -> DecodingPlan:
    tree = CandidateTree.parse(shape)
    return DecodingPlan(num_heads=tree.depth, tree=tree, max_nodes=len(tree))
