"""What the drill of alerts breaks and mends: engines whose figures are as told, and a fault for each alert."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import yaml

from backends.types import DecodeCounters, EngineLoad, ModelInfo
from gateway.auth.access import Access
from policy.config.watched_file import read_regular
from policy.file.format import default_policy
from policy.statistics.counters import StatsKey
from tests.support.fakes import FakeDecoder
from tests.support.live_gateway import MODEL, LiveGateway
from tests.support.scripted_upstream import ScriptedUpstream
from tests.support.valkey import ValkeyProcess

CHAT = "/v1/chat/completions"
BODY = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 8,
    "stream": True,
    "decoding": {"class": "code"},
}
KEY = StatsKey(MODEL, "code", "greedy", "policy").encode()
PLACES = 12


class FaultyDecoder(FakeDecoder):
    """An engine whose figures and load are what the drill says."""

    def __init__(self) -> None:
        super().__init__()
        self.stale = False
        self.stuck: EngineLoad | None = None
        self.figures = {"spent_us": 10_000, "accepted_tokens": 200, "right": 60, "measured_us": 15_000}

    @property
    def info(self) -> ModelInfo:
        return replace(super().info, heads_stale=self.stale)

    def load(self) -> EngineLoad:
        return self.stuck or super().load()

    def count(self, key: str, counters: DecodeCounters) -> None:
        """Not what answers really took: :meth:`tell` says that."""

    def tell(self, weight: int) -> None:
        """Steps of requests that speculate by the policy, as the figures have it. ``weight``: how many at once."""
        told = self.figures
        super().count(
            KEY,
            DecodeCounters(
                steps=100 * weight,
                medusa_steps=100 * weight,
                rows=40,
                emitted_tokens=300 * weight,
                drafted_tokens=400 * weight,
                accepted_tokens=told["accepted_tokens"] * weight,
                vanilla_us=15_000 * weight,
                spent_us=told["spent_us"] * weight,
                measured_us=told["measured_us"],
                attempts=[100 * weight],
                hits=[[told["right"] * weight]],
            ),
        )


@dataclass
class Replica:
    live: LiveGateway
    decoder: FaultyDecoder
    access: Access


@dataclass
class Stage:
    """All that faults are made with."""

    replicas: list[Replica]
    valkey: ValkeyProcess
    upstream: ScriptedUpstream
    policy: Path
    keys: Path
    good: str
    weight: int = 1
    stop: threading.Event = field(default_factory=threading.Event)
    wrong_keys: bool = False
    held: list[socket.socket] = field(default_factory=list)
    hung: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True)
class Fault:
    """``alerts``: those that it is made for."""

    what: str
    alerts: tuple[str, ...]
    begin: Callable[[Stage], None]
    end: Callable[[Stage], None]


def shortened(webhook: str) -> dict[str, Any]:
    """The shipped policy with seconds for minutes, and a receiver."""
    policy = yaml.safe_load(default_policy())
    policy["defaults"]["fallback"] = {"window": "1s", "hold": "2s", "probe": "50%"}
    policy["receivers"] = {"hook": {"kind": "webhook", "url": webhook}}
    for alert in policy["alerts"]:
        alert["for"], alert["keep"] = "1s", "3s"
        if "window" in alert:
            alert["window"] = "60s"
        if "within" in alert:
            # Far above what a busy machine needs, and below what the drill makes of it.
            alert["within"] = "500ms" if "ttft" in alert["metric"] else "150ms"
        if alert["metric"] in ("medusa_unauthorized_rate", "medusa_limited_rate"):
            alert["above"] = 0.5
    return policy


def each(stage: Stage, change: Callable[[Replica], None], replicas: int = 2) -> None:
    for replica in stage.replicas[:replicas]:
        change(replica)


def figures(**values: int) -> Callable[[Stage], None]:
    def change(stage: Stage) -> None:
        stage.weight = 20  # soon the most of the last minute
        each(stage, lambda replica: replica.decoder.figures.update(values))

    return change


def attribute(name: str, value: Any, replicas: int = 1) -> Callable[[Stage], None]:
    return lambda stage: each(stage, lambda replica: setattr(replica.decoder, name, value), replicas)


def write(path: Callable[[Stage], Path], text: Callable[[str], str]) -> Callable[[Stage], None]:
    def change(stage: Stage) -> None:
        path(stage).write_text(text(path(stage).read_text()))

    return change


def hang(stage: Stage) -> None:
    keys = stage.replicas[0].access.keys
    assert keys is not None

    def read(path: Path) -> bytes:
        stage.hung.wait()
        return read_regular(path)

    keys._read = read


def unhang(stage: Stage) -> None:
    keys = stage.replicas[0].access.keys
    assert keys is not None
    keys._read = read_regular
    stage.hung.set()


def fill(stage: Stage) -> None:
    """As many requests as there are places, none of which gets on: whoever comes now is refused."""
    first = stage.replicas[0]
    first.decoder.hold()
    body = json.dumps(BODY).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {stage.good}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    address = httpx.URL(first.live.url)
    for _ in range(PLACES):
        client = socket.create_connection((address.host, address.port or 80))
        client.sendall(head.encode() + body)
        stage.held.append(client)


def leave(stage: Stage) -> None:
    """Clients go before their answers begin: that is nobody's late token."""
    while stage.held:
        stage.held.pop().close()
    stage.replicas[0].decoder.release()


