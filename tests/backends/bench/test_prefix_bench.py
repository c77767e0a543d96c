"""`bench prefix` on the tiny model: same answers, same hits, and what it counts adds up."""

from __future__ import annotations

from backends.bench.prefix import PrefixOptions, run_prefix
from backends.engine.loading import EngineOptions
from backends.models.tiny import TINY_MODEL_NAME


def test_hits_are_those_of_the_conversation_and_answers_are_alike() -> None:
    engine = EngineOptions(model=TINY_MODEL_NAME, threads=1, kv_tokens=4096)
    report = run_prefix(PrefixOptions(engine, conversations=2, turns=2, system_tokens=20, max_tokens=3))
    assert report["identical"]
    assert report["hit_tokens"] == report["hit_tokens_vanilla"] > 0
    assert [cell["turn"] for cell in report["cells"]] == [1, 2]
    first, second = (cell["cached_tokens"] for cell in report["cells"])
    assert first < second
    assert 0 < report["hit_rate"] < 1
