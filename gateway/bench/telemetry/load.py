"""The client: as many streams as asked for at every contestant all the time, and the tokens that came by block."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from backends.bench.prompts import PROMPTS
from policy.background import cancel_and_wait, pause

MODEL = "bench"
_PROMPTS = [prompt for each in zip(*PROMPTS.values(), strict=True) for prompt in each]
"""All classes in turn."""
_EVENT = b"data: {"
_TAIL_BYTES = 4096
"""Holds the last event of a stream, whatever its report says."""


@dataclass(frozen=True, slots=True)
class Load:
    """``streams`` at each gateway; greedy answers of ``max_tokens`` tokens each, but for the first of each stream."""

    streams: int = 16
    max_tokens: int = 64


@dataclass(frozen=True, slots=True)
class Target:
    """``scrape_every_s`` None: its ``/metrics`` is not scraped."""

    url: str
    scrape_every_s: float | None = None


class Client:
    """Runs in a thread of its own until :meth:`finish`. Each stream sends the same requests to each target, in turn.

    ``block`` is set by whoever deals out turns; what is read meanwhile counts in it.
    """

    def __init__(self, targets: Mapping[str, Target], load: Load) -> None:
        self.block = 0
        self._targets, self._load = targets, load
        self._tokens: dict[str, defaultdict[int, float]] = {name: defaultdict(float) for name in targets}
        self._last = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether answers are still being read. Raises what went wrong, if anything."""
        if self._error is not None:
            raise self._error
        return self._thread.is_alive()

    def finish(self) -> None:
        """Ask for nothing more; what runs is read to its end, if its gateway gets turns."""
        self._last.set()

    def tokens(self, name: str, block: int) -> float:
        """Of answers that are complete. A step's tokens come in one event, and all events of an answer count alike."""
        return self._tokens[name][block]

    def _run(self) -> None:
        try:
            asyncio.run(self._drive())
        except BaseException as error:
            self._error = error

    async def _drive(self) -> None:
        import httpx

        limits = httpx.Limits(max_connections=None)
        clients = {
            name: httpx.AsyncClient(base_url=target.url, timeout=600, limits=limits, trust_env=False)
            for name, target in self._targets.items()
        }
        try:
            scrapers = [
                asyncio.create_task(_scrape(clients[name], target.scrape_every_s))
                for name, target in self._targets.items()
                if target.scrape_every_s is not None
            ]
            async with asyncio.TaskGroup() as group:
                for name, http in clients.items():
                    for number in range(self._load.streams):
                        group.create_task(self._stream(name, http, number))
            for scraper in scrapers:
                if scraper.done():
                    scraper.result()
            await cancel_and_wait(*scrapers)
        finally:
            for http in clients.values():
                await http.aclose()

    async def _stream(self, name: str, http: Any, number: int) -> None:
        load, tokens = self._load, self._tokens[name]
        # First answers of every length: streams that all began at once would all read their next prompts at once too,
        # and a round would hold one such time without tokens more or less than another.
        asked, wanted = number, -(-load.max_tokens * (number + 1) // load.streams)
        while not self._last.is_set():
            body = _body(_PROMPTS[asked % len(_PROMPTS)], wanted)
            events: Counter[int] = Counter()
            tail = b""
            async with http.stream("POST", "/v1/chat/completions", json=body) as response:
                response.raise_for_status()
                # Not line by line: what the client computes is taken from the gateway's cores.
                async for part in response.aiter_raw():
                    events[self.block] += part.count(_EVENT)
                    tail = (tail + part)[-_TAIL_BYTES:]
            found = _completion_tokens(tail)
            if found != wanted:
                raise RuntimeError(f"an answer of '{name}' has {found} tokens instead of {wanted}")
            for block, count in events.items():
                tokens[block] += wanted * count / events.total()
            asked, wanted = asked + load.streams, load.max_tokens


async def _scrape(http: Any, every_s: float) -> None:
    while True:
        (await http.get("/metrics")).raise_for_status()
        await pause(every_s)


def _body(prompt: str, max_tokens: int) -> dict[str, Any]:
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _completion_tokens(tail: bytes) -> int | None:
    """By the last event; None where it says nothing of that."""
    for event in reversed(tail.split(b"\n\n")):
        if event.startswith(_EVENT):
            usage = json.loads(event.removeprefix(b"data: ")).get("usage")
            return usage and usage["completion_tokens"]
    return None
