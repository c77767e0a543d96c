"""Whatever breaks inside an engine: every stream ends exactly once, books add up, drafts and statistics cost nobody an
answer, and no exception's words reach a client."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pytest
import torch

from backends.cost.calibration import Calibration
from backends.engine import drafting
from backends.engine.core import EngineCore
from backends.engine.drafters import HeadsDrafter
from backends.engine.kv_cache import IntegrityError
from backends.engine.optional_parts import FIRST_REST, LOG_EVERY_S, OptionalPart
from backends.engine.sequence import Sequence
from backends.engine.thread import Engine
from backends.runners.base import ProposalRequest, Proposals
from backends.sampling.rows import RowSampling
from backends.sampling.torch_sampler import draw_rows
from backends.speculation.backoff import Speculation
from backends.speculation.prompt_lookup import Lookup
from backends.tree import MAX_DEPTH, CandidateTree
from backends.types import ENGINE_FAILED, NOT_FINITE, DecodingPlan, ModelInfo
from gateway.admission import Places
from gateway.serving.call import ServedModel
from gateway.serving.targets import Backends, EngineBackend
from tests.support.engine_helpers import (
    CONTEXT,
    VOCAB,
    Recorder,
    ScriptedHeads,
    any_runner,
    decode,
    make_core,
    make_runner,
    request,
    tiny_lm,
)
from tests.support.fakes import FakeTokenizer
from tests.support.live_gateway import running_gateway

SECRET = "zanzibar/secret-0x7f"
INFO = ModelInfo("tiny", CONTEXT, VOCAB, 4, "float32", "cpu")
PLANS = (
    DecodingPlan(method="vanilla"),
    DecodingPlan(num_heads=4, max_nodes=12),
    DecodingPlan(num_heads=4, tree=CandidateTree.parse("3x2x1")),
    DecodingPlan(num_heads=3, max_nodes=8),
)
# Repetitive, so that looking up finds something.
PROMPTS = [(10 + i, *((20 + i, 30, 40 + i) * 4)) for i in range(len(PLANS))]
REQUESTS = [
    request(f"r{i}", prompt, plan, max_tokens=14, temperature=0.7 * (i % 2), seed=i, ignore_eos=True, deadline_s=1e6)
    for i, (prompt, plan) in enumerate(zip(PROMPTS, PLANS, strict=True))
]


@pytest.fixture(scope="module")
def reference() -> Recorder:
    return decode([replace(each, plan=PLANS[0]) for each in REQUESTS])


def heads_of(reference: Recorder, **options: Any) -> ScriptedHeads:
    return ScriptedHeads({each.prompt_token_ids: reference[each.request_id].tokens for each in REQUESTS}, **options)


def finish(core: EngineCore, recorder: Recorder, steps: int = 200) -> None:
    """As the engine's thread does it."""
    for _ in range(steps):
        if not core.has_work:
            return
        try:
            recorder.take(core.step())
        except Exception:
            recorder.take(core.fail_step(ENGINE_FAILED))
        core.check_integrity()
    raise AssertionError("the requests don't end")


# What the engine can do without.