STUCK = EngineLoad(8, 3, 63, 64, 8, oldest_wait_s=30.0)
FAULTS = (
    Fault(
        "speculation costs more than it brings",
        ("speculation-does-not-pay", "costs-more-than-it-saves", "fell-back", "fallback-lasts"),
        figures(spent_us=20_000),
        figures(spent_us=10_000),
    ),
    Fault(
        "heads guess wrong, drafts are refused, verification is slow",
        ("heads-guess-badly", "heads-got-worse", "drafts-are-refused", "verification-is-slow"),
        figures(right=3, accepted_tokens=2, measured_us=80_000),
        figures(right=60, accepted_tokens=200, measured_us=15_000),
    ),
    Fault("heads of another model", ("heads-of-another-model",), attribute("stale", True), attribute("stale", False)),
    Fault(
        "an engine's queue stands, its cache is full",
        ("queue-stands-still", "kv-cache-full"),
        attribute("stuck", STUCK),
        attribute("stuck", None),
    ),
    Fault(
        "an engine dies",
        ("engine-down", "backend-down"),
        lambda stage: stage.replicas[0].decoder.die(),
        lambda stage: stage.replicas[0].decoder.revive(),
    ),
    Fault(
        "every answer fails",
        ("errors-burn-fast", "errors-burn-slowly"),
        lambda stage: each(stage, lambda replica: replica.decoder.fail(at_step=0)),
        lambda stage: each(stage, lambda replica: replica.decoder.fail(at_step=None)),
    ),
    Fault(
        "every step takes 800 ms",
        ("first-tokens-are-late", "answers-are-slow"),
        attribute("step_s", 0.8, 2),
        attribute("step_s", 0.0, 2),
    ),
    Fault(
        "clients that hold every place of a replica",
        ("places-run-out", "many-limited"),
        fill,
        leave,
    ),
    Fault(
        "a client with a wrong key",
        ("many-unauthorized",),
        lambda stage: setattr(stage, "wrong_keys", True),
        lambda stage: setattr(stage, "wrong_keys", False),
    ),
    Fault(
        "a broken edit of the policy",
        ("policy-edit-refused",),
        write(lambda stage: stage.policy, lambda text: text + "\nbroken: true\n"),
        write(lambda stage: stage.policy, lambda text: text.removesuffix("\nbroken: true\n")),
    ),
    Fault(
        "a broken edit of the keys",
        ("keys-edit-refused",),
        write(lambda stage: stage.keys, lambda text: text + "x"),
        write(lambda stage: stage.keys, lambda text: text.removesuffix("x")),
    ),
    Fault("the key file's file system hangs", ("file-hangs",), hang, unhang),
    Fault(
        "Redis is gone",
        ("statistics-store-down",),
        lambda stage: stage.valkey.kill(),
        lambda stage: stage.valkey.start() and None,
    ),
)
