"""Alerts on their way out: to a webhook that fails at first, to a real Alertmanager, and never in a request's way."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import httpx
import pytest

from gateway.serving.controller import Controller
from policy.alerts import Receiver
from policy.file.format import parse_policy
from policy.runtime import PolicyRuntime
from policy.shared.shared_text import MemoryText
from telemetry.alerts.delivery import LONGEST_RETRY_S, Deliverer, retry_after
from telemetry.alerts.fleet import Alarm, Entry, Message, Mute, Told
from telemetry.alerts.manager import Alerting
from telemetry.alerts.payloads import for_webhook
from telemetry.alerts.sharing import SharedBoard
from telemetry.snapshot import Figures
from tests.support.alert_receivers import Webhook, running_alertmanager
from tests.support.debian import binary
from tests.support.fakes import FakeDecoder
from tests.support.live_gateway import MODEL, LiveGateway, running_gateway

ALARM = Alarm(rule="slow", model="m", class_name="code", severity="critical", summary="it is slow", value=0.91)
ENTRY = Entry(alarm=ALARM, episode="e", started_at=1000.0)


def message(receiver: str, status: Told = "firing", mute: Mute | None = None) -> Message:
    return Message(receiver, ENTRY, status, mute)


class Recorder:
    """A poster without a network: a status or an error for each attempt, and a clock that tests move."""

    def __init__(self, *answers: int | Exception) -> None:
        self.answers = list(answers)
        self.calls: list[tuple[str, Mapping[str, str]]] = []
        self.now = 0.0
        self.deliverer = Deliverer(
            self,
            environment={"OPS": "http://ops/x", "TOKEN": "secret", "EMPTY": ""},
            clock=lambda: self.now,
            wall_clock=lambda: 5000.0,
            jitter=lambda: 1.0,
        )

    async def __call__(self, url: str, body: bytes, headers: Mapping[str, str], timeout_s: float) -> int:
        self.calls.append((url, headers))
        answer = self.answers.pop(0) if self.answers else 200
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def close(self) -> None: ...

    async def attempt(self, receiver: Receiver) -> list[Message]:
        self.deliverer.start([message(receiver.name)], {receiver.name: receiver})
        await asyncio.gather(*self.deliverer._tasks.values())
        await asyncio.sleep(0)
        return self.deliverer.take_confirmed()


async def test_what_fails_is_tried_again_later_and_later() -> None:
    recorder = Recorder(500, httpx.ConnectTimeout("slow"), OSError("refused"))
    receiver = Receiver("ops", "webhook", url_env="OPS", token_env="TOKEN")
    attempts: list[float] = []
    while not await recorder.attempt(receiver):
        if len(recorder.calls) > len(attempts):
            attempts.append(recorder.now)
            assert recorder.deliverer.health["ops"].failures == len(attempts)
        recorder.now += 0.5
    assert attempts == [0.0, 1.0, 3.0]
    assert recorder.now == 7.0
    assert recorder.calls[0][0] == "http://ops/x"
    assert recorder.calls[0][1]["authorization"] == "Bearer secret"
    assert (recorder.deliverer.health["ops"].error, recorder.deliverer.health["ops"].delivered) == (None, 1)


def test_the_longest_wait_and_the_jitter() -> None:
    assert [retry_after(n, 1.0) for n in (1, 2, 3, 99)] == [1.0, 2.0, 4.0, LONGEST_RETRY_S]
    assert retry_after(3, 0.0) == 2.0


@pytest.mark.parametrize(
    ("receiver", "error"),
    [
        (Receiver("ops", url_env="NOT_SET"), "NOT_SET is not set"),
        (Receiver("ops", url="http://x/", token_env="EMPTY"), "EMPTY is not set"),
    ],
)
async def test_what_is_not_configured_is_told(receiver: Receiver, error: str) -> None:
    recorder = Recorder()
    assert await recorder.attempt(receiver) == []
    assert error in str(recorder.deliverer.health["ops"].error)
    assert recorder.calls == []


def test_the_webhook_has_the_form_of_an_alertmanagers() -> None:
    seen = Mute(id="1", kind="acknowledge", by="kim", comment="on it", created_at=0.0, until=9e9)
    body = for_webhook([message("chat"), message("chat", "resolved", seen)], "chat", "medusa-gateway")
    assert (body["version"], body["status"], body["receiver"]) == ("4", "firing", "chat")
    firing, resolved = body["alerts"]
    labels = {"alertname": "slow", "severity": "critical", "model": "m", "class": "code"}
    assert firing["labels"] == body["commonLabels"] == labels
    assert (firing["startsAt"], firing["endsAt"]) == ("1970-01-01T00:16:40.000Z", "0001-01-01T00:00:00Z")
    assert firing["annotations"] == {"summary": "it is slow", "value": "0.91"}
    assert resolved["annotations"]["acknowledged"] == "kim: on it"
    assert firing["fingerprint"] == resolved["fingerprint"]


POLICY = """
version: 1
alerts:
  - {{name: engine-down, metric: medusa_engine_up, below: 1, keep: 1s, severity: critical}}
