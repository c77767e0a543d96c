"""The host's share of a step: what the engine's own Python and C take, with the device stubbed out.

A device does its work by itself between the *launch* of a step and the moment at which the host *collects* what it has
drawn. What the host does in between is free as long as the device takes longer. The rest is the *critical path*: from
the first collected token to the next launch, the device has nothing to do. Both are reported, as medians over steps.

The stub draws tokens from a few, so that text repeats itself and prompt lookup has all the work that it can have; heads
offer as many lists as sequential heads do. Nothing of a model is computed.
"""

from __future__ import annotations

import gc
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from backends.cost.step_cost import StepCost
from backends.engine.config import EngineConfig
from backends.engine.core import EngineCore
from backends.heads.module import MedusaHeads
from backends.heads.residual import ResidualHeads
from backends.models.tiny import tiny_tokenizer
from backends.runners.base import HeadsRunner, ProposalRequest, Proposals
from backends.runners.batch import PAGE_SIZE, StepBatch
from backends.sampling.rows import RowSampling
from backends.types import DecodingPlan, GenerationRequest, SamplingParams

_VOCABULARY, _HIDDEN, _GUESSES, _HEADS = 260, 8, 10, 4
_PROMPT_TOKENS, _CONTEXT = 20, 4096
# Letters of the tokenizer's alphabet, of which the stub draws.
_LETTERS = (69, 70, 71)
# An 8B model's step on an accelerator: estimates, which only decide how many candidates are planned.
_STEP_MS = ((1, 4.2), (64, 4.9), (128, 5.6), (256, 7.5), (1024, 22.0))
_HEADS_MS = ((1, 0.15), (64, 0.25), (256, 0.6))
CASES = {
    "vanilla": DecodingPlan(method="vanilla", num_heads=0),
    "medusa": DecodingPlan(num_heads=_HEADS, max_nodes=16, lookup=False),
    "medusa+lookup": DecodingPlan(num_heads=_HEADS, max_nodes=16),
}


@dataclass(frozen=True, slots=True)
class HostOptions:
    """``steps``: measured in each cell, after ``warm_up`` others."""

    sequences: tuple[int, ...] = (1, 16, 64, 256)
    cases: tuple[str, ...] = ("vanilla", "medusa+lookup")
    steps: int = 100
    warm_up: int = 30


class StubDevice:
    """See :class:`backends.runners.base.ModelRunner`. Its own time is left out of what is reported.

    ``critical_s``, ``spent_s``: of the host since :meth:`begin`.
    """

    kind, software, threads, runs_ahead = "stub", "stub", 1, True
    row_buckets: Sequence[int] = ()
    dtype, device = torch.float32, torch.device("cpu")
    hidden_size, vocab_size, max_context = _HIDDEN, _VOCABULARY, _CONTEXT

    def __init__(self, num_pages: int, max_rows: int, clock: Callable[[], float]) -> None:
        self.num_pages, self.max_rows = num_pages, max_rows
        self._clock, self._random = clock, random.Random(0)
        self._hidden, self._logits = torch.zeros(max_rows, _HIDDEN), torch.zeros(max_rows, _VOCABULARY)
        self._views: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.rows = 0
        self.begin()

    def begin(self) -> None:
        self.critical_s = self.spent_s = 0.0
        self._since, self._device_busy = self._clock(), False

    def end(self) -> None:
        self._leave_host()

    def forward(self, batch: StepBatch) -> torch.Tensor:
        self._leave_host()
        self.rows = batch.rows
        self._device_busy = True
        hidden, _ = self._of(batch.outputs)
        self._since = self._clock()
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._of(len(hidden))[1]

    def argmax(self, logits: torch.Tensor, rows: list[int]) -> list[int]:
        self._leave_host()
        self._device_busy = False
        drawn = [self._random.choice(_LETTERS) for _ in rows]
        self._since = self._clock()
        return drawn

    def sample(self, logits: torch.Tensor, rows: list[int], params: RowSampling) -> list[int]:
        return self.argmax(logits, rows)

    def copy_slots(self, source: list[int], target: list[int]) -> None:
        pass

    def embed(self, token_ids: list[int]) -> torch.Tensor:
        raise NotImplementedError("the stub has no weights")

    def bind_heads(self, heads: MedusaHeads | ResidualHeads) -> HeadsRunner:
        raise NotImplementedError("the stub has no weights")

    def _leave_host(self) -> None:
        spent = self._clock() - self._since
        self.spent_s += spent
        if not self._device_busy:
            self.critical_s += spent

    def _of(self, outputs: int) -> tuple[torch.Tensor, torch.Tensor]:
        found = self._views.get(outputs)
        if found is None:
            found = self._views[outputs] = (self._hidden[:outputs], self._logits[:outputs])
        return found


