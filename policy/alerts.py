"""Alerts as an operator writes them: conditions on live figures, and who is told. Evaluated by ``telemetry.alerts``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from policy.names import Names

Severity = Literal["info", "warning", "critical"]
Action = Literal["fall_back", "webhook", "log", "event"]
ReceiverKind = Literal["alertmanager", "webhook"]
FigureScope = Literal["class", "model", "fleet"]

ACTIONS: tuple[Action, ...] = ("fall_back", "webhook", "log", "event")
FALLBACK_WINDOW_S = 900.0
"""``speculative_fallback_count`` in a condition: how many fallbacks there were within this time."""


@dataclass(frozen=True, slots=True)
class Figure:
    """Something a condition can be about. ``scope``: of what there is one value each: a class of a model, a model, or
    the statistics store that the fleet shares. ``by_head``: the rule says of which Medusa head."""

    scope: FigureScope
    about: str
    by_head: bool = False


FIGURES: Mapping[str, Figure] = {
    "speculative_speedup_factor": Figure("class", "measured speedup over vanilla decoding"),
    "speculative_acceptance_rate": Figure("class", "accepted share of draft tokens"),
    "speculative_control_prediction_ratio": Figure("class", "measured over predicted time of vanilla requests"),
    "speculative_fallback_count": Figure("class", "fallbacks to vanilla within 15 minutes"),
    "speculative_fallback_active": Figure("class", "1 while a class is in fallback to vanilla, else 0"),
    "medusa_head_accuracy": Figure("class", "how often a head's first guess is right", by_head=True),
    "medusa_head_accuracy_ratio": Figure("class", "the same over its long memory: 1 is unchanged", by_head=True),
    "medusa_verification_step_ratio": Figure("model", "time of a verification step over that of a vanilla step"),
    "medusa_queue_oldest_age_seconds": Figure("model", "how long the head of the queue has waited"),
    "medusa_kv_usage": Figure("model", "share of the KV cache's pages in use"),
    "medusa_engine_up": Figure("model", "1 while the engine takes requests, else 0"),
    "medusa_heads_stale": Figure("model", "1 when its heads were trained for another backbone, else 0"),
    "medusa_redis_up": Figure("fleet", "1 while the statistics store answers, else 0"),
}
"""What ``metric`` may name. ``telemetry.alerts.prometheus_rules`` says how each is asked of Prometheus."""


@dataclass(frozen=True, slots=True)
class AlertRule:
    """A condition that should reach a person.

    It fires when the figure has been under ``below`` or over ``above`` for ``for_s``, and is resolved when it has not
    been for ``keep_s``. ``notify`` names receivers; empty: all that there are. ``head`` counts from 1.
    """

    name: str
    metric: str
    below: float | None = None
    above: float | None = None
    for_s: float = 0.0
    keep_s: float = 60.0
    severity: Severity = "warning"
    classes: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    head: int = 1
    actions: tuple[Action, ...] = ("webhook", "log", "event")
    notify: tuple[str, ...] = ()
    summary: str = ""

    @property
    def figure(self) -> Figure:
        return FIGURES[self.metric]

    @property
    def limit(self) -> float:
        limit = self.below if self.below is not None else self.above
        assert limit is not None
        return limit

    def holds(self, value: float) -> bool:
        return (self.below is not None and value < self.below) or (self.above is not None and value > self.above)

    def covers(self, model: str, class_name: str) -> bool:
        """Whether the rule is about this model and class ("" where the figure has none)."""
        if self.classes and class_name not in self.classes:
            return False
        return not self.models or Names.of(self.models).holds(model)


@dataclass(frozen=True, slots=True)
class Receiver:
    """Where alerts are posted. ``url`` is literal, or comes from the environment variable ``url_env``, which keeps
    secrets out of the file; ``token_env`` names the variable of a bearer token.

    An "alertmanager" gets ``/api/v2/alerts`` appended and is told again every ``repeat_s``, since it forgets; a
    "webhook" gets the JSON that an Alertmanager posts to its webhooks.
    """

    name: str
    kind: ReceiverKind = "webhook"
    url: str | None = None
    url_env: str | None = None
    token_env: str | None = None
    repeat_s: float = 14_400.0
    timeout_s: float = 10.0
