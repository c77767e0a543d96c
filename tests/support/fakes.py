"""Stand-ins with real behaviour for the engine and the tokenizer: no model, no torch, always the same answers.

The answer depends on the prompt, the seed (unless greedy) and the position, never on the plan: a fake that is lossless.
Sequences can be held, failed and counted, so that tests wait for events instead of sleeping.
"""

from __future__ import annotations

import asyncio
import codecs
import hashlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from backends.types import (
    DecodeCounters,
    DecodingPlan,
    DeviceReading,
    EngineLoad,
    EngineStopped,
    FinishReason,
    GenerationRequest,
    GenerationStats,
    ModelInfo,
    PositionLogprobs,
    PromptScore,
    SamplingParams,
    StepSample,
    StepTrace,
    TokenChunk,
    TokenLogprob,
    TracedToken,
)
from policy.statistics.counters import add_counters

EOS = 256
ROLE_IDS = {"system": 257, "user": 258, "assistant": 259, "tool": 258}
VOCAB_SIZE = 260
WORDS = ("the", "a", "cat", "dog", "runs", "over", "lazy", "quick", "fox", "été", "naïve", "jumps", "🙂", "far", "away")
PATIENCE_S = 60.0
"""How long a test waits for an event that must come; only a failing test waits that long."""


class FakeTokenizer:
    """One token per UTF-8 byte, and one per role in a chat. Its template reads messages only."""

    chat_template = None
    template_variables = frozenset[str]()

    def __init__(self) -> None:
        self.threads: list[int] = []

    def id_of(self, token: str) -> int | None:
        return None

    def encode(self, text: str, most_tokens: int | None = None) -> list[int]:
        self.threads.append(threading.get_ident())
        return list(text.encode("utf-8"))

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        most_tokens: int | None = None,
        variables: Mapping[str, Any] | None = None,
        *,
        continues: bool = False,
    ) -> list[int]:
        """A template that, like some real ones, takes a system message only at the start."""
        ids: list[int] = []
        for position, message in enumerate(messages):
            if message["role"] == "system" and position > 0:
                raise ValueError("a system message must come first")
            ids += [ROLE_IDS[message["role"]], *self.encode(message["content"])]
        return ids if continues else [*ids, ROLE_IDS["assistant"]]

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token for token in token_ids if token < EOS).decode("utf-8", errors="replace")

    def texts(self, token_ids: Sequence[int], others: Sequence[Sequence[int]]) -> list[list[tuple[str, bytes]]]:
        return [
            [(self.decode([each]), bytes([each])) for each in (token, *instead)]
            for token, instead in zip(token_ids, others, strict=True)
        ]


