"""The trace of a request's steps: it adds up with the request's own counts, and changes nothing."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.engine.sequence import Sequence
from backends.engine.step_trace import MOST_TRACED_STEPS, StepTracer
from backends.speculation.tree_builder import Draft
from backends.types import DecodingPlan, GenerationRequest, StepTrace
from tests.support.engine_helpers import (
    EOS,
    Recorded,
    Recorder,
    ScriptedHeads,
    decode,
    make_core,
    one_thread,  # noqa: F401
    random_prompt,
    random_tree,
    request,
    tokenizer,
)


def traced_steps(found: Recorded) -> list[StepTrace]:
    return [step for chunk in found.chunks for step in chunk.trace]


def decode_losing_memory(requests: list[GenerationRequest], rng: random.Random, heads: ScriptedHeads) -> Recorder:
    """All to their end, each of which loses its pages once in its answer at least, and goes on later."""
    recorder = Recorder()
    core = make_core(observer=recorder.observe, heads=heads, prefix_cache=rng.choice(["tenant", "none"]))
    for each in requests:
        core.add(each)
    while core.has_work:
        running = core.scheduler.running
        if running and (rng.random() < 0.3 or any(each.num_generated and not each.preemptions for each in running)):
            for _ in running:
                core.scheduler.preempt_youngest(0.0)
        recorder.take(core.step())
        core.check_integrity()
    assert not any(core.optional.failures().values())
    for each in requests:
        stats = recorder[each.request_id].last.stats
        assert stats is not None and (stats.preemptions or stats.steps == 1)
    return recorder


@pytest.mark.parametrize("shape", ["planned", "own tree", "vanilla"])
@given(seed=st.integers(0, 1000), stop=st.booleans(), lose=st.booleans())
def test_the_trace_is_the_answer(shape: str, seed: int, stop: bool, lose: bool) -> None:
    rng = random.Random(seed)
    prompt = random_prompt(rng, longest=60)
    vanilla = decode([request("v", prompt, ignore_eos=True)])["v"]
    plan = {
        "planned": DecodingPlan(),
        "own tree": DecodingPlan(tree=random_tree(rng, 9)),
        "vanilla": DecodingPlan(method="vanilla"),
    }[shape]
    stops = (vanilla.text[8:11],) if stop and len(vanilla.text) > 12 else ()
    asked = replace(request("r", prompt, plan, ignore_eos=True, stop=stops), trace=True)
    heads = ScriptedHeads({prompt: vanilla.tokens}, seed=seed)
    requests = [asked, replace(asked, request_id="silent", trace=False)]
    found = decode_losing_memory(requests, rng, heads) if lose else decode(requests, heads=heads)
    steps, stats = traced_steps(found["r"]), found["r"].last.stats
    assert stats is not None
    assert not traced_steps(found["silent"])
    assert found["silent"].tokens == found["r"].tokens == vanilla.tokens[: len(found["r"].tokens)]
    assert [token.id for step in steps for token in step.tokens] == found["r"].tokens
    assert [step.step for step in steps] == list(range(1, stats.steps + 1))
    assert sum(step.nodes for step in steps) == stats.drafted_tokens
    by_source: dict[str, int] = {}
    for step in steps[1:]:
        assert step.rows == step.nodes + 1
    for token in (token for step in steps for token in step.tokens[:-1]):
        name = "heads" if token.source == f"head {token.depth}" else token.source
        by_source[name] = by_source.get(name, 0) + 1
        assert token.chance is not None and 0 <= token.chance <= 1
    assert by_source == stats.accepted_by
    assert all(step.tokens[-1].source == "model" and step.tokens[-1].depth == 0 for step in steps)
    # The last end is that of the text that was shown.
    assert steps[-1].tokens[-1].end == len(found["r"].text)


def test_a_trace_is_bounded() -> None:
    tracer = StepTracer()
    for _ in range(MOST_TRACED_STEPS + 5):
        tracer.note_token(1)
        tracer.note_step([7], [0], Draft(), 0, 1.0)
    assert len(tracer.take()) == MOST_TRACED_STEPS
    assert tracer.take() == ()


def test_without_a_wish_there_is_no_tracer() -> None:
    asked = GenerationRequest("r", (5, 6), request("r", (5, 6)).sampling, DecodingPlan())
    sequence = Sequence(asked, tokenizer(), frozenset({EOS}), 0.0)
    assert sequence.tracer is None
