"""``make demo-alert``: heads that don't pay raise an alert, and good heads end it. Real programs, loopback only.

Starts the demo model with random Medusa heads, a Valkey, and Debian's Alertmanager with a webhook behind it; sends
requests; prints when what happened. The limits are those of any policy (speedup below 1.0), only the times are shorter:
the fallback's window is as long as the machine takes for :data:`WINDOW_STEPS` steps, which it is seen to do first.
Then the gateway starts again with the heads that ship, on the same store: the alert that the first left firing is
resolved. Takes about a minute on a quiet machine. Each step waits for what it is about and tells so every ten seconds;
one that is not seen within :data:`STEP_S`, or :data:`STEP_WINDOWS` windows, ends the demo. Status 0 if all was seen.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.drills.progress import PROGRESS_S, await_line
from tests.support.alert_receivers import Webhook, running_alertmanager
from tests.support.debian import Unavailable, find
from tests.support.paths import ROOT
from tests.support.valkey import ValkeyProcess

STEP_S = 180.0
STEP_WINDOWS = 40.0
LEAST_WINDOW_S, MOST_WINDOW_S = 4.0, 60.0
WINDOW_STEPS = 100.0
"""What a window should hold. Judging looks back on ten windows, and useless heads are asked in one step of 64: in
less, they have not been asked often enough to be called useless."""
REQUEST_S = 120.0
PROMPT = "Write a Python function that parses a date, with tests and comments."
POLICY = """
version: 1
defaults:
  lookup: false # it pays whatever the heads
  fallback: {{min_speedup: 1.0, window: {window:.0f}s, hold: 10s, probe: 10%}}
alerts:
  - name: speculation-does-not-pay
    metric: speculative_speedup_factor
    below: 1.0
    for: 5s
    keep: 5s
    actions: [webhook, log, event]
    notify: alertmanager
receivers:
  alertmanager: {{kind: alertmanager, url: "{url}"}}
"""


class Timeline:
    """What was seen, in seconds since the start. Raises TimeoutError when a step takes too long."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self.patience_s = STEP_S

    def say(self, line: str) -> None:
        print(f"{time.monotonic() - self._began:6.1f} s  {line}", flush=True)

    def wait(self, what: str, look: Callable[[], str | None]) -> None:
        """Until ``look`` finds it."""
        began = told = time.monotonic()
        while (found := look()) is None:
            now = time.monotonic()
            if now - began > self.patience_s:
                raise TimeoutError(f"did not see within {self.patience_s:.0f} s: {what}")
            if now - told >= PROGRESS_S:
                told = now
                self.say(f"waiting for: {what}")
            time.sleep(0.2)
        self.say(f"{what}: {found}")


def write_random_heads(folder: Path) -> None:
    """Heads of the demo model's size that were never trained: sure of themselves, and wrong."""
    import torch

    from backends.engine.loading import DEMO_HEADS
    from backends.heads.format import load_heads, read_heads_config, save_heads
    from backends.heads.module import MedusaHeads

    config = read_heads_config(DEMO_HEADS)
    backbone = config["backbone"]
    shipped = load_heads(DEMO_HEADS, hidden_size=backbone["hidden_size"], vocab_size=backbone["vocab_size"])
    torch.manual_seed(0)
    heads = MedusaHeads(
        backbone["hidden_size"],
        shipped.num_heads,
        shipped.inner_size,
        head_input=shipped.head_input,
        draft_token_ids=shipped.draft_token_ids,
    )
    torch.nn.init.normal_(heads.down.weight, std=1.0)
    save_heads(heads, folder, config={"backbone": backbone})


class Gateway:
    """A ``medusa-gateway serve`` process, and requests to it without a pause."""

    def __init__(self, *arguments: str, log: Path, say: Callable[[str], None] = print) -> None:
        command = [sys.executable, "-m", "gateway", "serve", "--port", "0", *arguments]
        with open(log, "ab") as errors:
            self._process = subprocess.Popen(
                command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )  # fmt: skip
        try:
            found = await_line(self._process, r"serves (\S+) at (http://\S+)/v1", say)
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise
        self.model, self.url = found.groups()
        self.answers = 0
        self._asking = True
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(2)]
        for thread in self._threads:
            thread.start()

    def get(self, path: str) -> Any:
        return httpx.get(f"{self.url}{path}", trust_env=False, timeout=REQUEST_S).json()

    def stop(self) -> None:
        self._asking = False
        for thread in self._threads:
            thread.join(REQUEST_S)
        self._process.send_signal(signal.SIGTERM)
        try:
            # Longer than the drain and what the process gives itself after it.
            self._process.wait(60)
        finally:
            self._process.kill()
            self._process.wait()

    def _ask(self) -> None:
        body = {
            "model": self.model,
            "max_tokens": 96,
            "temperature": 0,
            "messages": [{"role": "user", "content": PROMPT}],
        }
        with httpx.Client(trust_env=False, timeout=REQUEST_S) as client:
            while self._asking:
                try:
                    self.answers += client.post(f"{self.url}/v1/chat/completions", json=body).status_code == 200
                except httpx.HTTPError:
                    # The gateway is gone, or slow; only the first is for good.
                    if self._process.poll() is not None:
                        return


