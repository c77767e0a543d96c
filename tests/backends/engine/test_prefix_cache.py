"""Prompts that begin alike are read once, and sequences that lose their memory go on: no answer shows it."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from backends.cost.probe import CostProbe
from backends.engine.core import EngineCore
from backends.engine.drafters import LookupDrafter
from backends.runners.batch import PAGE_SIZE, StepBatch
from backends.speculation.prompt_lookup import Lookup
from backends.types import DecodingPlan, GenerationRequest
from tests.backends.engine.test_core import (
    Clock,
    random_plan,
    random_sampling,
    same_answer,
    scarce_pages,
    stops_inside,
    vanilla_alone,
)
from tests.support.engine_helpers import (
    Recorder,
    ScriptedHeads,
    any_runner,
    decode,
    make_core,
    one_thread,  # noqa: F401
    random_prompt,
    request,
    shared_runner,
)

LONG = random_prompt(random.Random(5), 3 * PAGE_SIZE + 5, 3 * PAGE_SIZE + 5)
DRAFTING = DecodingPlan(num_heads=4, max_nodes=12)


def run(core: EngineCore, *requests: GenerationRequest) -> Recorder:
    recorder = Recorder()
    for each in requests:
        core.add(each)
    while core.has_work:
        recorder.take(core.step())
        core.check_integrity()
    return recorder


def cached(recorder: Recorder, name: str) -> int:
    stats = recorder[name].last.stats
    assert stats is not None and recorder[name].last.cached_tokens == stats.cached_tokens
    return stats.cached_tokens


@pytest.mark.parametrize("seed", range(6))
def test_cache_and_preemption_change_nothing(seed: int) -> None:
    """All that a request can ask for, with random drafts, few pages, beginnings in common, and lost memory."""
    rng, runner = random.Random(seed), shared_runner("native", "llama", torch.float32)
    stems = [random_prompt(rng, 20, 60) for _ in range(3)]
    prompts = [(*rng.choice(stems)[: rng.randint(15, 60)], *random_prompt(rng, 1, 20), 4 + i) for i in range(16)]
    requests = [request(f"r{i}", each, random_plan(rng), **random_sampling(rng)) for i, each in enumerate(prompts)]
    without_stops = vanilla_alone(requests, runner)
    requests = [
        replace(each, sampling=replace(each.sampling, **stops_inside(rng, without_stops[each.request_id])))
        for each in requests
    ]
    reference = vanilla_alone(requests, runner)
    answers = {each.prompt_token_ids: without_stops[each.request_id].tokens for each in requests}
    recorder = Recorder()
    core = make_core(
        **scarce_pages(rng.choice([9, 14])),
        heads=ScriptedHeads(answers, seed=seed),
        observer=recorder.observe,
        prefix_cache="tenant",
        spare_pages=0,
        prefill_rows=rng.choice([5, 24]),
    )
    waiting = list(requests)
    while waiting or core.has_work:
        if waiting and rng.random() < 0.5:
            core.add(waiting.pop(0))
        if core.scheduler.running and rng.random() < 0.2:
            core.scheduler.preempt_youngest(0.0)
        recorder.take(core.step())
        core.check_integrity()
    assert not any(core.optional.failures().values())
    for each in requests:
        same_answer(recorder[each.request_id], reference[each.request_id])
    load = core.load()
    assert load.preemptions and load.cache_hit_tokens and load.kv_pages_used == 0


def test_the_next_turn_finds_prompt_and_answer_but_never_its_last_token() -> None:
    core = make_core(prefix_cache="tenant")
    first = run(core, request("first", LONG, max_tokens=20, ignore_eos=True))
    assert cached(first, "first") == 0
    said = first["first"].sent_ids
    turn = run(core, request("turn", (*LONG, *said, 7), max_tokens=2))
    # The last token of an answer is drawn, and not read.
    assert cached(turn, "turn") == (len(LONG) + len(said) - 1) // PAGE_SIZE * PAGE_SIZE
    for length in (4 * PAGE_SIZE, 4 * PAGE_SIZE + 1):
        whole = (*LONG, *said)[:length]
        found = run(core, request("again", whole, max_tokens=2))
        assert cached(found, "again") == (length - 1) // PAGE_SIZE * PAGE_SIZE


def test_hits_are_the_same_with_and_without_drafts() -> None:
    found = []
    for plan in (DecodingPlan(method="vanilla"), DRAFTING):
        core, text = make_core(prefix_cache="tenant"), LONG
        hits = []
        for turn in range(4):
            recorder = run(core, request(f"t{turn}", text, plan, max_tokens=21, ignore_eos=True))
            hits.append(cached(recorder, f"t{turn}"))
            text = (*text, *recorder[f"t{turn}"].sent_ids, 9, 11)
        found.append((hits, core.load().cache_hit_tokens))
    assert found[0] == found[1] and found[0][0][1:] > [0, 0, 0]


@pytest.mark.parametrize(
    ("kind", "other", "shared"),
    [
        ("tenant", {"tenant": "b"}, False),
        ("tenant", {"tenant": "a", "cache_salt": "s"}, False),
        ("tenant", {"tenant": "a"}, True),
        ("shared", {"tenant": "b"}, True),
        ("shared", {"tenant": "b", "cache_salt": "s"}, False),
        ("none", {"tenant": "a"}, False),
    ],
)
def test_who_shares(kind: str, other: dict[str, Any], shared: bool) -> None:
    core = make_core(prefix_cache=kind)
    run(core, replace(request("one", LONG, max_tokens=1), tenant="a"))
    found = run(core, replace(request("two", LONG, max_tokens=1), **other))
    assert cached(found, "two") == (3 * PAGE_SIZE if shared else 0)


def test_a_mode_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="tenant, shared, none"):
        make_core(prefix_cache="off")


def test_choices_of_one_prompt_read_it_once() -> None:
    core, rows = make_core(prefix_cache="tenant", prefill_rows=96 - 8, max_running=8), 0
    for index in range(4):
        core.add(request(f"c{index}", LONG, max_tokens=6, temperature=1.0, seed=index, ignore_eos=True))
    recorder = Recorder()
    while core.has_work:
        recorder.take(core.step())
        assert core._plan is not None
        rows += core._plan.num_prefill_rows
    assert rows == len(LONG) + 3 * (len(LONG) % PAGE_SIZE)
    assert sorted(cached(recorder, f"c{index}") for index in range(4)) == [0, *[3 * PAGE_SIZE] * 3]
    for index in range(4):
        alone = decode([request("x", LONG, max_tokens=6, temperature=1.0, seed=index, ignore_eos=True)])
        assert recorder[f"c{index}"].sent_ids == alone["x"].tokens


def test_what_ends_in_an_error_leaves_nothing_behind() -> None:
    core = make_core(prefix_cache="tenant")
    core.add(request("broken", LONG, max_tokens=30, ignore_eos=True))
    core.step()
    core.step()
    assert core.load().kv_pages_cached == 3
    core.fail_step("broken")
    core.check_integrity()
    assert core.load().kv_pages_cached == core.load().kv_pages_used == 0


def test_what_is_aborted_leaves_what_it_had_read() -> None:
    core = make_core(prefix_cache="tenant")
    core.add(request("gone", LONG, max_tokens=30, ignore_eos=True))
    core.step()
    core.abort("gone")
    core.check_integrity()
    assert cached(run(core, request("next", LONG, max_tokens=1)), "next") == 3 * PAGE_SIZE


def test_memory_is_taken_as_answers_grow() -> None:
    """Reserved for their longest life, two of these would fill the pages; by what they use, six run at once."""
    requests = [request(f"r{i}", (4 + i, 5, 6), max_tokens=3 * PAGE_SIZE, stop_token_ids=(9,)) for i in range(6)]
    core = make_core(**scarce_pages(8), spare_pages=0)
    for each in requests:
        core.add(each)
    core.step()
    assert core.load().running == 6 and core.load().kv_pages_used == 6


def test_the_youngest_gives_way_and_comes_back_first() -> None:
    clock, core = Clock(), None
    core, recorder = make_core(**scarce_pages(4), spare_pages=0, clock=clock), Recorder()
    order = ["old", "young", "later"]
    for name in order:
        core.add(request(name, (7, *name.encode()[:1]), max_tokens=3 * PAGE_SIZE, ignore_eos=True))
    finished: list[str] = []
    while core.has_work:
        clock.now += 1
        for name, chunk in core.step():
            recorder.take([(name, chunk)])
            finished += [name] * (chunk.finish_reason is not None)
        core.check_integrity()
    assert finished == order
    stats = {name: recorder[name].last.stats for name in order}
    assert stats["old"] and stats["young"] and stats["later"]
    assert stats["old"].preemptions == 0 and stats["young"].preemptions > 0
    # No second first token, and no step that told the same twice.
    assert stats["young"].first_token_at == 1.0 and len(recorder["young"].sent_ids) == 3 * PAGE_SIZE
    for name in order:
        alone = decode([request("x", (7, *name.encode()[:1]), max_tokens=3 * PAGE_SIZE, ignore_eos=True)])
        assert recorder[name].sent_ids == alone["x"].tokens


def test_a_sequence_without_memory_ends_by_its_deadline_with_what_it_has_and_can_be_aborted() -> None:
    clock = Clock()
    core, recorder = make_core(clock=clock), Recorder()
    core.add(request("late", LONG, deadline_s=5.0, max_tokens=40, ignore_eos=True))
    core.add(request("gone", LONG[:20], max_tokens=40, ignore_eos=True))
    for _ in range(3):
        recorder.take(core.step())
    told = len(recorder["late"].sent_ids)
    for _ in range(2):
        core.scheduler.preempt_youngest(clock.now)
    assert core.load().waiting == 2 and core.load().kv_pages_used == 0
    core.abort("gone")
    clock.now = 5.0
    recorder.take(core.step())
    assert recorder["late"].ending == ("deadline", None, told)
    assert not core.has_work
    core.check_integrity()


@pytest.mark.parametrize("pages", [1, 3, 64])
def test_measuring_writes_into_no_page(pages: int) -> None:
    """It goes on while an engine is idle, which is when what pages hold is kept for later."""
    real, written = any_runner(), set()

    class Watched:
        num_pages = pages

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def forward(self, batch: StepBatch) -> torch.Tensor:
            written.update(batch.slots.tolist())
            return real.forward(batch)

    runner: Any = Watched()
    CostProbe(runner, None, budget_s=1.0).measure()
    assert written and min(written) >= pages * PAGE_SIZE


@pytest.mark.parametrize("kind", ["tenant", "none"])
def test_long_prompts_are_indexed_some_a_step_and_wholly(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found in the cache or read at once, by several: no step takes in more than it may; in the end all is there."""
    most, prompt = 20, random_prompt(random.Random(3), 88, 88)
    monkeypatch.setattr("backends.engine.drafters.MOST_INDEXED", most)
    core = make_core(prefix_cache=kind, max_rows=128, prefill_rows=96)
    run(core, request("before", prompt, max_tokens=1))
    names = ["a", "b", "c"]
    for name in names:
        core.add(request(name, prompt, DecodingPlan(), max_tokens=40, ignore_eos=True))
    core.add(request("leaves", prompt, DecodingPlan(), max_tokens=40, ignore_eos=True))
    (drafter,) = [each for each, _ in core.drafting._drafters if isinstance(each, LookupDrafter)]
    taken: list[int] = []
    index = Lookup.index

    def counting(lookup: Lookup, tokens: int) -> int:
        done = index(lookup, tokens)
        taken[-1] += done
        return done

    monkeypatch.setattr(Lookup, "index", counting)
    monkeypatch.setattr(LookupDrafter, "propose", lambda self, call: [None] * len(call.outcomes))
    steps = 0
    while core.has_work:
        taken.append(0)
        core.step()
        steps += 1
        if steps == 2:
            core.abort("leaves")
        if steps == 16:
            lookups = [core.scheduler._running[name].lookup for name in names]
            assert not drafter.is_behind
            for lookup in lookups:
                fresh = Lookup(list(prompt))
                index(fresh, len(prompt))
                assert lookup is not None and fresh._after.items() <= lookup._after.items()
    assert max(taken) == most and not drafter.is_behind
    assert not any(core.optional.failures().values())
