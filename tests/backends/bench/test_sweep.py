"""The load of a sweep's cell goes on: as many requests in flight at its last step as at its first."""

from __future__ import annotations

from typing import Any

import pytest

from backends.bench.decoding import Cell
from backends.bench.load_sweep import sustain
from backends.engine.loading import EngineOptions, load_core
from backends.models.tiny import TINY_MODEL_NAME
from backends.types import DecodingPlan

PROMPTS = [tuple(range(5, 15 + i)) for i in range(9)]


@pytest.mark.parametrize("limit", [3, 24], ids=["some end while prompts are read", "none does"])
@pytest.mark.parametrize(
    "plan", [DecodingPlan(), DecodingPlan(method="vanilla", num_heads=0)], ids=["medusa", "vanilla"]
)
def test_an_ended_answer_is_followed_by_the_next(
    plan: DecodingPlan, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_core(EngineOptions(model=TINY_MODEL_NAME))
    core = loaded.core
    in_flight: list[int] = []
    emitted: list[set[str]] = []
    tokens: list[int] = []
    step = core.step

    def watched() -> list[Any]:
        load = core.load()
        in_flight.append(load.running + load.waiting)
        found = step()
        emitted.append({request_id for request_id, _ in found})
        tokens.append(sum(len(chunk.token_ids) for _, chunk in found))
        return found

    monkeypatch.setattr(core, "step", watched)
    run = sustain(loaded, PROMPTS, Cell("code", 0.0, 3), limit, 0, plan)
    assert set(in_flight) == {3}
    # The first step after which all of the first three had begun is the last that doesn't count.
    begun: set[str] = set()
    first = next(i for i, ids in enumerate(emitted) if begun.update(ids) or begun >= {"0", "1", "2"})
    assert run.tokens == sum(tokens[first + 1 :]) > 0
    assert set().union(*emitted) >= {str(i) for i in range(len(PROMPTS))}, "all prompts were in"
    core.check_integrity()
    assert not core.has_work