class StubHeads:
    """See :class:`backends.runners.base.HeadsRunner`: two lists at each level below the first, as sequential heads."""

    num_heads = _HEADS

    def __init__(self) -> None:
        lists = 1 + 2 * (_HEADS - 1)
        tokens = np.tile(np.arange(_LETTERS[0], _LETTERS[0] + _GUESSES, dtype=np.int32), (lists, 1))
        chances = np.tile((0.55 * 0.4 ** np.arange(_GUESSES)).astype(np.float32), (lists, 1))
        below = np.full((lists, _GUESSES), -1, np.int32)
        for level in range(_HEADS - 1):
            # The two likeliest guesses of a level's best list are followed.
            below[max(2 * level - 1, 0), :2] = (2 * level + 1, 2 * level + 2)
        self._offer = Proposals(tokens, chances, below, _HEADS)

    def propose(self, request: ProposalRequest) -> list[Proposals]:
        return [self._offer] * len(request.contexts)


@dataclass(slots=True)
class _Cell:
    case: str
    sequences: int
    step_ms: list[float] = field(default_factory=list)
    critical_ms: list[float] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    tokens: int = 0

    def report(self) -> dict[str, Any]:
        by_size = sorted(self.critical_ms)
        return {
            "case": self.case,
            "sequences": self.sequences,
            "critical_ms": round(statistics.median(by_size), 3),
            "critical_p90_ms": round(by_size[len(by_size) * 9 // 10], 3),
            "host_ms": round(statistics.median(self.step_ms), 3),
            "rows": round(statistics.fmean(self.rows), 1),
            "tokens_per_step": round(self.tokens / len(self.step_ms) / self.sequences, 2),
        }


def run_host(
    options: HostOptions = HostOptions(),
    progress: Callable[[str], object] = lambda line: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """``{machine, cells: [...]}``. Raises ValueError for an unknown case."""
    for name in options.cases:
        if name not in CASES:
            raise ValueError(f"case {name!r} is not one of {', '.join(CASES)}")
    cells = []
    for name in options.cases:
        for sequences in options.sequences:
            cell = _measure(_Cell(name, sequences), options, clock)
            cells.append(cell.report())
            progress(f"{name} x{sequences}: {cells[-1]['critical_ms']} ms on the critical path")
    return {"machine": _machine(), "cells": cells}


def stubbed_core(
    case: str, sequences: int, max_tokens: int, clock: Callable[[], float] = time.perf_counter
) -> tuple[EngineCore, StubDevice]:
    """An engine with so many requests of a case added; nothing has run yet."""
    pages_each = -(-(_PROMPT_TOKENS + max_tokens) // PAGE_SIZE)
    config = EngineConfig(
        max_model_len=_CONTEXT, max_running=sequences, max_rows=max(1024, 5 * sequences), prefill_rows=256
    )
    device = StubDevice(pages_each * sequences, config.max_rows, clock)
    core = EngineCore(
        device, StubHeads(), tiny_tokenizer(), config, StepCost.from_measurements(_STEP_MS, _HEADS_MS), clock
    )
    for number in range(sequences):
        core.add(
            GenerationRequest(
                f"request-{number}",
                tuple(range(65, 65 + _PROMPT_TOKENS)),
                SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
                CASES[case],
            )
        )
    return core, device


def _measure(cell: _Cell, options: HostOptions, clock: Callable[[], float]) -> _Cell:
    # Long enough that no answer ends, whatever is accepted.
    steps = options.steps + options.warm_up + 8 * cell.sequences
    core, device = stubbed_core(cell.case, cell.sequences, min(steps * (_HEADS + 8), _CONTEXT - _PROMPT_TOKENS), clock)
    reading = {f"request-{number}" for number in range(cell.sequences)}
    while reading:
        reading.difference_update(request_id for request_id, _ in core.step())
    for _ in range(options.warm_up):
        core.step()
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()  # as `serve` leaves out of collections what was loaded, see gateway/http/collector.py
    try:
        for _ in range(options.steps):
            device.begin()
            emitted = core.step()
            device.end()
            cell.step_ms.append(device.spent_s * 1e3)
            cell.critical_ms.append(device.critical_s * 1e3)
            cell.rows.append(device.rows)
            cell.tokens += sum(len(chunk.token_ids) for _, chunk in emitted)
    finally:
        if was_on:
            gc.enable()
    return cell


def _machine() -> dict[str, Any]:
    return {
        "cores": os.cpu_count(),
        "processor": platform.machine(),
        "python": platform.python_version(),
        "device": "stubbed out",
    }


def worst(cells: Sequence[dict[str, Any]], sequences: int) -> float:
    """The longest critical path of a batch of this size, in milliseconds."""
    return max(cell["critical_ms"] for cell in cells if cell["sequences"] == sequences)
