"""``make drill-alerts``: every alert that ships fires once and is resolved once, each by a fault that is made for it.

Two replicas over fake engines, a real Redis (Valkey), a real Prometheus and a webhook, all on loopback. The replicas'
own alerts and Prometheus' rules are watched side by side. The alerts are those of the shipped policy, with times and
limits of seconds instead of minutes; what they are about and how that is found is the same.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import yaml

from backends.types import DecodeCounters, EngineLoad, ModelInfo
from gateway.admission import Places
from gateway.auth.access import Access, open_keys
from gateway.auth.keyfile import new_key
from gateway.routing.spec import HealthCheck, UpstreamSpec
from gateway.serving.call import ServedModel
from gateway.serving.controller import Controller
from gateway.serving.statistics_store import store_opener
from gateway.serving.targets import Backends, EngineBackend, UpstreamTarget
from gateway.settings import GatewaySettings
from policy.config.watched_file import read_regular
from policy.file.format import default_policy, parse_policy
from policy.runtime import PolicyRuntime
from policy.statistics.counters import StatsKey
from telemetry import request_counts
from telemetry.alerts import readings, slo_rules
from telemetry.alerts.prometheus_rules import ABSENT, rule_file
from telemetry.service import Telemetry
from tests.policy.test_policy_store import ValkeyProcess
from tests.support.access_helpers import bearer, entry, write_keys
from tests.support.alert_receivers import Webhook
from tests.support.debian import Unavailable, find
from tests.support.fakes import FakeDecoder, FakeTokenizer
from tests.support.live_gateway import MODEL, LiveGateway, running_gateway
from tests.support.prometheus_server import Prometheus, running_prometheus
from tests.support.scripted_upstream import MODELS, ScriptedUpstream, answer, scripted_upstream

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
WARM_UP_S = 45.0
"""Until the heads have a long memory that they can get worse than."""
PATIENCE_S = 150.0


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

    def tell(self, weight: int) -> None:
        """Steps of requests that speculate by the policy, as the figures have it. ``weight``: how many at once."""
        told = self.figures
        self.count(
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
    flood: bool = False
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
            alert["within"] = "250ms" if "ttft" in alert["metric"] else "100ms"
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
    return lambda stage: path(stage).write_text(text(path(stage).read_text())) and None


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


STUCK = EngineLoad(8, 3, 63, 64, 8, oldest_wait_s=30.0)
FAULTS = (
    Fault(
        "speculation costs more than it brings",
        ("speculation-does-not-pay", "fell-back", "fallback-lasts"),
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
        "every step takes 400 ms",
        ("first-tokens-are-late", "answers-are-slow"),
        attribute("step_s", 0.4, 2),
        attribute("step_s", 0.0, 2),
    ),
    Fault(
        "more requests than places, held",
        ("places-run-out", "many-limited"),
        lambda stage: (setattr(stage, "flood", True), stage.replicas[0].decoder.hold())[0],
        lambda stage: (setattr(stage, "flood", False), stage.replicas[0].decoder.release())[0],
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


class Watch:
    """What Prometheus and the webhook have said: how often each alert began and ended."""

    def __init__(self, prometheus: Prometheus, webhook: Webhook) -> None:
        self._prometheus, self._webhook = prometheus, webhook
        self._firing: set[str] = set()
        self._seen = 0
        self.rules: Counter[tuple[str, str]] = Counter()
        self.own: Counter[tuple[str, str]] = Counter()

    def look(self) -> None:
        firing = {row["metric"]["alertname"] for row in self._prometheus.query('ALERTS{alertstate="firing"}')}
        self.rules.update((name, "firing") for name in firing - self._firing)
        self.rules.update((name, "resolved") for name in self._firing - firing)
        self._firing = firing
        for _, _, body in self._webhook.received[self._seen :]:
            self.own.update((alert["labels"]["alertname"], alert["status"]) for alert in body["alerts"])
            self._seen += 1

    def wait(self, alerts: Iterable[str], status: str, *, own: bool = True) -> dict[str, tuple[float, float]]:
        """Seconds until each alert had that status: of Prometheus' rule, and told to the webhook."""
        began, found = time.monotonic(), {name: [-1.0, 0.0 if not own else -1.0] for name in alerts}
        before = self.rules.copy(), self.own.copy()
        while any(at < 0 for both in found.values() for at in both):
            self.look()
            now = time.monotonic() - began
            for name, both in found.items():
                for index, (counted, then) in enumerate(((self.rules, before[0]), (self.own, before[1]))):
                    if both[index] < 0 and counted[name, status] > then[name, status]:
                        both[index] = now
            if now > PATIENCE_S:
                missing = [name for name, both in found.items() if min(both) < 0]
                raise TimeoutError(f"not {status}: {', '.join(missing)}")
            time.sleep(0.2)
        return {name: (both[0], both[1]) for name, both in found.items()}


