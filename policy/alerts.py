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
SAVINGS_WINDOW_S = 3600.0
"""What speculation saves is judged over this time: long enough that a class's quiet minutes don't decide."""
"""``speculative_fallback_count`` in a condition: how many fallbacks there were within this time."""


LATENCY_BOUNDS = (
    *(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0),
)
PER_TOKEN_BOUNDS = (
    *(0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5),
)
"""Upper bounds of the buckets in which times to the first token, and for each further token, are counted, in seconds:
``within`` of an alert must be one of them."""


RATE_WINDOW_S = 300.0
"""Rates, shares and quantiles of requests are over this time."""


@dataclass(frozen=True, slots=True)
class Figure:
    """Something a condition can be about. ``scope``: of what there is one value each: a class of a model, a model, or
    the installation. ``by_head``: the rule says of which Medusa head. ``burn``: it says of which objective, over which
    window; ``bounds``: and from which of these times on a request counts as slow."""

    scope: FigureScope
    about: str
    by_head: bool = False
    burn: bool = False
    bounds: tuple[float, ...] = ()


FIGURES: Mapping[str, Figure] = {
    "speculative_speedup_factor": Figure("class", "measured speedup over vanilla decoding"),
    "speculative_acceptance_rate": Figure("class", "accepted share of draft tokens"),
    "speculative_control_prediction_ratio": Figure("class", "measured over predicted time of vanilla requests"),
    "speculative_fallback_count": Figure("class", "fallbacks to vanilla within 15 minutes"),
    "speculative_fallback_active": Figure("class", "1 while a class is in fallback to vanilla, else 0"),
    "medusa_engine_time_ratio": Figure("class", "engine time over that of vanilla decoding, in an hour: below 1 saves"),
    "medusa_head_accuracy": Figure("class", "how often a head's first guess is right", by_head=True),
    "medusa_head_accuracy_ratio": Figure("class", "the same over its long memory: 1 is unchanged", by_head=True),
    "medusa_verification_step_ratio": Figure("model", "time of a verification step over that of a vanilla step"),
    "medusa_queue_oldest_age_seconds": Figure("model", "how long the head of the queue has waited"),
    "medusa_kv_usage": Figure("model", "share of the KV cache's pages in use"),
    "medusa_engine_up": Figure("model", "1 while the engine takes requests, else 0"),
    "medusa_heads_stale": Figure("model", "1 when its heads were trained for another backbone, else 0"),
    "medusa_redis_up": Figure("fleet", "1 while the statistics store answers, else 0"),
    "medusa_redis_latency_seconds": Figure("fleet", "how long the last round with Redis took"),
    "medusa_error_ratio": Figure("class", "share of answers that failed by our own doing, over 5 minutes"),
    "medusa_error_burn_rate": Figure("class", "that share over the one that the objective allows", burn=True),
    "medusa_ttft_p99_seconds": Figure("class", "time to the first token, 99th percentile of 5 minutes"),
    "medusa_tpot_p99_seconds": Figure("class", "time for each further token, 99th percentile of 5 minutes"),
    "medusa_ttft_burn_rate": Figure(
        "class", "share of late first tokens over the one that is allowed", burn=True, bounds=LATENCY_BOUNDS
    ),
    "medusa_tpot_burn_rate": Figure(
        "class", "share of slow answers over the one that is allowed", burn=True, bounds=PER_TOKEN_BOUNDS
    ),
    "medusa_unauthorized_rate": Figure("fleet", "requests a second that were refused for their key (401, 403)"),
    "medusa_limited_rate": Figure("fleet", "requests a second that were refused for a limit (429)"),
    "medusa_backend_up": Figure("model", "1 while nothing known speaks against asking the backend, else 0"),
    "medusa_backend_breaker_state": Figure("model", "an upstream's circuit: 0 closed, 1 half open, 2 open"),
    "medusa_places_usage": Figure("model", "share of a backend's places in use; requests past them get 429"),
    "medusa_policy_rejected": Figure("fleet", "1 while the policy file holds an edit that was refused, else 0"),
    "medusa_keys_rejected": Figure("fleet", "1 while the key file holds an edit that was refused, else 0"),
    "medusa_file_hangs": Figure("fleet", "1 while the policy or key file can't be read, else 0"),
}
"""What ``metric`` may name. ``telemetry.alerts.prometheus_rules`` says how each is asked of Prometheus."""


@dataclass(frozen=True, slots=True)
class AlertRule:
    """A condition that should reach a person.

    It fires when the figure has been under ``below`` or over ``above`` for ``for_s``, and is resolved when it has not
    been for ``keep_s``. ``notify`` names receivers; empty: all that there are. ``head`` counts from 1. ``objective``:
    the share of requests that should be well, over ``window_s``; ``within_s``: slower ones are not. ``labels`` and
    ``annotations`` are the operator's own, as pairs.
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
    objective: float = 0.99
    within_s: float | None = None
    window_s: float = 3600.0
    labels: tuple[tuple[str, str], ...] = ()
    annotations: tuple[tuple[str, str], ...] = ()

    @property
    def short_window_s(self) -> float:
        """Over this time, too, must a burn rate be past its limit: so an alert ends soon after what it is about."""
        return self.window_s / 12

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