receivers:
  am: {{kind: alertmanager, url: "{alertmanager}"}}
  hook: {{kind: webhook, url: "{webhook}/hook"}}
"""


def wait_for(live: LiveGateway, condition: Any) -> dict[str, Any]:
    """``/admin/alerts`` when it is as wanted."""
    deadline = time.monotonic() + 30.0
    while not condition(shown := live.http.get("/admin/alerts").json()):
        assert time.monotonic() < deadline, shown
        time.sleep(0.1)
    return shown


def alerting(text: MemoryText, recorder: Recorder, events: list[str]) -> Alerting:
    """Replica "a" after its last start; it owns what it tells of by a lease in ``text``."""
    board = SharedBoard(text, "a", lambda: recorder.now)
    return Alerting(board, recorder.deliverer, "a", lambda: recorder.now, lambda _, line: events.append(line))


ON_FIRE = parse_policy(
    b"""
version: 1
alerts: [{name: fire, metric: medusa_engine_up, below: 1, for: 0s, keep: 0s, actions: [webhook, event]}]
receivers: {ops: {kind: webhook, url_env: OPS}}
""",
    "policy",
)
DOWN: Figures = {"medusa_engine_up": {("m", "b"): 0.0}}


async def test_what_arrives_during_the_stop_is_not_told_again_after_the_restart() -> None:
    text, recorder = MemoryText(lambda: 0.0), Recorder()
    first = alerting(text, recorder, [])
    first.evaluate(ON_FIRE.alerts, DOWN, {})
    await first.share(ON_FIRE)
    await first.stop(60.0)
    assert len(recorder.calls) == 1
    after = Recorder()
    again = alerting(text, after, [])
    again.evaluate(ON_FIRE.alerts, DOWN, {})
    await again.share(ON_FIRE)
    await again.stop(60.0)
    assert after.calls == []


async def test_a_confirmation_survives_a_board_that_can_not_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    text, recorder = MemoryText(lambda: 0.0), Recorder()
    only = alerting(text, recorder, [])
    only.evaluate(ON_FIRE.alerts, DOWN, {})
    await only.share(ON_FIRE)
    await asyncio.gather(*recorder.deliverer._tasks.values())
    with monkeypatch.context() as patch:
        # As the loop that shares is cancelled in the middle of it when the gateway stops.
        patch.setattr(text, "load", AsyncMock(side_effect=asyncio.CancelledError))
        with pytest.raises(asyncio.CancelledError):
            await only.share(ON_FIRE)
    await only.stop(60.0)
    (entry,) = only.board.board.entries.values()
    assert entry.told["ops"][0] == "firing"


async def test_an_alert_whose_rule_is_gone_is_withdrawn() -> None:
    text, recorder, events = MemoryText(lambda: 0.0), Recorder(), []
    bodies: list[bytes] = []

    async def post(url: str, body: bytes, headers: Mapping[str, str], timeout_s: float) -> int:
        bodies.append(body)
        return 200

    recorder.deliverer._post = post  # type: ignore[assignment]
    only = alerting(text, recorder, events)
    without = parse_policy(b"version: 1\nreceivers: {ops: {kind: webhook, url_env: OPS}}\n", "policy")
    for spec in (ON_FIRE, ON_FIRE, without):
        only.evaluate(spec.alerts, DOWN, {})
        await only.share(spec)
        await asyncio.gather(*recorder.deliverer._tasks.values())
    words = "withdrawn, no longer in the policy"
    assert events[-1].startswith(f"alert 'fire' withdrawn while firing: {words}")
    (alert,) = json.loads(bodies[-1])["alerts"]
    assert alert["status"] == "resolved"
    assert alert["annotations"]["summary"].startswith(words)
    assert words not in bodies[0].decode()


def test_from_a_dead_engine_to_a_real_alertmanager_and_back(tmp_path: Path) -> None:
    """Through the admin routes as well: silence, acknowledge, and what they refuse."""
    program = binary("prometheus-alertmanager")
    with (
        Webhook() as behind,
        Webhook(503) as direct,
        running_alertmanager(program, tmp_path / "am", f"{behind.url}/from-alertmanager") as alertmanager,
    ):
        text = POLICY.format(alertmanager=alertmanager, webhook=direct.url)
        controller = Controller(PolicyRuntime.from_text(text.encode()))
        decoder = FakeDecoder()
        with running_gateway(controller=controller, decoder=decoder) as live:
            calm = wait_for(live, lambda shown: shown["alerts"])
            assert [each["state"] for each in calm["alerts"]] == ["inactive"]
            decoder.die()
            (first,) = direct.wait(1)
            assert len(direct.attempts) == 2, "the first was refused"
            assert (first["status"], first["commonLabels"]["alertname"]) == ("firing", "engine-down")
            (passed_on,) = behind.wait(1)
            assert passed_on["commonLabels"] == first["commonLabels"], "an Alertmanager says it in the same words"
            (known,) = httpx.get(f"{alertmanager}/api/v2/alerts", trust_env=False).json()
            assert known["labels"] == {"alertname": "engine-down", "severity": "critical", "model": MODEL}
            shown = wait_for(live, lambda shown: len(shown["fleet"][0]["told"]) == 2)
            assert shown["fleet"][0]["owned_here"]

            def post(route: str, **body: Any) -> httpx.Response:
                return live.http.post(f"/admin/alerts/{route}", json=body)

            assert post("acknowledge", alert="engine-down", seconds=60, by="kim").json()["kind"] == "acknowledge"
            assert wait_for(live, lambda shown: shown["fleet"][0]["acknowledged"])["acknowledgements"][0]["by"] == "kim"
            silence = post("silence", model=MODEL, seconds=60).json()["id"]
            wait_for(live, lambda shown: shown["fleet"][0]["silenced"])
            assert live.http.delete(f"/admin/alerts/silences/{silence}").status_code == 200
            assert live.http.delete(f"/admin/alerts/silences/{silence}").status_code == 404
            assert "has no alert 'engine'" in post("silence", alert="engine", seconds=60).json()["error"]["message"]
            assert post("silence", seconds=60).status_code == 400
            assert post("silence", all=True, seconds=0).status_code == 400
            assert post("silence", all=True, seconds=60, extra=1).status_code == 400

            decoder.revive()
            assert [body["status"] for body in direct.wait(2)] == ["firing", "resolved"]
            assert [body["status"] for body in behind.wait(2)] == ["firing", "resolved"]
        kinds = [event.kind for event in controller.events.log]
        assert kinds == ["alert_firing", "alert_resolved"]


def test_a_receiver_that_hangs_delays_no_request() -> None:
    text = POLICY.format(alertmanager="http://127.0.0.1:1", webhook="http://10.255.255.1")
    controller = Controller(PolicyRuntime.from_text(text.encode()))
    decoder = FakeDecoder(name="other")
    decoder.die()
    with running_gateway(controller=controller, decoder=FakeDecoder()) as live:
        assert controller.background.alerting is not None
        live.in_loop(_fire(controller))
        wait_for(live, lambda shown: shown["receivers"]["am"]["failures"] > 0)
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
        for _ in range(20):
            assert live.http.post("/v1/chat/completions", json=body).status_code == 200


async def _fire(controller: Controller) -> None:
    """As if the engine were down, while the one that serves is not."""
    assert controller.background.alerting is not None
    controller.background.alerting.evaluate(controller.policy.spec.alerts, {"medusa_engine_up": {("x", "y"): 0.0}}, {})
    await controller.background.share_alerts()
