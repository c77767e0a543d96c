"""The engine's thread and its streams: nothing leaks, nothing hangs, whoever leaves and whatever breaks."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from backends.engine import thread
from backends.engine.core import EngineCore
from backends.engine.thread import Engine, Generation
from backends.runners.batch import StepBatch
from backends.types import ENGINE_FAILED, DecodingPlan, EngineStopped, GenerationRequest, ModelInfo, TokenChunk
from tests.support.engine_helpers import (
    CONTEXT,
    VOCAB,
    ScriptedHeads,
    decode,
    make_core,
    random_prompt,
    request,
)

INFO = ModelInfo("tiny", CONTEXT, VOCAB, 4, "float32", "cpu")
PROMPT = (40, 50, 60, 70)
PATIENCE_S = 60.0
"""How long a test waits for what must come; only a failing test waits that long."""

MakeEngine = Callable[..., Engine]


@pytest.fixture
def engine_of() -> Iterator[MakeEngine]:
    """Engines that are closed when the test ends."""
    engines: list[Engine] = []

    def make(core: EngineCore | None = None, **options: Any) -> Engine:
        engines.append(Engine(core or make_core(), INFO, **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


async def read(handle: Generation) -> list[TokenChunk]:
    async with asyncio.timeout(PATIENCE_S):
        return [chunk async for chunk in handle]


def ids(chunks: Sequence[TokenChunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


def right_answer(each: GenerationRequest) -> list[int]:
    return decode([replace(each, plan=DecodingPlan(method="vanilla"))])[each.request_id].tokens


async def settled(engine: Engine) -> None:
    """Wait until the thread has taken in everything so far: a request after it has been answered."""
    await read(engine.submit(request("settled", PROMPT, max_tokens=1)))


class Gate:
    """Lets the test decide when a step may run, and makes the model fail on demand."""

    def __init__(self, core: EngineCore) -> None:
        self.fail = False
        self.permits = threading.Semaphore(0)
        self.entered = threading.Semaphore(0)
        self._step, self._runner = core.step, core.runner
        core.step = self.step  # type: ignore[method-assign]
        core.runner = self  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def step(self) -> list[tuple[str, TokenChunk]]:
        self.entered.release()
        assert self.permits.acquire(timeout=PATIENCE_S)
        return self._step()

    def forward(self, batch: StepBatch) -> torch.Tensor:
        if self.fail:
            raise RuntimeError("a broken step")
        return self._runner.forward(batch)

    def open(self, steps: int = 100_000) -> None:
        self.permits.release(steps)

    async def wait_entered(self) -> None:
        assert await asyncio.to_thread(self.entered.acquire, timeout=PATIENCE_S)


async def test_streams_are_right_and_end_with_statistics(engine_of: MakeEngine) -> None:
    rng = random.Random(1)
    asked = [request(f"r{i}", random_prompt(rng, 3, 30), max_tokens=15) for i in range(6)]
    engine = engine_of()
    found = await asyncio.gather(*(read(engine.submit(each)) for each in asked))
    for each, chunks in zip(asked, found, strict=True):
        assert ids(chunks) == right_answer(each)
        assert [chunk.finish_reason is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        assert chunks[-1].stats is not None
    assert engine.info is INFO
    assert engine.take_counters().keys() == {"tests"}
    assert engine.take_counters() == {}
    await settled(engine)
    assert (engine.load().running, engine.load().waiting, engine.load().kv_pages_used) == (0, 0, 0)


async def test_requests_from_several_loops(engine_of: MakeEngine) -> None:
    engine, asked = engine_of(), [request(f"r{i}", (50 + i, 60), max_tokens=12) for i in range(4)]

    async def one(each: GenerationRequest) -> list[TokenChunk]:
        return await read(engine.submit(each))

    found = await asyncio.gather(*(asyncio.to_thread(asyncio.run, one(each)) for each in asked))
    assert [ids(chunks) for chunks in found] == [right_answer(each) for each in asked]


class TestAbort:
    async def test_ends_the_stream_and_frees_the_pages(self, engine_of: MakeEngine) -> None:
        core = make_core()
        gate, engine = Gate(core), engine_of(core)
        handle = engine.submit(request("r", PROMPT, max_tokens=100, ignore_eos=True))
        gate.open(3)
        stream = aiter(handle)
        assert (await anext(stream)).finish_reason is None
        handle.abort()
        handle.abort()
        gate.open()
        last = [chunk async for chunk in stream][-1]
        assert last.finish_reason == "abort"
        await settled(engine)
        assert engine.load().kv_pages_used == 0

    async def test_before_the_engine_has_seen_the_request(self, engine_of: MakeEngine) -> None:
        core = make_core()
        gate, engine = Gate(core), engine_of(core)
        first = engine.submit(request("first", PROMPT, max_tokens=2))
        await gate.wait_entered()  # the thread is inside a step: what comes now waits for the next
        late = engine.submit(request("late", PROMPT, max_tokens=2))
        late.abort()
        gate.open()
        assert [chunk.finish_reason for chunk in await read(late)] == ["abort"]
        assert len(ids(await read(first))) == 2

    async def test_after_the_end_and_of_unknown_ids_is_harmless(self, engine_of: MakeEngine) -> None:
        engine = engine_of()
        handle = engine.submit(request("r", PROMPT, max_tokens=2))
        chunks = await read(handle)
        # The id is free again; the old handle, which nobody has aborted yet, has no power over its new owner.
        again = engine.submit(request("r", PROMPT, max_tokens=2))
        handle.abort()
        assert ids(await read(again)) == ids(chunks)

    async def test_from_another_thread(self, engine_of: MakeEngine) -> None:
        engine = engine_of()
        handle = engine.submit(request("r", PROMPT, max_tokens=150, ignore_eos=True))
        await asyncio.to_thread(handle.abort)
        assert (await read(handle))[-1].finish_reason in {"abort", "length"}

    async def test_an_id_in_use_is_refused(self, engine_of: MakeEngine) -> None:
        engine = engine_of()
        handle = engine.submit(request("r", PROMPT, max_tokens=100, ignore_eos=True))
        with pytest.raises(ValueError, match="already in use"):
            engine.submit(request("r", PROMPT))
        handle.abort()
        await read(handle)

    async def test_a_thousand_requests_cancelled_at_random_moments(self, engine_of: MakeEngine) -> None:
        """Must show 5 of the first issue: clean books, no page leaked, and the next answer right."""
        rng = random.Random(5)
        prompts = [(first, *random_prompt(rng, 0, 20)) for first in rng.sample(range(4, 98), 40)]
        answers = {prompt: right_answer(request("r", prompt, max_tokens=12)) for prompt in prompts}
        core = make_core(heads=ScriptedHeads(answers))
        engine = engine_of(core)

        async def one(i: int) -> str:
            prompt = rng.choice(prompts)
            plan = DecodingPlan(num_heads=4, max_nodes=8) if i % 2 else None
            handle = engine.submit(request(f"r{i}", prompt, plan, max_tokens=12))
            chunks_before_abort, chunks = rng.choice([0, 0, 1, 2, 3, 99]), []
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)
            if not chunks_before_abort:
                handle.abort()
            async with asyncio.timeout(PATIENCE_S):
                async for chunk in handle:
                    chunks.append(chunk)
                    if len(chunks) == chunks_before_abort:
                        handle.abort()
            reason = chunks[-1].finish_reason
            if reason != "abort":
                assert ids(chunks) == answers[prompt]
            else:
                assert answers[prompt][: len(ids(chunks))] == ids(chunks)
            return str(reason)

        reasons: list[str] = []
        for start in range(0, 1000, 50):
            reasons += await asyncio.gather(*(one(i) for i in range(start, start + 50)))
        assert reasons.count("abort") > 300
        assert len(reasons) - reasons.count("abort") > 100
        asked = request("next", prompts[0], max_tokens=12)
        assert ids(await read(engine.submit(asked))) == answers[prompts[0]]
        engine.close()
        core.check_integrity()
        assert (core.load().running, core.load().waiting, core.load().kv_pages_used) == (0, 0, 0)
        assert not engine._handles


class TestBreaking:
    async def test_a_request_that_can_never_run_ends_with_the_reason(self, engine_of: MakeEngine) -> None:
        engine = engine_of()
        [chunk] = await read(engine.submit(request("r", PROMPT, max_tokens=CONTEXT)))
        assert chunk.finish_reason == "error"
        assert "don't fit" in (chunk.error or "")
        assert len(ids(await read(engine.submit(request("r", PROMPT, max_tokens=2))))) == 2

    async def test_a_request_that_cannot_even_be_queued_harms_nobody(self, engine_of: MakeEngine) -> None:
        """Whatever a request's parts raise when the core takes it in, the thread lives on."""
        engine = engine_of()
        [chunk] = await read(engine.submit(request("r", PROMPT, logit_bias={2**70: 1.0})))
        assert chunk.finish_reason == "error"
        assert engine.alive
        assert len(ids(await read(engine.submit(request("next", PROMPT, max_tokens=2))))) == 2

    async def test_a_failing_step_ends_its_requests_and_the_engine_lives(self, engine_of: MakeEngine) -> None:
        core = make_core()
        gate, engine = Gate(core), engine_of(core)
        handles = [engine.submit(request(name, PROMPT, max_tokens=9)) for name in "ab"]
        gate.open(1)
        await gate.wait_entered()
        await gate.wait_entered()  # the second step has taken in both requests and waits
        gate.fail = True
        gate.open(1)
        for handle in handles:
            chunks = await read(handle)
            assert (chunks[-1].finish_reason, chunks[-1].error) == ("error", ENGINE_FAILED)
        gate.fail = False
        gate.open()
        await settled(engine)
        assert engine.alive
        assert engine.load().kv_pages_used == 0

    async def test_three_failing_steps_in_a_row_end_the_engine(self, engine_of: MakeEngine) -> None:
        core = make_core(max_running=1)
        gate = Gate(core)
        gate.fail = True
        gate.open()
        engine = engine_of(core)
        # One at a time is in a step; three of them break it, the others never get so far.
        handles = [engine.submit(request(f"r{i}", PROMPT)) for i in range(5)]
        reasons = [(await read(handle))[-1].finish_reason for handle in handles]
        assert reasons == ["error"] * 3 + ["abort"] * 2
        assert not engine.alive
        with pytest.raises(EngineStopped):
            engine.submit(request("late", PROMPT))

    async def test_failures_with_successes_between_them_do_not_add_up(self, engine_of: MakeEngine) -> None:
        core = make_core()
        gate, engine = Gate(core), engine_of(core)
        gate.open()
        for i in range(5):
            gate.fail = True
            assert (await read(engine.submit(request(f"bad{i}", PROMPT))))[-1].finish_reason == "error"
            gate.fail = False
            await settled(engine)
        assert engine.alive