@contextmanager
def replica(stage_files: tuple[Path, Path], redis_url: str, upstream_url: str) -> Iterator[Replica]:
    policy, keys = stage_files
    decoder, access = FaultyDecoder(), Access(open_keys(keys), local=True)
    spec = UpstreamSpec("there", "elsewhere", upstream_url, upstream_model="theirs", health=HealthCheck(every_s=0.5))
    engine = EngineBackend(MODEL, ServedModel(decoder, FakeTokenizer()), Places(PLACES))
    backends = Backends([engine, UpstreamTarget(spec)], frozenset())
    controller = Controller(PolicyRuntime.open(policy), open_store=store_opener(redis_url))
    telemetry = Telemetry.from_environment({}, version="drill", instance=controller.statistics.replica)
    settings = GatewaySettings(drain_timeout_s=2.0)
    with running_gateway(
        settings, decoder, backends, controller=controller, access=access, telemetry=telemetry
    ) as live:
        yield Replica(live, decoder, access)


def traffic(stage: Stage) -> list[threading.Thread]:
    """Statistics of engines, good requests, and what floods while it is switched on."""

    def tell() -> None:
        while not stage.stop.wait(0.25):
            for each_one in stage.replicas:
                each_one.decoder.tell(stage.weight)

    def ask(index: int, wanted: Callable[[], bool], key: Callable[[], str], pause_s: float) -> None:
        with httpx.Client(trust_env=False, timeout=60.0) as client:
            while not stage.stop.wait(pause_s):
                if wanted():
                    try:
                        client.post(f"{stage.replicas[index].live.url}{CHAT}", json=BODY, headers=bearer(key()))
                    except httpx.HTTPError:
                        continue

    asking: list[tuple[Callable[..., None], tuple[Any, ...]]] = [(tell, ())]
    for index in range(len(stage.replicas)):
        asking += [(ask, (index, lambda: True, lambda: stage.good, 0.1))] * 2
    asking.append((ask, (0, lambda: stage.wrong_keys, lambda: "wrong", 0.1)))
    # As many as hold all places of the first replica, and some that are refused.
    asking += [(ask, (0, lambda: stage.flood, lambda: stage.good, 0.2))] * (PLACES + 4)
    threads = [threading.Thread(target=run, args=arguments, daemon=True) for run, arguments in asking]
    for thread in threads:
        thread.start()
    return threads


