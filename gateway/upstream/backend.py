"""One upstream while the gateway runs: its client, its circuit breaker, its health, and what was counted of it."""

from __future__ import annotations

import asyncio
import logging
import math
import ssl
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from backends.types import ModelInfo
from gateway.admission import Places
from gateway.routing import circuit_breaker as circuit
from gateway.routing.choice import Candidate
from gateway.routing.spec import UpstreamSpec
from gateway.upstream.api_key import ApiKeyError, read_api_key
from gateway.upstream.engine_watch import EngineWatch
from gateway.upstream.errors import OUTCOMES, UpstreamBusy, UpstreamFailure, outcome_of
from gateway.upstream.payload import what_it_lacks
from gateway.wire.errors import APIError
from gateway.wire.hops import HOPS_HEADER, MAX_HOPS
from gateway.wire.requests import INT32_MAX, GenerationFields
from policy.background import PatientCall, cancel_and_wait, pause
from policy.records import EventKind
from telemetry.words import transport_words

logger = logging.getLogger("gateway.upstream")

_SLICES = 10
"""A check's time is waited for in slices: a loop that is held up once takes that for no silence of the upstream's."""
SUSPECT_S = 5.0
_MOST_HEALTH_BYTES = 1024 * 1024

Note = Callable[[EventKind, str, str, dict[str, Any]], None]
"""Told of a backend's changes: kind, message, model, values."""


@dataclass(slots=True)
class Health:
    """``ok`` None: not checked yet, which counts as well. ``since``: monotonic, when ``ok`` last changed."""

    ok: bool | None = None
    since: float = 0.0
    failures: int = 0
    error: str | None = None
    max_model_len: int | None = None


