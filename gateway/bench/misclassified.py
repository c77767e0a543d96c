"""What a wrong class costs: each class's traffic, decoded by the plan that another class's statistics speak for.

First every class decodes its own prompts, as a class without statistics does, for at least :data:`LEARN_STEPS` steps;
what was accepted then gives its plan (`policy.planner`). Then each class's prompts are decoded by its own plan, by its
own plan once more (what two equal runs differ by), and by each other class's, in turns over the same prompts. Answers
are the same token by token, so a ratio of speeds is one of times. It is given twice: by the clock, and by the engine's
cost table (what the rows of the steps take on this device), which other processes don't disturb.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import Any

from backends.bench.decoding import Cell, Run, decode, encode_prompt, machine, request_of
from backends.bench.prompts import PROMPTS
from backends.bench.turns import prompts_of_round, rounds_within
from backends.engine.loading import EngineOptions, LoadedCore, load_core
from backends.types import DecodingPlan
from policy.planner import Proposal, propose
from policy.spec import Settings
from policy.statistics.counters import Tally, sum_tallies

LEARN_STEPS = 50
OWN, AGAIN = "own", "own again"


@dataclass(frozen=True, slots=True)
class MisclassifiedOptions:
    """``prompts``: of a round, for each class and load."""

    engine: EngineOptions = field(default_factory=EngineOptions)
    concurrencies: tuple[int, ...] = (1, 4)
    rounds: int = 3
    max_tokens: int = 64
    prompts: int = 4


def run_misclassified(
    options: MisclassifiedOptions, progress: Callable[[str], object] = lambda line: None
) -> dict[str, Any]:
    """``{machine, plans, cells, most_lost}``; raises OSError or ValueError for a model that can't be loaded."""
    loaded = load_core(options.engine)
    prompts = {name: [encode_prompt(loaded, text) for text in texts] for name, texts in PROMPTS.items()}
    plans, learnt = {}, {}
    for name, ids in prompts.items():
        tally = learn(loaded, name, ids, options.max_tokens)
        plans[name] = plan_of(name, propose(tally.accuracies, tally.attempts), loaded.info.num_heads)
        learnt[name] = {"steps": int(tally.steps), "heads": plans[name].num_heads, "nodes": plans[name].max_nodes}
        progress(f"{name}: {learnt[name]}")

    cells = []
    for concurrency in options.concurrencies:
        for name in prompts:
            contestants: dict[str, list[Run]] = {who: [] for who in (OWN, AGAIN, *(p for p in plans if p != name))}
            cells.append(Cell(name, 0.0, concurrency, contestants))

    tallies: dict[tuple[str, int, str], Tally] = {}

    def run(who: str, cell: Cell, chosen: Sequence[tuple[int, ...]], turn: int) -> Run:
        plan, key = plans.get(who, plans[cell.name]), (cell.name, cell.concurrency, who)
        loaded.core.accounting.counters.take()
        found = decode(loaded, chosen, cell, options.max_tokens, turn, plan)
        tallies[key] = tallies.get(key, Tally()).plus(_taken(loaded))
        return found

    for turn in rounds_within(options.rounds):
        for cell in cells:
            count = max(options.prompts, cell.concurrency)
            speeds = cell.measure(prompts_of_round(prompts[cell.name], turn, count), turn, run)
            progress(f"round {turn + 1}: {cell.name} x{cell.concurrency} {speeds}")
    report = [row for cell in cells for row in rows_of(cell, tallies)]
    return {
        "machine": machine(loaded),
        "plans": learnt,
        "cells": report,
        "most_lost": max(round(1 - row["by_table"], 3) for row in report if row["plan_of"] != AGAIN),
        "equal_runs_apart": {
            by: max(round(abs(1 - row[by]), 3) for row in report if row["plan_of"] == AGAIN)
            for by in ("by_clock", "by_table")
        },
    }


def learn(loaded: LoadedCore, name: str, prompts: Sequence[tuple[int, ...]], max_tokens: int) -> Tally:
    """What a class accepts, over at least :data:`LEARN_STEPS` steps of its prompts, one after another."""
    core, cell, tally = loaded.core, Cell(name, 0.0, 1), Tally()
    core.accounting.counters.take()
    for index, ids in enumerate(cycle(prompts)):
        core.add(replace(request_of(index, ids, cell, max_tokens, 0, DecodingPlan()), stats_key=name))
        while core.has_work:
            core.step()
        tally = tally.plus(_taken(loaded))
        if tally.steps >= LEARN_STEPS:
            break
    return tally


def _taken(loaded: LoadedCore) -> Tally:
    return sum_tallies(map(Tally.of, loaded.core.accounting.counters.take().values()))


def plan_of(name: str, proposal: Proposal | None, model_heads: int) -> DecodingPlan:
    """The plan that a class with these statistics gets, under the settings that a policy has if it says nothing."""
    settings = Settings()
    if proposal is None:
        heads, nodes = min(settings.max_heads, model_heads), settings.nodes.high
    else:
        heads, nodes = min(proposal.heads, settings.max_heads, model_heads), settings.nodes.clamp(proposal.nodes)
    return DecodingPlan(num_heads=heads, max_nodes=nodes, rule=name)


def rows_of(cell: Cell, tallies: Mapping[tuple[str, int, str], Tally]) -> list[dict[str, Any]]:
    """One row for each plan but its own: speed relative to its own plan, by the clock the median over rounds."""

    def per_token(who: str) -> float:
        tally = tallies[cell.name, cell.concurrency, who]
        return tally.get("spent_us") / tally.get("emitted_tokens")

    own, rows = cell.runs[OWN], []
    for who, runs in cell.runs.items():
        if who == OWN:
            continue
        ratio = statistics.median(a.tps / b.tps for a, b in zip(runs, own, strict=True))
        rows.append(
            {
                "class": cell.name,
                "plan_of": who,
                "concurrency": cell.concurrency,
                "tps": round(statistics.median(run.tps for run in runs), 1),
                "by_clock": round(ratio, 3),
                "by_table": round(per_token(OWN) / per_token(who), 3),
                "tokens_per_step": round(tallies[cell.name, cell.concurrency, who].tokens_per_step or 0.0, 3),
                "identical": all(a.answers == b.answers for a, b in zip(runs, own, strict=True)),
            }
        )
    return rows
