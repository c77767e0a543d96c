"""``make drill-alerts``: every alert that ships fires once and is resolved once, each by a fault that is made for it.

Two replicas over fake engines, a real Redis (Valkey), a real Prometheus and a webhook, all on loopback. The replicas'
own alerts and Prometheus' rules are watched side by side. The alerts are those of the shipped policy, with times and
limits of seconds instead of minutes; what they are about and how that is found is the same.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import yaml

from gateway.admission import Places
from gateway.auth.access import Access, open_keys
from gateway.auth.keyfile import new_key
from gateway.routing.spec import HealthCheck, UpstreamSpec
from gateway.serving.call import ServedModel
from gateway.serving.controller import Controller
from gateway.serving.statistics_store import store_opener
from gateway.serving.targets import Backends, EngineBackend, UpstreamTarget
from gateway.settings import GatewaySettings
from policy.file.format import parse_policy
from policy.runtime import PolicyRuntime
from telemetry import request_counts
from telemetry.alerts import readings, slo_rules
from telemetry.alerts.prometheus_rules import ABSENT, rule_file
from telemetry.service import Telemetry
from tests.drills.alert_faults import BODY, CHAT, FAULTS, PLACES, FaultyDecoder, Replica, Stage, shortened
from tests.drills.progress import PROGRESS_S
from tests.support.access_helpers import bearer, entry, write_keys
from tests.support.alert_receivers import Webhook
from tests.support.debian import Unavailable, find
from tests.support.fakes import FakeTokenizer
from tests.support.live_gateway import MODEL, running_gateway
from tests.support.prometheus_server import Prometheus, running_prometheus
from tests.support.scripted_upstream import MODELS, answer, scripted_upstream
from tests.support.valkey import ValkeyProcess

Times = tuple[float | None, float | None]
"""Of Prometheus' rule, and of the webhook; None: never."""
WARM_UP_S = 45.0
"""Until the heads have a long memory that they can get worse than."""
PATIENCE_S = 120.0


class Watch:
    """What Prometheus and the webhook have said: how often each alert began and ended.

    While replicas can't reach each other each tells by itself, and delivery is "at least once": an alert that is told
    again is the same one.
    """

    def __init__(self, prometheus: Prometheus, webhook: Webhook, say: Callable[[str], None]) -> None:
        self._prometheus, self._webhook, self._say = prometheus, webhook, say
        self._firing: set[str] = set()
        self._told: set[tuple[str, ...]] = set()
        self._seen = 0
        self.rules: Counter[tuple[str, str]] = Counter()
        self.own: Counter[tuple[str, str]] = Counter()

    def look(self) -> None:
        firing = {row["metric"]["alertname"] for row in self._prometheus.query('ALERTS{alertstate="firing"}')}
        self.rules.update((name, "firing") for name in firing - self._firing)
        self.rules.update((name, "resolved") for name in self._firing - firing)
        self._firing = firing
        for _, _, body in self._webhook.received[self._seen :]:
            self._seen += 1
            for alert in body["alerts"]:
                self._hear(alert["labels"], alert["status"])

    def _hear(self, labels: dict[str, str], status: str) -> None:
        name, subject = labels["alertname"], tuple(labels.get(each, "") for each in ("alertname", "model", "class"))
        before = any(each[0] == name for each in self._told)
        (self._told.add if status == "firing" else self._told.discard)(subject)
        if before != any(each[0] == name for each in self._told):
            self.own[name, status] += 1

    def wait(self, alerts: Iterable[str], status: str, *, own: bool = True) -> dict[str, Times]:
        """Seconds until each alert had that status: of Prometheus' rule, and told to the webhook. None: it never had,
        within :data:`PATIENCE_S`."""
        began = told = time.monotonic()
        found: dict[str, list[float | None]] = {name: [None, None if own else 0.0] for name in alerts}
        before = self.rules.copy(), self.own.copy()
        while missing := [name for name, both in found.items() if None in both]:
            self.look()
            now = time.monotonic()
            for name, both in found.items():
                for index, (counted, then) in enumerate(((self.rules, before[0]), (self.own, before[1]))):
                    if both[index] is None and counted[name, status] > then[name, status]:
                        both[index] = now - began
            if now - began > PATIENCE_S:
                self._say(f"not {status} within {PATIENCE_S:g} s: {', '.join(missing)}")
                break
            if now - told >= PROGRESS_S:
                told = now
                self._say(f"{now - began:.0f} s: not yet {status}: {', '.join(missing)}")
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
    """Statistics of engines, good requests, and those with a wrong key while they are switched on."""

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
        # As a load balancer does: nothing to a replica whose engine is down.
        well = partial(lambda index: stage.replicas[index].decoder.alive, index)
        asking += [(ask, (index, well, lambda: stage.good, 0.1))] * 2
    asking.append((ask, (0, lambda: stage.wrong_keys, lambda: "wrong", 0.1)))
    threads = [threading.Thread(target=run, args=arguments, daemon=True) for run, arguments in asking]
    for thread in threads:
        thread.start()
    return threads


