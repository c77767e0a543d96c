"""Full telemetry, and an exporter that reaches nobody, against none, under the same load.

All gateways are alive and under load at once, but only one may run at a time, for about a tenth of a second: whatever
the machine does otherwise for longer than that hits all of them alike. How long a turn is, chance decides: what comes
in periods (a host that shares out its cores does) would else meet the same gateway again and again. A second gateway
without telemetry shows what is left: the ratio of two equal ones.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from backends.bench.turns import mirrored
from gateway.bench.telemetry.contestants import Contestant, with_telemetry, without_telemetry
from gateway.bench.telemetry.load import MODEL, Client, Load, Target
from gateway.bench.telemetry.ratios import CONFIDENCE, summary
from gateway.bench.telemetry.receivers import black_hole, receiver
from gateway.version import package_version

BASE, FULL, HOLE, AGAIN = "none", "full", "black hole", "none again"
VARIANTS = (BASE, FULL, AGAIN, HOLE)
"""In this ring, those with telemetry stand between those without."""
POLICY = "version: 1\ndefaults: {method: vanilla}\n"
"""The same steps for all: neither the luck of speculation nor a cost table decides what is decoded how."""
SCRAPE_EVERY_S = 5.0
_PROMPT_TOKENS = 256
_CYCLES = 3 * 2 * len(VARIANTS)
"""Of a round: every order that :func:`mirrored` has, three times."""


@dataclass(frozen=True, slots=True)
class TelemetryBench:
    """``engine``: flags of ``serve`` that describe the engine. ``policy``: a file instead of :data:`POLICY`.

    A round gives each gateway 24 turns of ``turn_s`` on average. ``generations``: how often all gateways are started
    anew, so that how one came to lie in memory is not taken for what its telemetry costs; ``rounds`` are dealt out to
    them. ``export_every_s``: of spans and metrics; the SDK's defaults are 5 s and 60 s. ``serve``: the command to be
    measured.
    """

    load: Load = field(default_factory=Load)
    rounds: int = 24
    generations: int = 2
    turn_s: float = 0.1
    export_every_s: float = 5.0
    engine: Sequence[str] = ()
    policy: str | None = None
    seed: int = 0
    serve: Sequence[str] = (sys.executable, "-m", "gateway", "serve")

    def command(self, policy: str, telemetry: bool) -> list[str]:
        logs = ("--log-format", "json", "--log-level", "info") if telemetry else ()
        fixed = ("--port", "0", "--redis-url", "memory", "--served-model-name", MODEL, "--policy", policy)
        # Four engines at once: a cache of the usual size each is more than some machines have.
        positions = self.load.streams * (_PROMPT_TOKENS + self.load.max_tokens)
        sizes = ("--max-running", str(self.load.streams), "--kv-tokens", str(positions))
        return [*self.serve, *fixed, *sizes, *self.engine, *logs]


@dataclass(slots=True)
class _Measured:
    """By round: tokens per second of its turns, and CPU milliseconds of the gateway's process per token."""

    tokens_per_s: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)


def run_telemetry_bench(bench: TelemetryBench, progress: Callable[[str], object] = lambda line: None) -> dict[str, Any]:
    """``{machine, load, receiver, cells, rounds}``: a cell for each of :data:`VARIANTS`; tokens/s by round.

    ``ratio``: the median over rounds of tokens/s against those of the gateways without telemetry in the same round (the
    mean of both; of "none again", against the other); ``interval``: where the true median lies with 95% confidence,
    None with fewer than 6 rounds; ``cpu_ratio`` the same of CPU time per token, None where there is no ``/proc``.
    Raises ValueError for numbers that make no sense, RuntimeError when a gateway doesn't start.
    """
    if not 1 <= bench.generations <= bench.rounds:
        raise ValueError(f"{bench.rounds} rounds can't be dealt out to {bench.generations} generations of gateways")
    if bench.export_every_s < 0.01:
        raise ValueError(f"exports can't be {bench.export_every_s:g} s apart; use 0.01 or more")
    measured = {name: _Measured() for name in VARIANTS}
    with ExitStack() as opened:
        sink, hole = opened.enter_context(receiver()), opened.enter_context(black_hole())
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        (folder / "policy.yaml").write_text(POLICY)
        policy, stretch = bench.policy or str(folder / "policy.yaml"), len(VARIANTS)
        environments = {
            BASE: without_telemetry(),
            FULL: with_telemetry(sink.url, bench.export_every_s, stretch),
            HOLE: with_telemetry(hole, bench.export_every_s, stretch),
            AGAIN: without_telemetry(),
        }
        for generation in range(bench.generations):
            rounds = len(range(generation, bench.rounds, bench.generations))
            with ExitStack() as running:
                contestants: dict[str, Contestant] = {}
                # Another one is the first to be loaded in each generation.
                for name in mirrored(VARIANTS, 2 * generation):
                    command = bench.command(policy, telemetry=name in (FULL, HOLE))
                    contestants[name] = running.enter_context(Contestant(command, environments[name]))
                    progress(f"generation {generation + 1}: a gateway with telemetry '{name}' is up")
                _measure(contestants, bench, rounds, measured, progress)
        received = sink.received()
    return {
        "machine": {"cpus": os.cpu_count(), "python": sys.version.split()[0], "medusa-gateway": package_version()},
        "load": {
            "streams": bench.load.streams,
            "max_tokens": bench.load.max_tokens,
            "rounds": bench.rounds,
            "generations": bench.generations,
            "turn_s": bench.turn_s,
            "policy": bench.policy or "vanilla",
            "export_every_s": bench.export_every_s,
            "scrape_every_s": SCRAPE_EVERY_S,
            "confidence": CONFIDENCE,
        },
        "receiver": {
            "kind": "OTLP over HTTP, a process on the same machine that reads each export and forgets it",
            **asdict(received),
        },
        "cells": [_cell(name, measured) for name in VARIANTS],
        "rounds": {name: [round(rate, 1) for rate in measured[name].tokens_per_s] for name in VARIANTS},
    }