def drill(folder: Path, say: Callable[[str], None] = print) -> bool:
    """True if every alert that ships has fired once and was resolved once, by both ways."""
    # Windows of seconds, and snapshots as fine.
    readings.RATE_WINDOW_S = slo_rules.RATE_WINDOW_S = 10.0
    request_counts.SNAPSHOT_EVERY_S = 1.0
    readings.MIN_REQUESTS = 3
    good = new_key()
    policy, keys = folder / "policy.yaml", folder / "keys.json"
    write_keys(keys, entry("good", good))
    targets, rules = folder / "targets.json", folder / "rules.json"
    with ExitStack() as opened, Webhook() as webhook, scripted_upstream() as upstream:
        upstream.health = lambda: answer(200, MODELS)
        policy.write_text(yaml.safe_dump(shortened(webhook.url)))
        spec = parse_policy(policy.read_bytes(), "drill")
        made = rule_file(spec.alerts)
        made["groups"][0]["rules"][-1]["for"] = "1s"
        made["groups"][0]["interval"] = "500ms"
        rules.write_text(json.dumps(made))
        valkey = ValkeyProcess(folder).start()
        opened.callback(valkey.kill)
        replicas = ExitStack()
        opened.callback(replicas.close)

        def start() -> list[Replica]:
            started = [replicas.enter_context(replica((policy, keys), valkey.url, upstream.url)) for _ in range(2)]
            found = [{"targets": [one.live.url.removeprefix("http://")]} for one in started]
            targets.write_text(json.dumps(found))
            return started

        stage = Stage(start(), valkey, upstream, policy, keys, good)
        prometheus = opened.enter_context(running_prometheus(folder, "", every="500ms", targets=targets, rules=rules))
        watch = Watch(prometheus, webhook)
        threads = traffic(stage)
        say(f"two replicas, Valkey and Prometheus run; {WARM_UP_S:.0f} s of good traffic first")
        time.sleep(WARM_UP_S)
        watch.look()
        stray = {name for name, status in [*watch.rules, *watch.own] if status == "firing"}
        if stray:
            say(f"fired without a fault: {', '.join(sorted(stray))}")
        rows: list[tuple[str, str, tuple[float, float], tuple[float, float]]] = []
        for fault in FAULTS:
            fault.begin(stage)
            fired = watch.wait(fault.alerts, "firing")
            fault.end(stage)
            over = watch.wait(fault.alerts, "resolved")
            rows += [(name, fault.what, fired[name], over[name]) for name in fault.alerts]
            say(f"{fault.what}: {', '.join(fault.alerts)}")
        stage.stop.set()
        for thread in threads:
            thread.join(10.0)
        replicas.close()
        fired = watch.wait([ABSENT], "firing", own=False)
        start()
        over = watch.wait([ABSENT], "resolved", own=False)
        rows.append((ABSENT, "both replicas are gone", fired[ABSENT], over[ABSENT]))
        return _report(rows, watch, {rule.name for rule in spec.alerts}, say)


def _report(
    rows: list[tuple[str, str, tuple[float, float], tuple[float, float]]],
    watch: Watch,
    shipped: set[str],
    say: Callable[[str], None],
) -> bool:
    say("\n| alert | fault | rule fired, s | resolved, s | receiver told, s | of its end, s | told (firing/resolved) |")
    say("| --- | --- | --- | --- | --- | --- | --- |")
    once = True
    for name, what, fired, over in rows:
        told = f"{watch.own[name, 'firing']}/{watch.own[name, 'resolved']}"
        by_rule = watch.rules[name, "firing"], watch.rules[name, "resolved"]
        own = ("-", "-", "Prometheus only") if name == ABSENT else (f"{fired[1]:.1f}", f"{over[1]:.1f}", told)
        say(f"| {name} | {what} | {fired[0]:.1f} | {over[0]:.1f} | {' | '.join(own)} |")
        if by_rule != (1, 1) or (name != ABSENT and told != "1/1"):
            once = False
            say(f"  not once: rule {by_rule[0]}/{by_rule[1]}, told {told}")
    missing = shipped - {name for name, *_ in rows}
    if missing:
        say(f"no fault is made for: {', '.join(sorted(missing))}")
    say("every alert that ships fired once and was resolved once" if once and not missing else "not as it should be")
    return once and not missing


def main() -> int:
    try:
        find("prometheus")
    except Unavailable as error:
        print(f"the drill needs a Prometheus: {error}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        return 0 if drill(Path(folder), lambda line: print(line, flush=True)) else 1


if __name__ == "__main__":
    sys.exit(main())
