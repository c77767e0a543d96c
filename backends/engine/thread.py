"""The engine's thread, and the asyncio streams that lead out of it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import torch

from backends.cost.idle import IdleMeasuring
from backends.cost.persistence import CostKeeping
from backends.devices import Nvml
from backends.engine.core import Emission, EngineCore
from backends.engine.cuda import shortage
from backends.engine.kv_cache import IntegrityError
from backends.types import (
    ENGINE_FAILED,
    DecodeCounters,
    DeviceReading,
    EngineLoad,
    EngineStopped,
    GenerationRequest,
    ModelInfo,
    PrefillBudget,
    RequestRefused,
    StepSample,
    TokenChunk,
)

log = logging.getLogger(__name__)

# A step that breaks ends the requests in it; an engine that breaks this often in a row is not worth keeping.
_STEPS_TO_DIE = 3
_IDLE_AFTER_S = 1.0
"""How long nobody must have asked for anything before idle moments are used. Requests often come close together."""


class Generation:
    """See :class:`backends.types.GenerationHandle`."""

    def __init__(self, engine: Engine, request_id: str, loop: asyncio.AbstractEventLoop) -> None:
        self.request_id = request_id
        self.loop = loop
        self._engine = engine
        self._chunks: asyncio.Queue[TokenChunk] = asyncio.Queue()
        self._closed = False

    def put(self, chunk: TokenChunk) -> None:
        """Deliver a chunk; called in the handle's own loop."""
        self._chunks.put_nowait(chunk)

    async def __aiter__(self) -> AsyncIterator[TokenChunk]:
        while True:
            chunk = await self._chunks.get()
            yield chunk
            if chunk.finish_reason is not None:
                return

    def abort(self) -> None:
        if not self._closed:
            self._closed = True
            self._engine.abort(self)


