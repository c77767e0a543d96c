"""Conversations with and without the prefix cache: when an answer begins, and how much of a prompt is found."""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from backends.bench.decoding import machine
from backends.bench.prompts import PROMPTS
from backends.bench.turns import rotated
from backends.engine.core import EngineCore
from backends.engine.loading import EngineOptions, LoadedCore, build_core, load_parts, torch_resting
from backends.types import DecodingPlan, GenerationRequest, SamplingParams

CONTESTANTS = ("off", "off_again", "on", "on_vanilla")
"""Without a cache, twice, for the noise between two that are alike; with one; and with one and without drafts."""
_VANILLA = DecodingPlan(method="vanilla", num_heads=0)


@dataclass(frozen=True, slots=True)
class PrefixOptions:
    """``system_tokens``: of the system prompt, the same in all conversations."""

    engine: EngineOptions = field(default_factory=EngineOptions)
    conversations: int = 8
    turns: int = 6
    system_tokens: int = 1000
    max_tokens: int = 32


@dataclass(frozen=True, slots=True)
class _Turn:
    first_token_s: float
    whole_s: float
    cached: int
    tokens: list[int]


def run_prefix(options: PrefixOptions, progress: Callable[[str], object] = lambda line: None) -> dict[str, Any]:
    """``{machine, cells: [...], ...}``: a cell for each turn of a conversation. Raises as ``load_core``."""
    parts = load_parts(options.engine)
    loaded: dict[str, LoadedCore] = {}
    for name in CONTESTANTS:
        # Each with pages of its own: none knows what another writes.
        cost = next((each.core.cost for each in loaded.values()), None)
        sharing = "tenant" if name.startswith("on") else "none"
        loaded[name] = build_core(parts, options.engine, cost=cost, prefix_cache=sharing)
    with torch_resting(loaded["on"].core.runner):
        return _measure(loaded, options, progress)


def _measure(
    loaded: Mapping[str, LoadedCore], options: PrefixOptions, progress: Callable[[str], object]
) -> dict[str, Any]:
    one = loaded["on"]
    texts = list(chain.from_iterable(PROMPTS.values()))
    rng = random.Random(0)
    words = " ".join(rng.choice(texts) for _ in range(options.system_tokens // 8 + 1))
    system = one.tokenizer.decode(one.tokenizer.encode(words)[: options.system_tokens])
    found: dict[str, list[list[_Turn]]] = {name: [[] for _ in range(options.turns)] for name in CONTESTANTS}
    prompt_tokens, identical = 0, True
    for number in range(options.conversations):
        messages = [{"role": "system", "content": system}]
        for turn in range(options.turns):
            messages.append({"role": "user", "content": texts[(number * options.turns + turn) % len(texts)]})
            prompt = tuple(one.tokenizer.encode_chat(messages))
            prompt_tokens += len(prompt)
            for name in rotated(CONTESTANTS, number + turn):
                plan = _VANILLA if name == "on_vanilla" else DecodingPlan()
                found[name][turn].append(_answer(loaded[name].core, prompt, plan, options.max_tokens))
            said = [found[name][turn][-1].tokens for name in CONTESTANTS]
            identical &= all(tokens == said[0] for tokens in said)
            messages.append({"role": "assistant", "content": one.tokenizer.decode(said[0])})
        progress(f"conversation {number + 1} of {options.conversations}")
    cells = []
    for turn in range(options.turns):
        at = {name: found[name][turn] for name in CONTESTANTS}
        cells.append(
            {
                "turn": turn + 1,
                **{f"{name}_ttft_ms": _median_ms(each.first_token_s for each in at[name]) for name in CONTESTANTS},
                "off_over_on": _ratio(at["off"], at["on"], "first_token_s"),
                "off_over_off_again": _ratio(at["off"], at["off_again"], "first_token_s"),
                "whole_off_over_on": _ratio(at["off"], at["on"], "whole_s"),
                "cached_tokens": statistics.median(each.cached for each in at["on"]),
            }
        )
        progress(json.dumps(cells[-1]))
    later = {name: list(chain.from_iterable(found[name][1:])) for name in CONTESTANTS}
    hits = {name: sum(each.cached for turn in found[name] for each in turn) for name in ("on", "on_vanilla")}
    return {
        "machine": machine(one),
        "cells": cells,
        "later_turns_off_over_on": _ratio(later["off"], later["on"], "first_token_s"),
        "later_turns_off_over_off_again": _ratio(later["off"], later["off_again"], "first_token_s"),
        "conversations_s": {
            name: round(sum(t.whole_s for turn in found[name] for t in turn), 3) for name in CONTESTANTS
        },
        "hit_tokens": hits["on"],
        "hit_tokens_vanilla": hits["on_vanilla"],
        "hit_rate": round(hits["on"] / prompt_tokens, 4),
        "identical": identical,
    }


def _answer(core: EngineCore, prompt: tuple[int, ...], plan: DecodingPlan, max_tokens: int) -> _Turn:
    tokens: list[int] = []
    cached, first = 0, 0.0
    began = time.perf_counter()
    core.add(GenerationRequest("turn", prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens), plan))
    while core.has_work:
        for _, chunk in core.step():
            if chunk.error:
                raise RuntimeError(chunk.error)
            first = first or time.perf_counter() - began
            tokens += chunk.token_ids
            cached = chunk.cached_tokens
    return _Turn(first, time.perf_counter() - began, cached, tokens)


def _median_ms(seconds: Any) -> float:
    return round(statistics.median(seconds) * 1e3, 2)


def _ratio(over: list[_Turn], under: list[_Turn], what: str) -> float:
    """The median of pairs that ran side by side."""
    pairs = zip(over, under, strict=True)
    return round(statistics.median(getattr(a, what) / getattr(b, what) for a, b in pairs), 3)