def _measure(
    contestants: Mapping[str, Contestant],
    bench: TelemetryBench,
    rounds: int,
    measured: Mapping[str, _Measured],
    progress: Callable[[str], object],
) -> None:
    """One round to warm up, ``rounds`` that count, and turns until every answer is complete."""
    scrape_s = SCRAPE_EVERY_S * len(VARIANTS)
    targets = {name: Target(each.url, scrape_s if name in (FULL, HOLE) else None) for name, each in contestants.items()}
    client, chance = Client(targets, bench.load), random.Random(bench.seed)

    def turn_s() -> float:
        return bench.turn_s * chance.uniform(0.8, 1.2)

    spent = []
    for client.block in range(rounds + 1):
        spent.append(_round(contestants, client, turn_s))
        progress(f"round {client.block}/{rounds}")
    client.block = rounds + 1
    client.finish()
    while client.running:
        _round(contestants, client, turn_s)
    for block, seconds in enumerate(spent[1:], start=1):
        for name, (turns_s, cpu_s) in seconds.items():
            tokens = client.tokens(name, block)
            measured[name].tokens_per_s.append(tokens / turns_s)
            if cpu_s is not None:
                measured[name].cpu_ms.append(cpu_s * 1e3 / tokens)


def _round(
    contestants: Mapping[str, Contestant], client: Client, turn_s: Callable[[], float]
) -> dict[str, tuple[float, float | None]]:
    """Seconds of turns and of CPU time by contestant."""
    before = {name: each.cpu_s() for name, each in contestants.items()}
    turns = dict.fromkeys(contestants, 0.0)
    for cycle in range(_CYCLES):
        for name in mirrored(VARIANTS, cycle):
            if not client.running:
                break
            turns[name] += contestants[name].turn(turn_s())
    found = {}
    for name, each in contestants.items():
        began, ended = before[name], each.cpu_s()
        found[name] = turns[name], None if began is None or ended is None else ended - began
    return found


def _cell(name: str, measured: Mapping[str, _Measured]) -> dict[str, Any]:
    found, one, other = measured[name], measured[BASE], measured[AGAIN]
    if name in (BASE, AGAIN):
        base = one
    else:
        base = _Measured(_means(one.tokens_per_s, other.tokens_per_s), _means(one.cpu_ms, other.cpu_ms))
    ratio, interval = summary(found.tokens_per_s, base.tokens_per_s)
    cpu_ratio, cpu_interval = summary(found.cpu_ms, base.cpu_ms) if found.cpu_ms else (None, None)
    return {
        "telemetry": name,
        "tokens_per_s": round(statistics.median(found.tokens_per_s), 1),
        "ratio": round(ratio, 4),
        "interval": _rounded(interval),
        "cpu_ms_per_token": round(statistics.median(found.cpu_ms), 4) if found.cpu_ms else None,
        "cpu_ratio": None if cpu_ratio is None else round(cpu_ratio, 4),
        "cpu_interval": _rounded(cpu_interval),
    }


def _means(one: Sequence[float], other: Sequence[float]) -> list[float]:
    return [(first + second) / 2 for first, second in zip(one, other, strict=True)]


def _rounded(interval: tuple[float, float] | None) -> list[float] | None:
    return None if interval is None else [round(end, 4) for end in interval]