class Raises:
    """Stands where something else stood, and raises at whatever is asked of it."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(SECRET)


def raising(*arguments: Any, **options: Any) -> Any:
    raise MemoryError(SECRET)


def junk(request: ProposalRequest) -> list[Proposals]:
    """Guesses outside the vocabulary."""
    rows = len(request.contexts)
    return [Proposals(np.full((4, 5), VOCAB + 7, np.int32), np.full((4, 5), 0.9, np.float32)) for _ in range(rows)]


Break = Callable[[EngineCore, pytest.MonkeyPatch], None]
BREAKS: dict[str, tuple[str, Break]] = {
    "heads": ("heads", lambda core, patch: patch.setattr(core.heads, "propose", raising)),
    "heads give junk": ("planning", lambda core, patch: patch.setattr(core.heads, "propose", junk)),
    "heads give too little": ("heads", lambda core, patch: patch.setattr(core.heads, "propose", lambda _: [])),
    "gate": ("heads", lambda core, patch: patch.setattr(core.gate, "allows", raising)),
    "gate's memory": ("judging", lambda core, patch: patch.setattr(core.gate, "observe", raising)),
    "judge": ("judging", lambda core, patch: patch.setattr(HeadsDrafter, "observe", raising)),
    "a sequence's record": ("judging", lambda core, patch: patch.setattr(Speculation, "observe", raising)),
    "count": ("counting", lambda core, patch: patch.setattr(core.accounting, "_count", raising)),
    "counters": ("counting", lambda core, patch: patch.setattr(core.accounting.counters, "add_step", raising)),
    "samples": ("counting", lambda core, patch: patch.setattr(core.accounting, "samples", Raises())),
    "calibration": ("planning", lambda core, patch: patch.setattr(Calibration, "row_cost_factor", raising)),
    "planning": ("planning", lambda core, patch: patch.setattr(drafting, "plan_drafts", raising)),
    "lookup": ("lookup", lambda core, patch: patch.setattr(Lookup, "find", raising)),
    "index": ("lookup", lambda core, patch: patch.setattr(Lookup, "index", raising)),
    "deadlines": ("pace", lambda core, patch: patch.setattr(Sequence, "update_deadline", raising)),
}


@pytest.mark.parametrize("name", BREAKS)
def test_every_answer_is_complete_and_the_same_without(
    name: str, reference: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder()
    core = make_core(heads=heads_of(reference), observer=recorder.observe)
    part, break_it = BREAKS[name]
    break_it(core, monkeypatch)
    for each in REQUESTS:
        core.add(each)
    while core.has_work:
        recorder.take(core.step())  # no step fails
        core.check_integrity()
    for each in REQUESTS:
        found, expected = recorder[each.request_id], reference[each.request_id]
        assert (found.tokens, found.logits, found.text) == (expected.tokens, expected.logits, expected.text)
        assert found.ending == ("length", None, 14)
    assert core.optional.failures()[part] > 0


def test_heads_that_fail_are_left_alone_for_a_while_and_then_asked_again(reference: Recorder) -> None:
    class Once(ScriptedHeads):
        failures = 0

        def propose(self, request: ProposalRequest) -> Any:
            if not self.failures:
                self.failures += 1
                raise MemoryError(SECRET)
            return super().propose(request)

    heads = Once({}, hit_rate=0.0)
    core, recorder = make_core(heads=heads), Recorder()
    long = replace(REQUESTS[2], sampling=replace(REQUESTS[2].sampling, max_tokens=FIRST_REST + 20))
    core.add(long)
    asked = []
    while core.has_work:
        before = len(heads.calls)
        recorder.take(core.step())
        asked.append(len(heads.calls) > before)
    assert asked.index(True) == FIRST_REST + 1
    assert core.optional.failures()["heads"] == 1
    stats = recorder[long.request_id].last.stats
    assert stats is not None and "drafting had failed" in stats.reason


def test_a_part_that_fails_all_the_time_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    part = OptionalPart("counting", lambda: now)
    for _ in range(50):
        with part:
            raise RuntimeError("broken")
    now = LOG_EVERY_S
    with part:
        raise RuntimeError("broken")
    assert part.failures == 51
    assert [record.levelno for record in caplog.records] == [logging.ERROR] * 2
    assert "49 time(s) more" in caplog.text
    with pytest.raises(KeyboardInterrupt), part:
        raise KeyboardInterrupt


def test_a_part_that_goes_on_failing_rests_longer_each_time() -> None:
    part, rests = OptionalPart("heads", lambda: 0.0), []
    for fails in (True, True, True, False, True):
        with part:
            if fails:
                raise RuntimeError("broken")
        rests.append(0)
        while not part.ready():
            rests[-1] += 1
    assert rests == [FIRST_REST, 2 * FIRST_REST, 4 * FIRST_REST, 0, FIRST_REST]


def test_a_wide_tree_beside_narrow_ones_breaks_no_book(reference: Recorder) -> None:
    """Whose hit lists were begun with fewer guesses: the wide request makes the heads guess more for all."""
    wide = replace(REQUESTS[0], plan=DecodingPlan(num_heads=4, tree=CandidateTree.parse("32")))

    class LastRank(ScriptedHeads):
        def _guesses(self, rest: Any, k: int) -> Proposals:
            tokens = np.arange(100, 100 + 4 * k, dtype=np.int32).reshape(4, k)
            tokens[: len(rest[:4]), k - 1] = rest[:4]
            return Proposals(tokens, np.full((4, k), 0.5 / k, np.float32))

    heads = heads_of(reference)
    heads.__class__, heads._ranks = LastRank, 32
    core, recorder = make_core(heads=heads), Recorder()
    core.add(REQUESTS[1])
    for _ in range(3):
        recorder.take(core.step())
    core.add(wide)
    while core.has_work:
        recorder.take(core.step())
    assert sum(core.optional.failures().values()) == 0
    for each in (REQUESTS[1], wide):
        assert recorder[each.request_id].sent_ids == reference[each.request_id].tokens
    counters = core.accounting.counters.take()["tests"]
    assert len(counters.hits[0]) == 32 and counters.hits[0][31] > 0


def test_no_draft_is_deeper_than_the_kernels_can_hold(reference: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[Any] = []
    monkeypatch.setattr(drafting, "plan_drafts", lambda requests, **_: (planned.extend(requests.values()), {})[1])
    core = make_core(heads=heads_of(reference, num_heads=30))
    core.add(
        replace(REQUESTS[1], plan=DecodingPlan(num_heads=30), sampling=replace(REQUESTS[1].sampling, max_tokens=60))
    )
    while core.has_work:
        core.step()
    assert max(each.max_depth for each in planned) == max(each.longest for each in planned) == MAX_DEPTH


# A step that breaks as a whole.


@contextmanager
def failing_at(call: int, seen: list[CodeType] | None = None) -> Iterator[list[int]]:
    """Raises at the entry of the ``call``-th function of backends/ that is called inside; -1: only counts."""
    count = [0]

    def trace(frame: FrameType, event: str, argument: object) -> None:
        if "/backends/" not in frame.f_code.co_filename:
            return
        if seen is not None:
            seen.append(frame.f_code)
        count[0] += 1
        if count[0] == call:
            raise RuntimeError(SECRET)

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(before)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def eventful(reference: Recorder) -> tuple[EngineCore, Recorder, Callable[[], None]]:
    """A core, and a step of it in which everything happens: decoding with drafts, a prompt's end and a prompt's middle,
    an admission, a deadline that runs out, one that is near, and an answer that gets complete."""
    clock, recorder = Clock(), Recorder()
    core = make_core(heads=heads_of(reference), clock=clock, max_running=5, prefill_rows=8, max_rows=64)
    core.add(replace(REQUESTS[0], request_id="late", deadline_s=5.0))
    core.add(replace(REQUESTS[0], request_id="done", sampling=replace(REQUESTS[0].sampling, max_tokens=3)))
    core.add(REQUESTS[1])
    core.add(REQUESTS[2])
    for clock.now in (1.0, 2.0, 3.0):
        recorder.take(core.step())
        if recorder["done"].chunks and len(recorder["done"].sent_ids) == 2:
            break
    core.add(replace(REQUESTS[3], deadline_s=9.0))
    core.add(replace(REQUESTS[0], request_id="reads", prompt_token_ids=PROMPTS[0] * 3))
    clock.now = 5.5
    return core, recorder, lambda: recorder.take(core.step())


def check_after(core: EngineCore, recorder: Recorder, reference: Recorder, failed: bool) -> None:
    finish(core, recorder)
    names = ["late", "done", "r1", "r2", "r3", "reads"]
    assert set(recorder.of) == set(names)
    sources = {"late": "r0", "done": "r0"}
    for name in names:
        reasons = [chunk.finish_reason for chunk in recorder[name].chunks]
        assert reasons[-1] is not None and reasons[:-1] == [None] * (len(reasons) - 1), name
        assert failed or reasons[-1] != "error"
        if name != "reads":
            right = reference[sources.get(name, name)].tokens
            found = recorder[name].sent_ids
            assert found == right[: len(found)]
            if reasons[-1] == "length":
                assert len(found) == (3 if name == "done" else 14), name
    assert core.load().kv_pages_used == 0
    after = replace(REQUESTS[0], request_id="after", deadline_s=None)
    core.add(after)
    finish(core, recorder)
    assert recorder["after"].sent_ids == reference["r0"].tokens


def test_an_exception_at_any_call_loses_no_stream_and_no_page(reference: Recorder) -> None:
    """Each function that a step calls, at one of its calls (a random one): it raises there."""
    core, recorder, step = eventful(reference)
    seen: list[CodeType] = []
    with failing_at(-1, seen):
        step()
    check_after(core, recorder, reference, failed=False)
    assert {"deadline", "length"} <= {recorder[name].last.finish_reason for name in ("late", "done")}
    calls: dict[CodeType, list[int]] = defaultdict(list)
    for number, code in enumerate(seen, start=1):
        calls[code].append(number)
    assert len(calls) > 60
    assert len({tuple(reference[each.request_id].tokens) for each in REQUESTS}) == len(REQUESTS)
    rng, steps_failed = random.Random(7), Counter[bool]()
    for numbers in calls.values():
        core, recorder, step = eventful(reference)
        failed = False
        try:
            with failing_at(rng.choice(numbers)):
                step()
        except RuntimeError:
            failed = True
            recorder.take(core.fail_step(ENGINE_FAILED))
        steps_failed[failed] += 1
        core.check_integrity()
        check_after(core, recorder, reference, failed=True)
    assert steps_failed[True] > 20 and steps_failed[False] > 20


PATIENCE_S = 60.0


@pytest.fixture
def engine_of() -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def make(core: EngineCore) -> Engine:
        engines.append(Engine(core, INFO))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


async def read(handle: Any) -> list[Any]:
    async with asyncio.timeout(PATIENCE_S):
        return [chunk async for chunk in handle]


async def test_a_deadline_in_a_step_that_breaks_is_still_told(engine_of: Callable[..., Engine]) -> None:
    clock, broken = Clock(), threading.Event()
    runner: Any = any_runner()

    class Breaks:
        def __getattr__(self, name: str) -> Any:
            return getattr(runner, name)

        def forward(self, batch: Any) -> torch.Tensor:
            if broken.is_set():
                raise RuntimeError(SECRET)
            return runner.forward(batch)

    breaks: Any = Breaks()
    core = make_core(runner=breaks, clock=clock)
    step, hold, held = core.step, threading.Semaphore(0), threading.Semaphore(0)

    def paced() -> Any:
        held.release()
        assert hold.acquire(timeout=PATIENCE_S)
        return step()

    core.step = paced  # type: ignore[method-assign]
    engine = engine_of(core)
    late = engine.submit(request("late", (5, 6), deadline_s=5.0, max_tokens=99, ignore_eos=True))
    other = engine.submit(request("other", (5, 6), max_tokens=99, ignore_eos=True))
    assert await asyncio.to_thread(held.acquire, timeout=PATIENCE_S)
    hold.release()
    assert await asyncio.to_thread(held.acquire, timeout=PATIENCE_S)
    clock.now = 6.0
    broken.set()
    hold.release(9)
    assert (await read(late))[-1].finish_reason == "deadline"
    last = (await read(other))[-1]
    assert (last.finish_reason, last.error) == ("error", ENGINE_FAILED)
    assert not engine._handles


async def test_an_idle_engine_looks_after_its_pages(
    engine_of: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    core, looked = make_core(), threading.Semaphore(0)

    def lost() -> None:
        looked.release()
        raise IntegrityError("a page is lost")

    monkeypatch.setattr(core, "check_integrity", lost)
    engine = engine_of(core)
    await read(engine.submit(request("a", (5, 6), max_tokens=3)))
    assert await asyncio.to_thread(looked.acquire, timeout=PATIENCE_S)
    await read(engine.submit(request("b", (5, 6), max_tokens=3)))
    assert engine.alive and "a page is lost" in caplog.text


async def test_an_abort_does_not_hit_the_next_owner_of_the_id(engine_of: Callable[..., Engine]) -> None:
    """Asked for in the very step that ends the request; the id comes again before the engine looks at its orders."""
    core, entered, go_on = make_core(), threading.Semaphore(0), threading.Semaphore(0)
    step, engine = core.step, engine_of(core)

    def between_steps() -> None:
        entered.release()
        assert go_on.acquire(timeout=PATIENCE_S)

    def last_step() -> Any:
        engine.abort(first)
        core.check_integrity = between_steps  # type: ignore[method-assign]
        return step()

    core.step = last_step  # type: ignore[method-assign]
    first = engine.submit(request("r", (5, 6), max_tokens=1))
    assert (await read(first))[-1].finish_reason in ("length", "stop")
    assert await asyncio.to_thread(entered.acquire, timeout=PATIENCE_S)
    core.step = step  # type: ignore[method-assign]
    again = engine.submit(request("r", (5, 6), max_tokens=4, ignore_eos=True))
    go_on.release(1000)
    assert (await read(again))[-1].finish_reason == "length"


# A model whose numbers are broken.


@pytest.mark.parametrize("kind", ["native", "transformers"])
def test_logits_that_are_not_finite_end_their_request_only(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_lm("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[5] = float("nan")
    runner = make_runner(kind, model, threads=1)
    ways: list[dict[str, Any]] = [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9, "top_k": 7}]
    if kind == "transformers":
        ways.append({"temperature": 1.0, "top_p": 0.9, "min_p": 0.05})
    bad = [request(f"bad{i}", (40, 5, 60), max_tokens=8, ignore_eos=True, **way) for i, way in enumerate(ways)]
    good = [
        request(f"good{i}", (40, 7, 60 + i), max_tokens=8, ignore_eos=True, logit_bias={5: -99.0}) for i in range(3)
    ]
    alone = decode(good, runner=runner)
    found = decode([bad[0], good[0], *bad[1:], *good[1:]], runner=runner)
    for each in bad:
        last = found[each.request_id].last
        assert (last.finish_reason, last.error, last.num_tokens) == ("error", NOT_FINITE, 0)
        assert f"request {each.request_id} ends" in caplog.text
    for each in good:
        assert found[each.request_id].logits == alone[each.request_id].logits
        assert found[each.request_id].ending == ("length", None, 8)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_p": 0.9, "min_p": 0.05}])
def test_torch_draws_nothing_from_a_row_that_is_not_finite(bad: float, filters: dict[str, float]) -> None:
    logits = torch.randn(3, 40)
    logits[1, 17] = bad
    neutral = {"temperature": 0.8, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **filters}
    kinds = {"top_k": np.int32}
    params: dict[str, Any] = {name: np.full(3, value, kinds.get(name, np.float32)) for name, value in neutral.items()}
    first, broken, last = draw_rows(logits, RowSampling(**params, uniform=np.full(3, 0.5)))
    assert broken == -1 and 0 <= first < 40 and 0 <= last < 40
    logits[1] = -math.inf
    assert draw_rows(logits, RowSampling(**params, uniform=np.full(3, 0.5))) == [first, -1, last]


def test_a_token_outside_the_vocabulary_ends_its_request_with_what_was_right_before(
    reference: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = any_runner()
    argmax = runner.argmax
    drawn: Counter[int] = Counter()

    def sometimes(logits: torch.Tensor, rows: list[int]) -> list[int]:
        drawn[0] += 1
        return [VOCAB + 1515870810] * len(rows) if drawn[0] == 6 else argmax(logits, rows)

    monkeypatch.setattr(runner, "argmax", sometimes)
    found = decode([REQUESTS[2]], runner=runner, heads=heads_of(reference, hit_rate=1.0))["r2"]
    right = reference["r2"].tokens
    assert (found.last.finish_reason, found.last.error) == ("error", NOT_FINITE)
    assert found.sent_ids == right[: len(found.sent_ids)] and len(found.sent_ids) == 5


# What clients are told.


@pytest.mark.parametrize("where", ["step", "text"])
def test_the_words_of_an_exception_stay_in_the_log(where: str, caplog: pytest.LogCaptureFixture) -> None:
    runner = any_runner()

    class Breaks:
        def __getattr__(self, name: str) -> Any:
            return getattr(runner, name)

        def forward(self, batch: Any) -> torch.Tensor:
            raise RuntimeError(f"out of memory in {SECRET}")

    broken: Any = Breaks()
    core = make_core(runner=broken if where == "step" else runner)
    if where == "text":
        core.tokenizer = TokenizerThatFails()  # type: ignore[assignment]
    engine = Engine(core, INFO)
    served = EngineBackend("tiny", ServedModel(engine, FakeTokenizer()), Places(8))
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    with running_gateway(backends=Backends([served], frozenset(["tiny"]))) as live:
        plain = live.http.post("/v1/chat/completions", json=body)
        streamed = live.http.post("/v1/chat/completions", json={**body, "stream": True})
    engine.close()
    for answer in (plain, streamed):
        assert "zanzibar" not in answer.text and "RuntimeError" not in answer.text
        assert "the engine failed on this request" in answer.text
        assert answer.headers["x-request-id"] in caplog.text
    assert plain.status_code == 500
    assert (SECRET in caplog.text) == (where == "step"), "what a text raises may quote it"


class TokenizerThatFails:
    def detokenizer(self) -> Any:
        class Fails:
            def push(self, token_id: int) -> str:
                raise RuntimeError(f"no piece for {SECRET}")

        return Fails()
