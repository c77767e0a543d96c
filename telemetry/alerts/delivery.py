"""Posts messages to receivers, each in a task of its own: one that hangs delays neither the others nor any request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import httpx
import msgspec

from policy.alerts import Receiver
from policy.background import cancel_and_wait
from telemetry.alerts.fleet import Message
from telemetry.alerts.payloads import for_alertmanager, for_webhook
from telemetry.words import transport_words

logger = logging.getLogger("telemetry.alerts")

FIRST_RETRY_S = 1.0
LONGEST_RETRY_S = 120.0
SOURCE = "medusa-gateway"


class NotSet(ValueError):
    """A variable that the policy names is not set; the message names it."""


class Poster(Protocol):
    async def __call__(self, url: str, body: bytes, headers: Mapping[str, str], timeout_s: float) -> int:
        """The HTTP status. Raises OSError or httpx.HTTPError when there is none."""
        ...

    async def close(self) -> None: ...


def retry_after(failures: int, jitter: float) -> float:
    """Seconds until the next attempt. ``jitter`` in [0, 1): replicas and receivers should not come all at once."""
    longest = min(FIRST_RETRY_S * 2.0 ** min(failures - 1, 16), LONGEST_RETRY_S)
    return longest * (0.5 + 0.5 * jitter)


@dataclass(slots=True)
class ReceiverHealth:
    """``failures``: in a row. ``retry_at``: on the deliverer's clock."""

    failures: int = 0
    retry_at: float = 0.0
    error: str | None = None
    delivered: int = 0


class HttpPoster:
    """An HTTP client that is made when it is first needed, off the loop: reading certificates takes its time."""

    def __init__(self) -> None:
        self._client: httpx.AsyncClient | None = None

    async def __call__(self, url: str, body: bytes, headers: Mapping[str, str], timeout_s: float) -> int:
        if self._client is None:
            self._client = await asyncio.to_thread(httpx.AsyncClient)
        response = await self._client.post(url, content=body, headers=dict(headers), timeout=timeout_s)
        return response.status_code

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()


class Deliverer:
    """``environment`` holds URLs and tokens that the policy only names. Used from one event loop."""

    def __init__(
        self,
        post: Poster,
        *,
        environment: Mapping[str, str],
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        jitter: Callable[[], float],
    ) -> None:
        self.health: dict[str, ReceiverHealth] = {}
        self._post = post
        self._environment = environment
        self._clock = clock
        self._wall_clock = wall_clock
        self._jitter = jitter
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._confirmed: list[Message] = []

    def start(self, messages: Sequence[Message], receivers: Mapping[str, Receiver]) -> None:
        """Begin to tell receivers that are neither being told nor to be left alone for a while."""
        by_receiver: dict[str, list[Message]] = {}
        for message in messages:
            by_receiver.setdefault(message.receiver, []).append(message)
        for name, each in by_receiver.items():
            health = self.health.setdefault(name, ReceiverHealth())
            if name in receivers and name not in self._tasks and self._clock() >= health.retry_at:
                task = asyncio.create_task(self._deliver(receivers[name], each, health))
                self._tasks[name] = task
                task.add_done_callback(lambda _, name=name: self._tasks.pop(name, None))

    def take_confirmed(self) -> list[Message]:
        """What receivers have taken since the last call."""
        confirmed, self._confirmed = self._confirmed, []
        return confirmed

    def confirm(self, messages: Sequence[Message]) -> None:
        """Receivers have taken ``messages``."""
        self._confirmed += messages

    async def stop(self, patience_s: float) -> None:
        """Let what is on its way arrive, for at most ``patience_s``, and close the client."""
        tasks = list(self._tasks.values())
        if tasks:
            await asyncio.wait(tasks, timeout=patience_s)
        await cancel_and_wait(*tasks)
        await self._post.close()

    async def _deliver(self, receiver: Receiver, messages: list[Message], health: ReceiverHealth) -> None:
        try:
            url, headers = self._address(receiver)
            status = await self._post(url, self._body(receiver, messages), headers, receiver.timeout_s)
            problem = None if 200 <= status < 300 else f"HTTP status {status}"
        except NotSet as error:
            problem = str(error)
        # ValueError and InvalidURL: an address that can't be used, which an operator may mend meanwhile.
        except (OSError, ValueError, httpx.HTTPError, httpx.InvalidURL) as error:
            problem = transport_words(error)
        if problem is not None:
            health.failures += 1
            delay = retry_after(health.failures, self._jitter())
            health.retry_at = self._clock() + delay
            health.error = problem[:300]
            logger.error("alerts did not reach %s, again in %.1f s: %s", receiver.name, delay, health.error)
            return
        health.failures, health.retry_at, health.error = 0, 0.0, None
        health.delivered += len(messages)
        self.confirm(messages)

    def _address(self, receiver: Receiver) -> tuple[str, dict[str, str]]:
        url = receiver.url if receiver.url_env is None else self._variable(receiver.url_env)
        assert url is not None
        headers = {"content-type": "application/json", "user-agent": SOURCE}
        if receiver.token_env is not None:
            headers["authorization"] = f"Bearer {self._variable(receiver.token_env)}"
        if receiver.kind == "alertmanager":
            url = f"{url.rstrip('/')}/api/v2/alerts"
        return url, headers

    def _variable(self, name: str) -> str:
        value = self._environment.get(name)
        if not value:
            raise NotSet(f"the environment variable {name} is not set")
        return value

    def _body(self, receiver: Receiver, messages: list[Message]) -> bytes:
        body: Any = (
            for_alertmanager(messages, receiver.repeat_s, self._wall_clock())
            if receiver.kind == "alertmanager"
            else for_webhook(messages, receiver.name, SOURCE)
        )
        return msgspec.json.encode(body)
