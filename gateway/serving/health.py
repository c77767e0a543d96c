"""Whether decisions are made from what they should be made from. Never a reason to restart a gateway."""

from __future__ import annotations

from typing import Any

from gateway.serving.controller import Controller

MOST_SKEW_S = 10.0


def health(controller: Controller) -> dict[str, Any]:
    """For operators."""
    background = controller.background
    status = controller.policy.status
    sync = background.sync
    store = None if sync is None else sync.health
    return {
        "status": "ok" if store is not None and store.ok and not problems(controller) else "degraded",
        "policy": "rejected edit" if status.rejection is not None else "ok",
        "store": None
        if store is None
        else {
            "name": store.store,
            "ok": store.ok,
            "durable": store.durable,
            "for_s": round(controller.clock() - store.since, 3),
            "failures": store.failures,
            "error": store.error,
        },
        "heads_stale": background.stale_heads,
        "classifier": controller.classifies,
        "replica": controller.statistics.replica,
    }


def problems(controller: Controller) -> list[str]:
    """What of it is not as it should be, in words that anybody may read: no files, no addresses."""
    background = controller.background
    found = []
    if controller.policy.status.rejection is not None:
        found.append("the policy file's last edit was refused; the policy before it is in force")
    if (problem := background.file.problem("the policy file")) is not None:
        found.append(problem)
    if background.sync is not None and background.sync.health.ok is False:
        found.append("the statistics store is unavailable; decisions are from this replica's own statistics")
    if background.alerting is not None and background.sync is not None and background.sync.health.remote:
        ahead_s = background.alerting.board.ahead_s
        if abs(ahead_s) >= MOST_SKEW_S:
            way = "behind" if ahead_s > 0 else "ahead of"
            found.append(
                f"this machine's clock is {abs(ahead_s):.0f} s {way} that of the statistics store; replicas whose "
                "clocks differ don't see each other's statistics"
            )
    found += [f"the heads of {name} were trained for another backbone" for name in background.stale_heads]
    return found