def drill(folder: Path, say: Callable[[str], None] = print) -> bool:
    """True if every alert that ships has fired once and was resolved once, by both ways."""
    # Windows of seconds, and snapshots as fine.
    readings.RATE_WINDOW_S = slo_rules.RATE_WINDOW_S = 10.0
    readings.SAVINGS_WINDOW_S = slo_rules.SAVINGS_WINDOW_S = 20.0
    request_counts.SNAPSHOT_EVERY_S = 1.0
    readings.MIN_REQUESTS = 3
    readings.MIN_SAVINGS_S = 1.0
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
        watch = Watch(prometheus, webhook, say)
        threads = traffic(stage)
        say(f"two replicas, Valkey and Prometheus run; {WARM_UP_S:.0f} s of good traffic first")
        time.sleep(WARM_UP_S)
        watch.look()
        stray = {name for name, status in [*watch.rules, *watch.own] if status == "firing"}
        if stray:
            say(f"fired without a fault: {', '.join(sorted(stray))}")
        rows: list[tuple[str, str, Times, Times]] = []
        for fault in FAULTS:
            say(f"fault: {fault.what}")
            fault.begin(stage)
            fired = watch.wait(fault.alerts, "firing")
            fault.end(stage)
            over = watch.wait(fault.alerts, "resolved")
            rows += [(name, fault.what, fired[name], over[name]) for name in fault.alerts]
            say(f"  fired and resolved: {', '.join(fault.alerts)}")
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
    rows: list[tuple[str, str, Times, Times]],
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
        own = ("-", "-", "Prometheus only") if name == ABSENT else (_shown(fired[1]), _shown(over[1]), told)
        say(f"| {name} | {what} | {_shown(fired[0])} | {_shown(over[0])} | {' | '.join(own)} |")
        if by_rule != (1, 1) or (name != ABSENT and told != "1/1"):
            once = False
            say(f"  not once: rule {by_rule[0]}/{by_rule[1]}, told {told}")
    missing = shipped - {name for name, *_ in rows}
    if missing:
        say(f"no fault is made for: {', '.join(sorted(missing))}")
    say("every alert that ships fired once and was resolved once" if once and not missing else "not as it should be")
    return once and not missing


def _shown(seconds: float | None) -> str:
    return "never" if seconds is None else f"{seconds:.1f}"


def main() -> int:
    try:
        find("prometheus")
    except Unavailable as error:
        print(f"the drill needs a Prometheus: {error}", file=sys.stderr)
        return 1
    # What is broken here on purpose would be told hundreds of times.
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as folder:
        return 0 if drill(Path(folder), lambda line: print(line, flush=True)) else 1


if __name__ == "__main__":
    sys.exit(main())