class TestClosing:
    async def test_ends_what_runs_and_refuses_what_comes(self, engine_of: MakeEngine) -> None:
        engine = engine_of(make_core(max_running=1))
        handles = [engine.submit(request(f"r{i}", PROMPT, max_tokens=180, ignore_eos=True)) for i in range(3)]
        await anext(aiter(handles[0]))
        await asyncio.to_thread(engine.close)
        assert (await read(handles[1]))[-1].finish_reason == "abort"
        assert (await read(handles[2]))[-1].finish_reason == "abort"
        assert not engine.alive
        with pytest.raises(EngineStopped):
            engine.submit(request("late", PROMPT))
        engine.close()

    async def test_an_idle_engine_closes_at_once(self, engine_of: MakeEngine) -> None:
        engine = engine_of()
        await asyncio.wait_for(asyncio.to_thread(engine.close), PATIENCE_S)
        assert not engine.alive

    async def test_books_are_clean_after_closing_in_the_middle(self, engine_of: MakeEngine) -> None:
        core = make_core()
        engine = engine_of(core)
        handle = engine.submit(request("r", PROMPT, max_tokens=180, ignore_eos=True))
        await anext(aiter(handle))
        await asyncio.to_thread(engine.close)
        core.check_integrity()
        assert engine.load().running == 0
        assert core.load().kv_pages_used == 0


