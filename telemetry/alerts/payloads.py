"""The JSON that receivers get: an Alertmanager's API, and webhooks in the form that an Alertmanager sends them.

An alert has the labels that the rule printed by ``medusa-gateway alerts rules`` gives it, so an Alertmanager that hears
of it from Prometheus as well takes the two for one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from telemetry.alerts.fleet import Alarm, Message

WITHDRAWN = "withdrawn, no longer in the policy"
"""Why an alert ended that was not found to be over."""
_NO_END = "0001-01-01T00:00:00Z"
"""What an Alertmanager writes for an alert that still fires."""


def labels_of(alarm: Alarm) -> dict[str, str]:
    found = {"alertname": alarm.rule, "severity": alarm.severity, "model": alarm.model, "class": alarm.class_name}
    return {**alarm.labels, **{name: value for name, value in found.items() if value}}


def annotations_of(message: Message) -> dict[str, str]:
    alarm = message.entry.alarm
    found = {**alarm.annotations, "summary": alarm.summary}
    if message.withdrawn:
        found["summary"] = f"{WITHDRAWN}; it was: {alarm.summary}"
    if alarm.value is not None:
        found["value"] = f"{alarm.value:.4g}"
    if message.acknowledged is not None:
        found["acknowledged"] = f"{message.acknowledged.by}: {message.acknowledged.comment}".strip(": ")
    return found


def for_alertmanager(messages: Sequence[Message], repeat_s: float, now: float) -> list[dict[str, Any]]:
    """The body of ``POST /api/v2/alerts``. Unless it is told again, an Alertmanager lets an alert end by itself, so
    one that nobody is left to resolve goes away."""
    return [
        {
            "labels": labels_of(message.entry.alarm),
            "annotations": annotations_of(message),
            "startsAt": _time(message.entry.started_at),
            "endsAt": _time(now + 4 * repeat_s if message.status == "firing" else message.entry.ended_at or now),
        }
        for message in messages
    ]


def for_webhook(messages: Sequence[Message], receiver: str, source: str) -> dict[str, Any]:
    """Version 4 of an Alertmanager's webhook, so that what understands that understands this. ``source``: our name."""
    alerts = [
        {
            "status": message.status,
            "labels": labels_of(message.entry.alarm),
            "annotations": annotations_of(message),
            "startsAt": _time(message.entry.started_at),
            "endsAt": _NO_END if message.status == "firing" else _time(message.entry.ended_at or 0.0),
            "generatorURL": "",
            "fingerprint": hashlib.sha256(message.entry.alarm.key.encode()).hexdigest()[:16],
        }
        for message in messages
    ]
    return {
        "version": "4",
        "groupKey": f"{source}:{receiver}",
        "truncatedAlerts": 0,
        "status": "firing" if any(alert["status"] == "firing" for alert in alerts) else "resolved",
        "receiver": receiver,
        "groupLabels": {},
        "commonLabels": _common([alert["labels"] for alert in alerts]),
        "commonAnnotations": _common([alert["annotations"] for alert in alerts]),
        "externalURL": "",
        "alerts": alerts,
    }


def _common(dicts: Sequence[dict[str, str]]) -> dict[str, str]:
    first = dicts[0] if dicts else {}
    return {name: value for name, value in first.items() if all(each.get(name) == value for each in dicts)}


def _time(wall_time: float) -> str:
    return datetime.fromtimestamp(wall_time, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
