"""Reads an upstream's own figures now and then, as explanation and for its load."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import httpx

from gateway.routing.spec import EngineMetrics
from gateway.upstream.engine_metrics import MOST_BYTES, EngineFigures, read_engine_metrics
from policy.background import pause
from telemetry.words import transport_words

logger = logging.getLogger("gateway.upstream")

PATIENCE_S = 2.0
STALE_AFTER = 3.0
"""In rounds: figures that are older say nothing of the load any more."""
_KEPT = 12
"""Rounds over which drafts are counted."""


class EngineWatch:
    """``figures`` None: not read yet. ``error``: why the last round gave nothing."""

    def __init__(self, name: str, url: str, settings: EngineMetrics, clock: Callable[[], float]) -> None:
        self.error: str | None = None
        self._name, self._settings, self._clock = name, settings, clock
        parts = urlsplit(url)
        self._url = f"{parts.scheme}://{parts.netloc}{settings.path}"
        self._seen: deque[tuple[float, EngineFigures]] = deque(maxlen=_KEPT)

    @property
    def occupied(self) -> float | None:
        """Requests that it runs or lets wait, whoever sent them; None where that isn't known."""
        if not self._seen or self._clock() - self._seen[-1][0] > STALE_AFTER * self._settings.every_s:
            return None
        figures = self._seen[-1][1]
        return None if figures.running is None else figures.running + (figures.waiting or 0.0)

    def lately(self) -> EngineFigures | None:
        """Its gauges of now, its counts of the last rounds."""
        if not self._seen:
            return None
        newest = self._seen[-1][1]
        return newest.since(self._seen[0][1]) if len(self._seen) > 1 else newest

    def report(self) -> dict[str, Any]:
        lately = self.lately()
        age_s = None if lately is None else round(self._clock() - self._seen[-1][0], 1)
        return {"age_s": age_s, "error": self.error, **({} if lately is None else lately.as_dict())}

    async def run(self, client: httpx.AsyncClient, headers: Callable[[], dict[str, str]]) -> None:
        """For as long as the backend is used."""
        while True:
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await self.read(client, headers())
            except TimeoutError:
                self._note(f"did not answer within {PATIENCE_S:g} s")
            except Exception:
                logger.exception("reading the figures of backend %s failed; it is tried again", self._name)
            await pause(self._settings.every_s)

    async def read(self, client: httpx.AsyncClient, headers: dict[str, str]) -> None:
        """Once."""
        body = b""
        try:
            async with client.stream("GET", self._url, headers=headers) as response:
                if response.status_code != 200:
                    self._note(f"answered {response.status_code}")
                    return
                async for piece in response.aiter_bytes():
                    body += piece
                    if len(body) > MOST_BYTES:
                        self._note(f"sent more than {MOST_BYTES} bytes")
                        return
            # In a thread: an exposition of thousands of lines takes longer than a stream should wait.
            figures = await asyncio.to_thread(read_engine_metrics, body.decode("utf-8", "replace"))
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, OSError) as error:
            self._note(transport_words(error))
        except ValueError as error:
            self._note(f"sent what is no exposition of figures: {error}")
        else:
            self.error = None
            self._seen.append((self._clock(), figures))

    def _note(self, error: str) -> None:
        if self.error is None:
            logger.warning("figures of backend %s can't be read: %s %s", self._name, self._settings.path, error)
        self.error = error