def test_a_loop_that_closes_while_its_requests_run_leaves_nothing(engine_of: MakeEngine) -> None:
    core = make_core()
    gate, engine = Gate(core), engine_of(core)

    async def leave() -> None:
        engine.submit(request("orphan", PROMPT, max_tokens=150, ignore_eos=True))
        engine.submit(request("orphan too", PROMPT, max_tokens=150, ignore_eos=True))
        await gate.wait_entered()

    asyncio.run(leave())
    gate.open()
    asked = request("next", PROMPT, max_tokens=6)

    async def next_answer() -> list[TokenChunk]:
        chunks = await read(engine.submit(asked))
        await settled(engine)
        return chunks

    assert ids(asyncio.run(next_answer())) == right_answer(asked)
    assert engine.load().running == 0, "nobody listens, but the engine still decodes"
    assert not engine._handles, "handles of the closed loop are kept for ever"

    async def same_id() -> list[TokenChunk]:
        return await read(engine.submit(request("orphan", PROMPT, max_tokens=2)))

    assert len(ids(asyncio.run(same_id()))) == 2


class IdleWork:
    """Stands in for measuring in idle moments: the test says how long a run takes."""

    def __init__(self, core: EngineCore, runs: int) -> None:
        self.cost, self.better = core.cost, replace(core.cost, guessed=())
        self.begun, self.permits = threading.Semaphore(0), threading.Semaphore(0)
        self.left, self.busy_with = runs, list[bool]()
        self._core = core

    def step(self) -> bool:
        self.begun.release()
        assert self.permits.acquire(timeout=PATIENCE_S)
        self.busy_with.append(self._core.has_work)
        self.left -= 1
        if not self.left:
            self.cost = self.better
        return self.left > 0


