"""What structured output costs and gains: answers by schema with speculation, the same without, and free answers.

In every round the contestants take turns in rotating order on the same prompts; "vanilla again" is a second turn of
free vanilla decoding, whose ratio to the first says what the machine's noise is.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from backends.bench.decoding import encode_prompt, machine
from backends.bench.turns import rotated
from backends.engine.loading import EngineOptions, LoadedCore, load_core, torch_resting
from backends.grammar.spec import GrammarSpec
from backends.types import DecodingPlan, GenerationRequest, GenerationStats, SamplingParams, TokenGrammar


def _closed(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


_TEXT = {"type": "string", "maxLength": 60}
SCHEMAS: dict[str, tuple[str, dict[str, Any]]] = {
    "person": (
        "Extract the person as JSON: Maria Lopez is 34 years old, lives in Madrid and works as a nurse. "
        "Her address is maria@example.org.",
        _closed(
            {
                "first_name": _TEXT,
                "last_name": _TEXT,
                "age": {"type": "integer", "minimum": 0, "maximum": 130},
                "city": _TEXT,
                "occupation": _TEXT,
                "email_address": _TEXT,
            }
        ),
    ),
    "ticket": (
        "Classify this support message as JSON: The app crashes whenever I open the settings page on my phone.",
        _closed(
            {
                "category": {"enum": ["bug report", "feature request", "billing question", "other"]},
                "priority": {"enum": ["low", "medium", "high", "urgent"]},
                "affected_component": _TEXT,
                "requires_human_attention": {"type": "boolean"},
                "short_summary": _TEXT,
            }
        ),
    ),
    "event": (
        "Turn this into a calendar entry as JSON: Team meeting on 12 May 2025 from 10:00 to 11:30 in room 204 with "
        "Anna, Bob and Chen.",
        _closed(
            {
                "event_title": _TEXT,
                "start_date": {"type": "string", "format": "date"},
                "start_time": {"type": "string", "pattern": "^[0-2][0-9]:[0-5][0-9]$"},
                "end_time": {"type": "string", "pattern": "^[0-2][0-9]:[0-5][0-9]$"},
                "location": _closed({"building": _TEXT, "room_number": {"type": "integer"}}),
                "participants": {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": 4},
            }
        ),
    ),
    "recipe": (
        "Write a very short recipe for pancakes as JSON with its ingredients and steps.",
        _closed(
            {
                "recipe_name": _TEXT,
                "ingredients": {
                    "type": "array",
                    "minItems": 2,
                    "maxItems": 4,
                    "items": _closed(
                        {
                            "ingredient_name": _TEXT,
                            "quantity": {"type": "number", "minimum": 0, "maximum": 1000},
                            "unit_of_measure": {"enum": ["gram", "millilitre", "piece", "tablespoon"]},
                        }
                    ),
                },
                "cooking_time_minutes": {"type": "integer", "minimum": 1, "maximum": 240},
            }
        ),
    ),
    "function": (
        "Call the weather service for Paris tomorrow, in degrees Celsius. Answer with the call as JSON.",
        _closed(
            {
                "name": {"const": "get_weather_forecast"},
                "arguments": _closed(
                    {
                        "location_name": _TEXT,
                        "country_code": {"type": "string", "pattern": "^[A-Z]{2}$"},
                        "temperature_unit": {"enum": ["celsius", "fahrenheit"]},
                        "number_of_days": {"type": "integer", "minimum": 1, "maximum": 14},
                        "include_hourly_details": {"type": "boolean"},
                    }
                ),
            }
        ),
    ),
}
CONTESTANTS = ("speculation", "constrained_vanilla", "free_vanilla", "free_vanilla_again")
_VANILLA = DecodingPlan(method="vanilla", num_heads=0)
_NEIGHBOURS = 3
# Temperatures of the requests with a grammar, for the costs of their masks: drawn rows need one each.
_WAYS = {"greedy": 0.0, "drawn": 1.0}


@dataclass(slots=True)
class _Run:
    tokens: int = 0
    seconds: float = 0.0
    texts: list[str] = field(default_factory=list)
    stats: list[GenerationStats] = field(default_factory=list)

    @property
    def tps(self) -> float:
        return self.tokens / self.seconds


class _Timed:
    """A grammar, and what is asked of it in each row, timed: is the best token allowed, which ones are."""

    def __init__(self, grammar: TokenGrammar, times: list[float]) -> None:
        self._grammar, self._times = grammar, times
        self._row_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grammar, name)

    def allows(self, token: int) -> bool:
        began = time.perf_counter()
        found = self._grammar.allows(token)
        self._row_s += time.perf_counter() - began
        return found

    def mask(self, row: Any) -> None:
        began = time.perf_counter()
        self._grammar.mask(row)
        self._row_s += time.perf_counter() - began

    def advance(self, token: int) -> None:
        self._times.append(self._row_s)
        self._row_s = 0.0
        self._grammar.advance(token)


@dataclass(frozen=True, slots=True)
class StructuredOptions:
    engine: EngineOptions = field(default_factory=EngineOptions)
    rounds: int = 3
    max_tokens: int = 128


def run_structured(options: StructuredOptions, progress: Callable[[str], object] = lambda line: None) -> dict[str, Any]:
    """``{machine, cells: [...], ...}``: a cell for each schema, and medians over them. Raises as ``load_core``."""
    loaded = load_core(options.engine)
    with torch_resting(loaded.core.runner):
        return _measure(loaded, options, progress)


def _measure(loaded: LoadedCore, options: StructuredOptions, progress: Callable[[str], object]) -> dict[str, Any]:
    cells, ratios = [], {"over_free": [], "over_constrained": [], "again": []}
    prompts = {name: encode_prompt(loaded, prompt) for name, (prompt, _) in SCHEMAS.items()}
    _turn(loaded, next(iter(SCHEMAS)), prompts, "speculation", options.max_tokens)
    for number, name in enumerate(SCHEMAS):
        runs: dict[str, list[_Run]] = {contestant: [] for contestant in CONTESTANTS}
        for turn in range(options.rounds):
            for contestant in rotated(CONTESTANTS, turn + number):
                runs[contestant].append(_turn(loaded, name, prompts, contestant, options.max_tokens))
        over_free = _ratios(runs, "speculation", "free_vanilla")
        over_constrained = _ratios(runs, "speculation", "constrained_vanilla")
        again = _ratios(runs, "free_vanilla_again", "free_vanilla")
        for key, found in (("over_free", over_free), ("over_constrained", over_constrained), ("again", again)):
            ratios[key] += found
        stats = [each for run in runs["speculation"] for each in run.stats]
        identical = {text for key in CONTESTANTS[:2] for run in runs[key] for text in run.texts}
        cells.append(
            {
                "schema": name,
                **{f"{key}_tps": round(statistics.median(run.tps for run in runs[key]), 1) for key in CONTESTANTS},
                "over_free_vanilla": round(statistics.median(over_free), 3),
                "over_constrained_vanilla": round(statistics.median(over_constrained), 3),
                "again": round(statistics.median(again), 3),
                "tokens_per_step": round(sum(s.emitted_tokens for s in stats) / sum(s.steps for s in stats), 2),
                "by_grammar": round(sum(s.accepted_grammar_tokens for s in stats) / len(stats), 1),
                "of_tokens": runs["speculation"][0].tokens,
                "identical": len(identical) == 1,
                "parses": all(_parses(text) for text in identical),
            }
        )
        progress(json.dumps(cells[-1]))
    masks = {name: _mask_times(loaded, prompts, options.max_tokens, drawn) for name, drawn in _WAYS.items()}
    first = next(iter(prompts.values()))
    company = {name: _company(loaded, first, 2 * options.rounds, drawn) for name, drawn in _WAYS.items()}
    return {
        "machine": machine(loaded),
        "cells": cells,
        "over_free_vanilla": round(statistics.median(ratios["over_free"]), 3),
        "over_constrained_vanilla": round(statistics.median(ratios["over_constrained"]), 3),
        "again": round(statistics.median(ratios["again"]), 3),
        "mask_us": {
            name: {
                "p50": round(statistics.median(times) * 1e6, 1),
                "p95": round(sorted(times)[int(len(times) * 0.95)] * 1e6, 1),
                "rows": len(times),
            }
            for name, times in masks.items()
        },
        "beside_grammars": company,
    }


def _turn(loaded: LoadedCore, name: str, prompts: dict[str, tuple[int, ...]], contestant: str, most: int) -> _Run:
    free = contestant.startswith("free")
    plan = DecodingPlan() if contestant == "speculation" else _VANILLA
    # Opened as the gateway does: before the engine sees the request.
    grammar = None if free else loaded.grammars.open(_spec(name))
    # Free answers as long as the others, so that both are timed at the same lengths of text.
    sampling = SamplingParams(temperature=0.0, max_tokens=most if not free else 64, ignore_eos=free)
    return _decode(loaded, [GenerationRequest("0", prompts[name], sampling, plan, grammar=grammar)])


def _spec(name: str) -> GrammarSpec:
    return GrammarSpec("json", json.dumps(SCHEMAS[name][1]))


def _decode(loaded: LoadedCore, requests: Sequence[GenerationRequest]) -> _Run:
    """Timed from the first token to the last: reading the prompt is the same for all."""
    run, texts = _Run(), dict.fromkeys((request.request_id for request in requests), "")
    core, began = loaded.core, None
    starting = set(texts)
    for request in requests:
        core.add(request)
    while core.has_work:
        for name, chunk in core.step():
            texts[name] += chunk.text
            if chunk.stats is not None:
                run.stats.append(chunk.stats)
            if began is not None:
                run.tokens += len(chunk.token_ids)
            starting.discard(name)
        if began is None and not starting:
            began = time.perf_counter()
    assert began is not None
    run.seconds = time.perf_counter() - began
    run.texts = list(texts.values())
    return run


def _ratios(runs: dict[str, list[_Run]], one: str, other: str) -> list[float]:
    return [a.tps / b.tps for a, b in zip(runs[one], runs[other], strict=True)]


def _parses(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _mask_times(loaded: LoadedCore, prompts: dict[str, tuple[int, ...]], most: int, temperature: float) -> list[float]:
    times: list[float] = []
    for name, prompt in prompts.items():
        grammar: Any = _Timed(loaded.grammars.open(_spec(name)), times)
        sampling = SamplingParams(temperature=temperature, max_tokens=most, seed=1)
        _decode(loaded, [GenerationRequest("0", prompt, sampling, DecodingPlan(), grammar=grammar)])
    return times


def _company(loaded: LoadedCore, prompt: tuple[int, ...], rounds: int, temperature: float) -> dict[str, float]:
    """How long a free request takes beside three others, with a grammar or without; the same number of steps."""
    endless = GrammarSpec("regex", "[a-z ]{400,}", "regex")
    found: dict[str, list[float]] = {"with": [], "without": [], "again": []}
    for turn in range(rounds):
        for name in rotated(list(found), turn):
            found[name].append(_beside(loaded, prompt, endless if name == "with" else None, temperature))
    pairs = zip(found["with"], found["without"], found["again"], strict=True)
    slower, again = zip(*((a / b, c / b) for a, b, c in pairs), strict=True)
    return {
        "time_over_free_company": round(statistics.median(slower), 4),
        "again": round(statistics.median(again), 4),
        "rounds": rounds,
    }


def _beside(loaded: LoadedCore, prompt: tuple[int, ...], spec: GrammarSpec | None, temperature: float) -> float:
    sampling = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
    first = GenerationRequest("free", prompt, sampling, _VANILLA)
    others = [
        replace(
            first,
            request_id=str(number),
            grammar=None if spec is None else loaded.grammars.open(spec),
            sampling=replace(sampling, ignore_eos=spec is None, temperature=temperature),
        )
        for number in range(_NEIGHBOURS)
    ]
    run = _decode(loaded, [first, *others])
    return run.seconds