def steps_done(gateway: Gateway, enough: float) -> Callable[[], str | None]:
    def look() -> str | None:
        classes = gateway.get("/admin/stats")["classes"]
        steps = sum(sum(each["last_minute"]["steps"].values()) for each in classes)
        return f"{steps:.0f}" if steps >= enough else None

    return look


def policy_taken(gateway: Gateway, before: str) -> Callable[[], str | None]:
    def look() -> str | None:
        version = gateway.get("/admin/policy")["version"]
        return None if version == before else version

    return look


def alert_in(gateway: Gateway, state: str) -> Callable[[], str | None]:
    """The demo's alert in one of these states, as this replica sees it."""

    def look() -> str | None:
        for alert in gateway.get("/admin/alerts")["alerts"]:
            if alert["state"] == state:
                value = "not measured yet" if alert["value"] is None else f"{alert['value']:.4f}"
                return f"{alert['class']}, speedup {value} (limit {alert['below']})"
        return None

    return look


def event_of(gateway: Gateway, kind: str) -> Callable[[], str | None]:
    return lambda: next(
        (event["message"] for event in gateway.get("/admin/stats")["events"] if event["kind"] == kind), None
    )


def told(webhook: Webhook, status: str) -> Callable[[], str | None]:
    def look() -> str | None:
        bodies = [body for _, _, body in webhook.received if body["status"] == status]
        return json.dumps(bodies[-1]["commonLabels"], sort_keys=True) if bodies else None

    return look


def known_to(alertmanager: str) -> str | None:
    alerts = httpx.get(f"{alertmanager}/api/v2/alerts", trust_env=False, timeout=REQUEST_S).json()
    return f"{alerts[0]['labels']['alertname']}, {alerts[0]['status']['state']}" if alerts else None


@contextmanager
def serving(*arguments: str, log: Path, say: Callable[[str], None] = print) -> Iterator[Gateway]:
    gateway = Gateway(*arguments, log=log, say=say)
    try:
        yield gateway
    finally:
        gateway.stop()


def demonstrate(folder: Path, alertmanager_program: Path) -> None:
    line = Timeline()
    write_random_heads(folder / "random-heads")
    server = ValkeyProcess(folder).start()
    try:
        with (
            Webhook() as webhook,
            running_alertmanager(alertmanager_program, folder / "am", webhook.url) as alertmanager,
        ):
            policy = folder / "policy.yaml"
            policy.write_text(POLICY.format(url=alertmanager, window=LEAST_WINDOW_S))
            common = ("--max-model-len", "1024", "--policy", str(policy), "--redis-url", server.url)
            line.say(f"Valkey at {server.url}, Alertmanager at {alertmanager}")
            with serving(
                "--heads", str(folder / "random-heads"), *common, log=folder / "bad.log", say=line.say
            ) as gateway:
                line.say(f"{gateway.model} with random heads at {gateway.url}; requests begin")
                began = time.monotonic()
                line.wait(f"{WINDOW_STEPS:g} steps", steps_done(gateway, WINDOW_STEPS))
                window_s = min(math.ceil(max(time.monotonic() - began, LEAST_WINDOW_S)), MOST_WINDOW_S)
                if window_s > LEAST_WINDOW_S:
                    before = gateway.get("/admin/policy")["version"]
                    line.patience_s = max(STEP_S, STEP_WINDOWS * window_s)
                    policy.write_text(POLICY.format(url=alertmanager, window=window_s))
                    line.wait(f"policy with a window of {window_s:.0f} s", policy_taken(gateway, before))
                line.wait("pending", alert_in(gateway, "pending"))
                line.wait("firing", alert_in(gateway, "firing"))
                line.wait("Alertmanager has it", lambda: known_to(alertmanager))
                line.wait("webhook behind Alertmanager, firing", told(webhook, "firing"))
                line.wait("fallback", event_of(gateway, "fallback"))
                line.say(f"{gateway.answers} answers so far; the gateway stops, its alert still firing")
            with serving(*common, log=folder / "good.log", say=line.say) as gateway:
                line.say(f"{gateway.model} with the heads that ship at {gateway.url}; requests begin")
                line.wait("taken over, firing", alert_in(gateway, "firing"))
                line.wait("resolved", event_of(gateway, "alert_resolved"))
                line.wait("webhook behind Alertmanager, resolved", told(webhook, "resolved"))
                classes = gateway.get("/admin/stats")["classes"]
                line.say(f"speedup now, by class: { {each['class']: each['speedup'] for each in classes} }")
    finally:
        server.kill()


def main() -> int:
    try:
        program = find("prometheus-alertmanager")
    except Unavailable as error:
        print(f"the demo needs an Alertmanager: {error}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="medusa-demo-") as folder:
        try:
            demonstrate(Path(folder), program)
        except (TimeoutError, RuntimeError) as error:
            print(f"failed: {error}", file=sys.stderr)
            for log in sorted(Path(folder).glob("*.log")):
                print(f"{log.name}:\n{log.read_text()[-3000:]}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