def _digest(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big")


def answer_tokens(prompt: tuple[int, ...], sampling: SamplingParams, natural_length: int) -> list[int]:
    """All tokens of an answer, the end token included if it comes to that. What the tests compare with."""
    key = (prompt, 0 if sampling.greedy else sampling.seed)
    text = ""
    while len(text) < sampling.max_tokens:
        text += WORDS[_digest(key, len(text)) % len(WORDS)] + " "
    tokens = list(text.encode("utf-8"))
    if not sampling.ignore_eos:
        tokens = [*tokens[: max(natural_length, sampling.min_tokens)], EOS]
    favourite = max(sampling.logit_bias, key=lambda token: sampling.logit_bias[token], default=None)
    if favourite is not None and sampling.logit_bias[favourite] >= 50:
        tokens = [favourite] * sampling.max_tokens
    banned = {token for token, bias in sampling.logit_bias.items() if bias <= -50}
    return [ord("_") if token in banned else token for token in tokens][: sampling.max_tokens]


def scores_of(request: GenerationRequest) -> tuple[PromptScore, ...]:
    """Made-up as :func:`logprobs_of` makes them up."""
    found = (logprobs_of(token, request.sampling.logprobs or 0) for token in request.prompt_token_ids[1:])
    return tuple(
        PromptScore(each.chosen.logprob, tuple((top.token_id, top.logprob) for top in each.top)) for each in found
    )


def logprobs_of(token_id: int, wanted: int) -> PositionLogprobs:
    """Made-up, but consistent: the chosen token is the likeliest, its neighbours in the vocabulary come next."""

    def entry(token: int, rank: int) -> TokenLogprob:
        raw = bytes([token]) if token < EOS else b""
        return TokenLogprob(token, raw.decode("utf-8", errors="replace"), -0.25 * (rank + 1), raw)

    return PositionLogprobs(
        entry(token_id, 0), tuple(entry((token_id + rank) % VOCAB_SIZE, rank) for rank in range(wanted))
    )


class FakeHandle:
    """One sequence. Steps happen when the consumer asks for them."""

    def __init__(self, decoder: FakeDecoder, request: GenerationRequest) -> None:
        self.request = request
        self.aborted = False
        self.finished: FinishReason | None = None
        self._decoder = decoder
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._started = decoder.clock()

    def abort(self) -> None:
        if self.finished is None and not self.aborted:
            self.aborted = True
            self._decoder.note_abort(self)
            self.wake()

    def wake(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake.set)

    async def __aiter__(self) -> AsyncIterator[TokenChunk]:
        decoder, request = self._decoder, self.request
        writer = _TextWriter(request.sampling)
        tokens = answer_tokens(request.prompt_token_ids, request.sampling, decoder.natural_length)
        per_step = decoder.tokens_per_step(request.plan)
        position = steps = 0
        first_token_at: float | None = None
        reason: FinishReason | None = None
        scored = False
        while reason is None:
            await asyncio.sleep(decoder.step_s)
            while decoder.holds(steps) and not self.aborted:
                self._wake.clear()
                await self._wake.wait()
            if self.aborted:
                reason = "abort"
            elif decoder.fails(steps):
                reason = "error"
            elif request.deadline_s is not None and decoder.clock() - self._started >= request.deadline_s:
                reason = "deadline"
            else:
                steps += 1
                step = tokens[position : position + per_step]
                position += len(step)
                decoder.count(request.stats_key, _step_counters(request.plan, per_step, len(step)))
                reason = writer.take(step)
                if first_token_at is None:
                    first_token_at = decoder.clock()
            if reason in ("abort", "error"):
                writer.drop()
            chunk = writer.chunk(final=reason is not None)
            if request.sampling.prompt_logprobs and not scored:
                chunk = replace(chunk, prompt_scores=scores_of(request))
                scored = True
            if reason is not None:
                self.finished = reason
                drafted = steps * (per_step - 1) * 2
                stats = GenerationStats(
                    method=request.plan.method,
                    num_heads=request.plan.num_heads,
                    max_nodes=len(request.plan.tree or ()) or request.plan.max_nodes,
                    steps=steps,
                    medusa_steps=steps if request.plan.method == "medusa" else 0,
                    drafted_tokens=drafted,
                    accepted_draft_tokens=max(chunk.num_tokens - steps, 0),
                    emitted_tokens=chunk.num_tokens,
                    speedup_estimate=1.0 + 0.5 * (per_step - 1),
                    saved_s=0.01 * (chunk.num_tokens - steps),
                    acceptance=request.plan.acceptance,
                    admitted_at=self._started,
                    first_token_at=first_token_at,
                    finished_at=decoder.clock(),
                )
                error = "the fake was told to fail" if reason == "error" else None
                chunk = replace(chunk, finish_reason=reason, stats=stats, error=error)
                decoder.note_finished(self)
            if request.trace and (ids := chunk.token_ids):
                chunk = replace(chunk, trace=(_trace(steps, ids, per_step, writer.length),))
            if chunk.text or chunk.token_ids or chunk.finish_reason:
                yield chunk


def _trace(step: int, ids: tuple[int, ...], per_step: int, length: int) -> StepTrace:
    """All but the last were guessed by heads; every token's text is said to end where the step's does."""
    guessed = [TracedToken(token, length, f"head {depth}", depth, 0.5) for depth, token in enumerate(ids[:-1], 1)]
    return StepTrace(step, 1 + 2 * (per_step - 1), 2 * (per_step - 1), 10.0, (*guessed, TracedToken(ids[-1], length)))


def _step_counters(plan: DecodingPlan, per_step: int, emitted: int) -> DecodeCounters:
    """A step of 10 ms whatever its rows, so that speculation always pays."""
    vanilla = plan.method == "vanilla"
    return DecodeCounters(
        steps=1,
        medusa_steps=not vanilla,
        rows=per_step,
        emitted_tokens=emitted,
        drafted_tokens=per_step - 1,
        accepted_tokens=max(emitted - 1, 0),
        vanilla_us=10_000 * emitted,
        spent_us=10_000,
        measured_us=10_000,
        control_steps=vanilla,
        control_tokens=emitted if vanilla else 0,
        control_vanilla_us=10_000 if vanilla else 0,
        control_measured_us=10_000 if vanilla else 0,
        attempts=[] if vanilla else [1] * emitted,
        hits=[] if vanilla else [[int(head < per_step - 1)] for head in range(emitted)],
    )


class _TextWriter:
    """Detokenises, holds back what may become a stop string, and cuts at stops."""

    def __init__(self, sampling: SamplingParams) -> None:
        self._sampling = sampling
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._text = ""
        self._shown = 0
        self._end: int | None = None
        self._count = 0
        self._new: list[int] = []
        self._stop_match: str | int | None = None

    def take(self, step: list[int]) -> FinishReason | None:
        sampling = self._sampling
        for token in step:
            self._count += 1
            if token == EOS or token in sampling.stop_token_ids:
                self._stop_match = token
                return "stop"
            self._new.append(token)
            self._text += self._decoder.decode(bytes([token]) if token < EOS else b"")
            if self._count >= sampling.min_tokens:
                found = [(at, stop) for stop in sampling.stop if (at := self._text.find(stop)) >= 0]
                if found:
                    self._end, self._stop_match = min(found)
                    return "stop"
            if self._count >= sampling.max_tokens:
                return "length"
        return None if step else "stop"

    @property
    def length(self) -> int:
        return len(self._text) if self._end is None else self._end

    def drop(self) -> None:
        self._new = []

    def chunk(self, *, final: bool) -> TokenChunk:
        end = len(self._text) if self._end is None else self._end
        if not final:
            end -= max((n for stop in self._sampling.stop for n in _overlaps(self._text, stop)), default=0)
        text = self._text[self._shown : max(end, self._shown)]
        self._shown += len(text)
        ids, self._new = tuple(self._new), []
        wanted = self._sampling.logprobs
        logprobs = () if wanted is None else tuple(logprobs_of(token, wanted) for token in ids)
        return TokenChunk(text, ids, logprobs, self._count, stop_match=self._stop_match if final else None)


def _overlaps(text: str, stop: str) -> list[int]:
    return [n for n in range(1, len(stop)) if text.endswith(stop[:n])]


@dataclass
class Holding:
    """Where sequences wait: before the step with this index."""

    at_step: int


class FakeDecoder:
    """A decoder that runs :func:`answer_tokens`. Thread-safe where tests and the server's loop meet."""

    def __init__(
        self,
        *,
        name: str = "fake-model",
        num_heads: int = 4,
        max_model_len: int = 512,
        natural_length: int = 40,
        max_running: int = 8,
        clock: Callable[[], float] = time.monotonic,
        step_s: float = 0.0,
    ) -> None:
        self.natural_length = natural_length
        self.step_s = step_s
        self.clock = clock
        self.submitted: list[GenerationRequest] = []
        self.aborted: list[str] = []
        self.finished: list[str] = []
        self._info = ModelInfo(
            name, max_model_len, VOCAB_SIZE, num_heads, "float32", "cpu", created=1_700_000_000, heads_stale=False
        )
        self._max_running = max_running
        self._changed = threading.Condition()
        self._running: set[FakeHandle] = set()
        self._holding: Holding | None = None
        self._fail_at: int | None = None
        self._alive = True
        self._counters: dict[str, DecodeCounters] = {}
        self._steps: list[StepSample] = []

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def alive(self) -> bool:
        return self._alive

    def tokens_per_step(self, plan: DecodingPlan) -> int:
        return 1 if plan.method == "vanilla" else min(3, 1 + plan.num_heads)

    def submit(self, request: GenerationRequest) -> FakeHandle:
        with self._changed:
            if not self._alive:
                raise EngineStopped("the fake engine is closed")
            handle = FakeHandle(self, request)
            self.submitted.append(request)
            self._running.add(handle)
            self._changed.notify_all()
        return handle

    def load(self) -> EngineLoad:
        running = len(self._running)
        return EngineLoad(
            min(running, self._max_running), max(running - self._max_running, 0), running, 64, self._max_running
        )

    def take_counters(self) -> dict[str, DecodeCounters]:
        with self._changed:
            taken, self._counters = self._counters, {}
        return taken

    def take_steps(self) -> list[StepSample]:
        with self._changed:
            taken, self._steps = self._steps, []
        return taken

    def optional_failures(self) -> dict[str, int]:
        return {"heads": 0}

    def device_reading(self) -> DeviceReading:
        return DeviceReading(memory_used=20 << 30, memory_total=80 << 30, utilization=0.5, power_w=300.0)

    def count(self, key: str, counters: DecodeCounters) -> None:
        """Add to the counters that the next :meth:`take_counters` gives; tests may do so as well."""
        with self._changed:
            add_counters(self._counters.setdefault(key, DecodeCounters()), counters)
            kind = "verification" if counters.medusa_steps else "vanilla"
            self._steps.append(StepSample(kind, counters.rows, counters.measured_us / 1e6, 0.010))

    def close(self) -> None:
        self._alive = False
        for handle in list(self._running):
            handle.abort()

    def check_integrity(self) -> None:
        """Raises AssertionError if a sequence was left behind."""
        assert not self._running, f"{len(self._running)} sequences were left behind"

    def note_abort(self, handle: FakeHandle) -> None:
        # An engine frees an aborted sequence whether or not anybody still reads from it.
        with self._changed:
            self.aborted.append(handle.request.request_id)
            self._running.discard(handle)
            self._changed.notify_all()

    def note_finished(self, handle: FakeHandle) -> None:
        with self._changed:
            self._running.discard(handle)
            self.finished.append(handle.request.request_id)
            self._changed.notify_all()

    # What tests do to it.

    def hold(self, *, at_step: int = 0) -> None:
        """Make every sequence wait before its step ``at_step`` (0: before the first) until :meth:`release`."""
        self._holding = Holding(at_step)

    def release(self) -> None:
        self._holding = None
        for handle in list(self._running):
            handle.wake()

    def holds(self, step: int) -> bool:
        return self._holding is not None and step >= self._holding.at_step

    def fail(self, *, at_step: int | None) -> None:
        """Make every sequence end with reason "error" at its step ``at_step``; None switches that off."""
        self._fail_at = at_step

    def fails(self, step: int) -> bool:
        return self._fail_at is not None and step >= self._fail_at

    def die(self) -> None:
        """The engine thread is gone: not alive, takes nothing."""
        self._alive = False

    def revive(self) -> None:
        self._alive = True

    def wait_until(self, condition: Callable[[FakeDecoder], bool]) -> None:
        """Block the calling (test) thread until ``condition`` holds, woken by each change of the fake."""
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self), PATIENCE_S), "the fake never got there"