async def test_idle_moments_are_used_and_a_request_waits_for_one_run_at_most(
    engine_of: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thread, "_IDLE_AFTER_S", 0.0)
    core = make_core()
    idle = IdleWork(core, runs=3)
    engine = engine_of(core, idle=idle)
    assert await asyncio.to_thread(idle.begun.acquire, timeout=PATIENCE_S)
    handle = engine.submit(request("early", PROMPT, max_tokens=8))
    idle.permits.release()  # the run that was in progress, and no other
    assert len(ids(await read(handle))) == 8
    idle.permits.release(2)
    for _ in range(2):
        assert await asyncio.to_thread(idle.begun.acquire, timeout=PATIENCE_S)
    await settled(engine)
    assert idle.busy_with == [False] * 3, "never while somebody is answered"
    assert core.cost is idle.better and core.drafting._cost is idle.better and core.accounting.cost is idle.better


async def test_measuring_that_breaks_breaks_nothing_else(
    engine_of: MakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried = threading.Semaphore(0)

    class Broken:
        def step(self) -> bool:
            tried.release()
            raise RuntimeError("out of memory")

    monkeypatch.setattr(thread, "_IDLE_AFTER_S", 0.0)
    engine = engine_of(idle=Broken())
    assert await asyncio.to_thread(tried.acquire, timeout=PATIENCE_S)
    for number in range(2):
        assert len(ids(await read(engine.submit(request(f"r{number}", PROMPT, max_tokens=4))))) == 4
    assert engine.alive
    engine.close()
    assert caplog.text.count("what is guessed stays guessed") == 1