@dataclass(slots=True)
class _Inbox:
    """What other threads have asked for since the last step. Guarded by ``changed``."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    added: deque[GenerationRequest] = field(default_factory=deque)
    aborted: deque[Generation] = field(default_factory=deque)
    stopping: bool = False


class Engine:
    """Runs an :class:`EngineCore` in a thread of its own. See :class:`backends.types.Decoder`.

    An exception in a step ends the requests of that step with reason "error"; three in a row end the engine.
    ``idle``: what is still to be measured, when nobody waits. ``device``: the accelerator that it runs on.
    """

    def __init__(
        self,
        core: EngineCore,
        info: ModelInfo,
        *,
        keeping: CostKeeping | None = None,
        idle: IdleMeasuring | None = None,
        device: Nvml | None = None,
    ) -> None:
        self._core, self._device = core, device
        self._info = info
        self._keeping = keeping
        self._idle = idle
        self._inbox = _Inbox()
        self._handles: dict[str, Generation] = {}
        self._load = core.load()
        self._alive = True
        self._thread = threading.Thread(target=self._run, name="medusa-engine", daemon=True)
        self._thread.start()

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def alive(self) -> bool:
        return self._alive

    def submit(self, request: GenerationRequest) -> Generation:
        handle = Generation(self, request.request_id, asyncio.get_running_loop())
        with self._inbox.changed:
            if not self._alive or self._inbox.stopping:
                raise EngineStopped("the engine is not running")
            if request.request_id in self._handles:
                raise ValueError(f"request id {request.request_id!r} is already in use")
            self._handles[request.request_id] = handle
            self._inbox.added.append(request)
            self._inbox.changed.notify()
        return handle

    def abort(self, handle: Generation) -> None:
        """Free a request's pages before the next step; its stream ends with reason "abort". Harmless if it is over."""
        with self._inbox.changed:
            if self._handles.get(handle.request_id) is handle:
                self._inbox.aborted.append(handle)
                self._inbox.changed.notify()

    def load(self) -> EngineLoad:
        return self._load

    def take_counters(self) -> dict[str, DecodeCounters]:
        return self._core.accounting.counters.take()

    def take_steps(self) -> list[StepSample]:
        samples = self._core.accounting.samples
        return [samples.popleft() for _ in range(len(samples))]

    def optional_failures(self) -> dict[str, int]:
        """How often parts that the engine can do without have failed, see :mod:`backends.engine.optional_parts`."""
        return self._core.optional.failures()

    def device_reading(self) -> DeviceReading | None:
        return None if self._device is None else self._device.read()

    def step_cost(self) -> dict[str, Any]:
        cost = self._core.cost
        return {
            "rows_ms": {str(rows): round(ms, 3) for rows, ms in cost.rows},
            "heads_ms": {str(sequences): round(ms, 3) for sequences, ms in cost.heads},
            "guessed_rows": list(cost.guessed),
        }

    def use_prefill(self, budget: PrefillBudget) -> None:
        self._core.scheduler.prefill = budget

    def keep_cost(self) -> bool:
        return self._keeping is not None and self._keeping.refine(self._core.accounting.calibration.learned())

    def close(self) -> None:
        with self._inbox.changed:
            self._inbox.stopping = True
            self._inbox.changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        failures = 0
        try:
            while self._take_orders():
                try:
                    emissions = self._core.step()
                    failures = 0
                except Exception as error:
                    failures += 1
                    if isinstance(error, torch.OutOfMemoryError):
                        log.error("%s", shortage(error, self._core.runner.device, "a step"))
                    # The words are for the log only: they may tell paths, addresses or numbers of the device.
                    log.exception("a step failed; these requests end with an error: %s", self._core.in_step)
                    emissions = self._core.fail_step(ENGINE_FAILED)
                # Before anybody can know that an answer is over.
                self._load = self._core.load()
                self._deliver(emissions)
                if failures >= _STEPS_TO_DIE:
                    log.critical("%d steps failed in a row; the engine stops", failures)
                    return
                if not self._core.has_work:
                    self._check_books()
        finally:
            self._stop()

    def _check_books(self) -> None:
        """Nothing runs: every page must be back. An engine that has lost one still answers, until they run out."""
        try:
            self._core.check_integrity()
        except IntegrityError as error:
            log.critical("the engine is idle, and its pages don't add up, which is a bug: %s", error)

    def _take_orders(self) -> bool:
        """Wait for work and take in what was asked; False when it is time to stop."""
        if not self._core.has_work:
            self._wait()
        with self._inbox.changed:
            if self._inbox.stopping:
                return False
            added, self._inbox.added = self._inbox.added, deque()
            aborted, self._inbox.aborted = self._inbox.aborted, deque()
        refused: list[Emission] = []
        for request in added:
            try:
                self._core.add(request)
            except RequestRefused as error:
                log.warning("request %s is refused: %s", request.request_id, error)
                refused.append((request.request_id, TokenChunk(text="", finish_reason="error", error=str(error))))
            except Exception:  # one bad request must not end the thread
                log.exception("request %s can't be taken in", request.request_id)
                refused.append((request.request_id, TokenChunk(text="", finish_reason="error", error=ENGINE_FAILED)))
        for handle in aborted:
            # Its request may be over by now, and the id another's.
            if self._handles.get(handle.request_id) is handle:
                self._core.abort(handle.request_id)
                refused.append((handle.request_id, TokenChunk(text="", finish_reason="abort")))
        self._load = self._core.load()
        self._deliver(refused)
        return True

    def _wait(self) -> None:
        """Until something is asked for, and use the time."""
        inbox, patience_s = self._inbox, _IDLE_AFTER_S
        while True:
            with inbox.changed:
                asked = inbox.changed.wait_for(
                    lambda: inbox.added or inbox.aborted or inbox.stopping, None if self._idle is None else patience_s
                )
            if asked:
                return
            patience_s = 0.0
            self._measure_one()

    def _measure_one(self) -> None:
        """One short run of what was guessed at the start. Decisions get better by it; nobody's answer hangs on it."""
        idle = self._idle
        if idle is None:
            return
        try:
            left = idle.step()
        except Exception:
            log.exception("measuring what steps cost in an idle moment failed; what is guessed stays guessed")
            self._idle = None
            return
        if idle.cost is not self._core.cost:
            self._core.use_cost(idle.cost)
            if not left and self._keeping is not None:
                self._keeping.improve(idle.cost)
        if not left:
            self._idle = None

    def _deliver(self, emissions: list[Emission]) -> None:
        """One wake-up a loop, however many chunks."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Generation, TokenChunk]]] = {}
        with self._inbox.changed:
            for request_id, chunk in emissions:
                handle = self._handles.get(request_id)
                if handle is None:
                    continue
                if chunk.finish_reason is not None:
                    del self._handles[request_id]
                by_loop.setdefault(handle.loop, []).append((handle, chunk))
        for loop, chunks in by_loop.items():
            try:
                loop.call_soon_threadsafe(_put_all, chunks)
            except RuntimeError:  # the loop is closed: nobody listens any more
                with self._inbox.changed:
                    for handle, _ in chunks:
                        self._core.abort(handle.request_id)
                        if self._handles.get(handle.request_id) is handle:
                            del self._handles[handle.request_id]

    def _stop(self) -> None:
        with self._inbox.changed:
            self._alive = False
            left = list(self._handles)
        try:
            for request_id in left:
                self._core.abort(request_id)
            self._load = self._core.load()
        finally:
            self._deliver([(request_id, TokenChunk(text="", finish_reason="abort")) for request_id in left])


def _put_all(chunks: list[tuple[Generation, TokenChunk]]) -> None:
    for handle, chunk in chunks:
        handle.put(chunk)