class _ModelEntry(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _ModelList(msgspec.Struct):
    data: list[_ModelEntry]


class UpstreamBackend:
    """Used from one event loop only. :meth:`start` and :meth:`stop` are called by the app.

    ``transport`` is for tests.
    """

    kind = "openai"

    def __init__(
        self,
        spec: UpstreamSpec,
        *,
        clock: Callable[[], float] = time.monotonic,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.spec = spec
        self.clock = clock
        self.places = Places(spec.max_in_flight)
        self._note: Note | None = None
        # Wide open limits: what the upstream's tokenizer and context allow, only the upstream knows.
        self.info = ModelInfo(spec.serves, INT32_MAX, INT32_MAX, 0, "unknown", "remote")
        self.health = Health(since=clock())
        self.counts: Counter[str] = Counter()
        # From zero, so that the first failure is an increase and not a new series.
        self.outcomes: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
        self.last_error: str | None = None
        self._breaker = circuit.Breaker(spec.breaker)
        self._busy_until = 0.0
        self._heard_at = -math.inf
        self._failed_at = -math.inf
        self._key = read_api_key(spec)
        self._read_key = PatientCall(lambda: read_api_key(spec), clock=clock)
        self._transport = transport
        self._client: httpx.AsyncClient | None = None
        self._running: list[asyncio.Task[None]] = []
        self._watch = EngineWatch(spec.name, spec.url, spec.metrics, clock) if spec.metrics else None

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def model(self) -> str:
        return self.spec.serves

    @property
    def max_running(self) -> int:
        return self.spec.max_running

    @property
    def healthy(self) -> bool:
        """Nothing that is known speaks against asking it."""
        return self._down() is None

    @property
    def breaker(self) -> circuit.Breaker:
        return self._breaker

    @property
    def client(self) -> httpx.AsyncClient:
        assert self._client is not None, "the backend was not started"
        return self._client

    def headers(self) -> dict[str, str]:
        return {} if self._key is None else {"authorization": f"Bearer {self._key}"}

    @property
    def max_model_len(self) -> int | None:
        """What the upstream says of its own; None: nothing."""
        return self.health.max_model_len

    def lacking(self, body: GenerationFields) -> tuple[str, ...]:
        """Names of the fields of ``body`` that it does not honour."""
        return what_it_lacks(body, self.spec.dialect, self.spec.variant)

    def candidate(self, body: GenerationFields, hops: int = 0) -> Candidate:
        """As ``body``, which came through ``hops`` gateways, sees it."""
        lacking = self.lacking(body)
        lacks = f"can't do {', '.join(lacking)}" if lacking else None
        if hops >= MAX_HOPS:
            lacks = f"is one gateway too many: {HOPS_HEADER} is {hops} already"
        return Candidate(
            self.name,
            load=self.occupied / self.spec.max_running,
            free=self.places.free,
            priority=self.spec.placement.priority,
            classes=self.spec.placement.classes,
            down=self._down(),
            lacks=lacks,
            busy=self.clock() < self._busy_until,
            arm="" if self.spec.variant is None else self.spec.variant.name,
        )

    @property
    def occupied(self) -> float:
        """Sequences that it holds: ours, or all, where it tells and there are others."""
        told = None if self._watch is None else self._watch.occupied
        return max(self.places.in_flight, told or 0.0)

    def engine_report(self) -> dict[str, Any] | None:
        """What it says of itself lately; None where that is not read."""
        return None if self._watch is None else self._watch.report()

    @property
    def suspect(self) -> bool:
        """Its last request failed by its own fault, a moment ago: others of its model come first."""
        return self.clock() - self._failed_at < SUSPECT_S

    @property
    def retry_after_s(self) -> float:
        return self._breaker.retry_after_s(self.clock())

    # What requests report.

    def begin(self) -> circuit.Permit:
        """A request goes out. Raises :class:`UpstreamFailure` when the breaker lets none pass."""
        if not self._breaker.allows(self.clock()):
            raise UpstreamFailure(f"The backend '{self.name}' is being left alone after failures.")
        self.counts["requests"] += 1
        self._breaker, permit = circuit.started(self._breaker, self.clock())
        return permit

    def heard(self) -> None:
        """A piece of some answer came."""
        self._heard_at = self.clock()

    def answering(self, permit: circuit.Permit) -> None:
        self._change(circuit.answering(self._breaker, permit))

    def complete(self, permit: circuit.Permit) -> None:
        self._failed_at = -math.inf
        self.counts["completed"] += 1
        self.outcomes["completed"] += 1
        self._change(circuit.completed(self._breaker, permit))

    def fail(self, permit: circuit.Permit, error: APIError, internal: str) -> None:
        """``internal``: what the operator may know beyond what the client is told."""
        self.counts[error.code or "error"] += 1
        self.outcomes[outcome_of(error)] += 1
        self.last_error = f"{error.message} ({internal})" if internal else error.message
        if isinstance(error, UpstreamBusy):
            self._busy_until = self.clock() + float(error.headers["retry-after"])
        if isinstance(error, UpstreamFailure) and error.at_fault:
            logger.warning("backend %s: %s", self.name, self.last_error)
            self._failed_at = self.clock()
            self._change(circuit.failed(self._breaker, permit, self.clock()))
        else:
            # A refusal, too, is the answer of a server that is well.
            self._change(circuit.completed(circuit.answering(self._breaker, permit), permit))

    def abandon(self, permit: circuit.Permit) -> None:
        self.counts["abandoned"] += 1
        self.outcomes["abandoned"] += 1
        self._change(circuit.abandoned(self._breaker, permit))

    def _change(self, breaker: circuit.Breaker) -> None:
        was, self._breaker = self._breaker, breaker
        if breaker.tripped and breaker.term != was.term:
            message = f"circuit open for {breaker.opens_for_s:g} s: {self.last_error}"
            logger.error("backend %s: %s", self.name, message)
            if not was.tripped:
                self._tell("backend_down", message)
        elif was.tripped and not breaker.tripped:
            logger.warning("backend %s answers again", self.name)
            self._tell("backend_up", "answers again: circuit closed")

    def _tell(self, kind: EventKind, what: str) -> None:
        if self._note is not None:
            self._note(kind, f"backend {self.name}: {what}", self.model, {"backend": self.name})

    # In the background.

    async def start(self, note: Note) -> None:
        """Open the client and begin to check. ``note`` is told when the backend goes down or comes back.

        Raises ApiKeyError or OSError for a file that can't be read.
        """
        spec, self._note = self.spec, note
        verify: ssl.SSLContext | bool = True
        if spec.ca_file is not None:
            verify = ssl.create_default_context(cafile=spec.ca_file)
        self._client = httpx.AsyncClient(
            base_url=spec.url,
            # Reading is timed by whoever reads; nobody waits for a pool that has no limit.
            timeout=httpx.Timeout(None, connect=spec.timeouts.connect_s),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=spec.max_running),
            verify=verify,
            transport=self._transport,
            # The environment's proxies and .netrc are somebody else's wishes.
            trust_env=False,
        )
        self._running = [asyncio.create_task(self._check_for_ever())]
        if self._watch is not None:
            self._running.append(asyncio.create_task(self._watch.run(self._client, self.headers)))

    async def stop(self) -> None:
        """Idempotent."""
        running, self._running = self._running, []
        await cancel_and_wait(*running)
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def _check_for_ever(self) -> None:
        while True:
            try:
                if self.spec.api_key_file is not None:
                    # Secrets are rotated while the gateway runs.
                    await self._refresh_key()
                await self.check()
            except Exception:
                logger.exception("checking backend %s failed; it is tried again", self.name)
            await pause(self.spec.health.every_s)

    async def _refresh_key(self) -> None:
        try:
            self._key = await self._read_key()
        except ApiKeyError as error:
            logger.error("backend %s keeps its last key: %s", self.name, error)
        except TimeoutError as error:
            logger.error("backend %s keeps its last key: reading %s: %s", self.name, self.spec.api_key_file, error)

    async def check(self) -> None:
        """Ask once whether it is there, and whether it serves the model."""
        settings, began = self.spec.health, self.clock()
        asking = asyncio.create_task(self._ask())
        try:
            for _ in range(_SLICES):
                if not asking.done():
                    await asyncio.wait((asking,), timeout=settings.timeout_s / _SLICES)
            if asking.done():
                self._note_check(asking.result())
            elif self._heard_at < began:
                self._note_check(f"did not answer within {settings.timeout_s:g} s")
            # Else it is busy answering requests, which says more about it than a check.
        finally:
            asking.cancel()
            await asyncio.wait((asking,))

    async def _ask(self) -> str | None:
        """What is wrong with it; None: nothing."""
        body = b""
        try:
            # Timed by whoever waits for it, slice by slice.
            asked = self.client.stream("GET", self.spec.health.path, headers=self.headers(), timeout=None)
            async with asked as response:
                async for piece in response.aiter_bytes():
                    body += piece
                    if len(body) > _MOST_HEALTH_BYTES:
                        return f"answered {self.spec.health.path} with more than {_MOST_HEALTH_BYTES} bytes"
            return self._problem_in(response.status_code, body)
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, OSError) as error:
            return transport_words(error)

    def _problem_in(self, status: int, body: bytes) -> str | None:
        if status != 200:
            return f"answered {status} to {self.spec.health.path}"
        if self.spec.health.path != "/models":
            return None
        try:
            models = msgspec.json.decode(body, type=_ModelList).data
        except (msgspec.DecodeError, UnicodeDecodeError):
            return "answered /models with something that is no list of models; is its url right?"
        wanted = self.spec.upstream_model
        found = next((each for each in models if each.id == wanted), None)
        if found is None:
            served = ", ".join(each.id[:100] for each in models[:10]) or "nothing"
            return f"does not serve '{wanted}'; it serves {served}"
        self.health.max_model_len = found.max_model_len
        return None

    def _note_check(self, problem: str | None) -> None:
        health = self.health
        health.failures = 0 if problem is None else health.failures + 1
        health.error = problem
        if problem is None:
            ok = True
        elif health.failures >= self.spec.health.failures:
            ok = False
        else:
            return
        if ok is not health.ok:
            was, health.ok, health.since = health.ok, ok, self.clock()
            if not ok:
                logger.error("backend %s is unhealthy: %s", self.name, problem)
                self._tell("backend_down", f"unhealthy: {problem}")
            elif was is False:
                logger.warning("backend %s is healthy again", self.name)
                self._tell("backend_up", "healthy again")

    def _down(self) -> str | None:
        now = self.clock()
        if self.health.ok is False:
            return f"unhealthy for {now - self.health.since:.0f} s"
        if not self._breaker.allows(now):
            state = self._breaker.state(now)
            return "circuit half open, a probe is out" if state == "half_open" else "circuit open after failures"
        return None

    def as_dict(self) -> dict[str, Any]:
        """For operators: everything but the key."""
        now, breaker, spec = self.clock(), self._breaker, self.spec
        return {
            "name": self.name,
            "kind": self.kind,
            "model": self.model,
            "healthy": self.healthy,
            "reason": self._down(),
            "url": spec.url,
            "upstream_model": spec.upstream_model,
            "dialect": spec.dialect,
            "priority": spec.placement.priority,
            "classes": None if spec.placement.classes is None else sorted(spec.placement.classes),
            "in_flight": self.places.in_flight,
            "max_running": spec.max_running,
            "max_in_flight": spec.max_in_flight,
            "busy": now < self._busy_until,
            "check": {
                "ok": self.health.ok,
                "for_s": round(now - self.health.since, 3),
                "failures": self.health.failures,
                "error": self.health.error,
            },
            "breaker": {
                "state": breaker.state(now),
                "failures": breaker.failures,
                "retry_after_s": round(breaker.retry_after_s(now), 3),
            },
            "counts": dict(self.counts),
            "last_error": self.last_error,
            "variant": None if spec.variant is None else spec.variant.name,
            "suspect": self.suspect,
            "engine": self.engine_report(),
        }
