"""Every metric, span and log attribute by name: what dashboards, alert rules and tests may rely on.

Names and units are chosen so that Prometheus calls a metric the same whether it scrapes ``/metrics`` or takes OTLP:
dots become underscores, a unit becomes a suffix, counters end in ``_total``. So no unit is "1", which only one of the
two ways turns into ``_ratio``; annotations in braces are dropped by both.

Label sets are closed: models are those served, classes those of the policy; whatever else turns up is :data:`OTHER`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]

OTHER = "other"
"""The value of a label for a model or class that this gateway doesn't know."""
MOST_CLASSES = 64
"""Classes with series of their own; a policy may name more, and they share :data:`OTHER`."""
MOST_ERRORS = 64
"""Values of ``error.type`` with series of their own."""
MOST_HEADS = 16
MOST_RANKS = 5
"""Heads and ranks with an accuracy series of their own."""
WINDOW_S = 60.0
"""Gauges that are rates or ratios are over the last minute; without evidence in it they have no series."""

_UNIT_SUFFIXES = {"s": "seconds", "By": "bytes"}


@dataclass(frozen=True, slots=True)
class Metric:
    """``labels``: every attribute that a series may have. ``buckets``: upper bounds of a histogram, in ``unit``."""

    name: str
    kind: Kind
    unit: str
    description: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def prometheus(self) -> str:
        """The name of the series in Prometheus; histograms add ``_bucket``, ``_sum`` and ``_count``."""
        name = re.sub(r"[^A-Za-z0-9:]+", "_", self.name)
        suffix = _UNIT_SUFFIXES.get(re.sub(r"\{.*\}", "", self.unit), "")
        name = f"{name}_{suffix}" if suffix else name
        return f"{name}_total" if self.kind == "counter" else name


MODEL, CLASS = "model", "class"
_BY_CLASS = (MODEL, CLASS)
_ENGINE = (MODEL, "backend")
"""A model may have several engines; each is a backend with a name of its own."""
_GEN_AI = ("gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model", CLASS)

# The convention's buckets begin at 10 ms; a small model's tokens come in one or two.
_LATENCY = (
    *(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0),
)
# A whole answer: thousands of tokens of a slow model take many minutes.
_DURATION = (*_LATENCY, 320.0, 640.0, 1280.0, 2560.0)
_PER_TOKEN = (
    *(0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5),
)
_ROWS = (1.0, 2.0, 4.0, 8.0, 16.0, 24.0, 32.0, 48.0, 64.0, 96.0, 128.0, 192.0, 256.0, 512.0, 1024.0)

# What speculation does.

ACCEPTANCE_RATE = Metric(
    "speculative_acceptance_rate",
    "gauge",
    "",
    "Accepted share of draft tokens, of requests that speculate by the policy, over the last minute.",
    _BY_CLASS,
)
SPEEDUP_FACTOR = Metric(
    "speculative_speedup_factor",
    "gauge",
    "",
    "Cost of the same tokens by vanilla decoding over the cost of decoding as done, by the cost table, last minute.",
    _BY_CLASS,
)
HEAD_ACCURACY = Metric(
    "medusa_head_accuracy",
    "gauge",
    "",
    "How often a head's guess of a rank (1: the likeliest) was right where it could be checked, over the last minute.",
    (*_BY_CLASS, "head", "rank"),
)
HEAD_ACCURACY_PRIOR = Metric(
    "medusa_head_accuracy_prior",
    "gauge",
    "",
    "The long memory of medusa_head_accuracy, which a sudden drop is to be compared with.",
    (*_BY_CLASS, "head", "rank"),
)
FALLBACK_COUNT = Metric(
    "speculative_fallback_count",
    "counter",
    "{fallback}",
    "Fallbacks of a class to vanilla decoding, because speculation did not pay.",
    _BY_CLASS,
)
FALLBACK_ACTIVE = Metric(
    "speculative_fallback_active", "gauge", "", "1 while a class is in fallback to vanilla decoding, else 0.", _BY_CLASS
)
STEPS = Metric("speculative_steps", "counter", "{step}", "Decode steps, counted for each sequence in them.", _BY_CLASS)
DRAFTS = Metric(
    "speculative_drafts", "counter", "{draft}", "Decode steps of a sequence that had candidates.", _BY_CLASS
)
DRAFT_TOKENS = Metric(
    "speculative_draft_tokens", "counter", "{token}", "Candidate tokens that were verified.", _BY_CLASS
)
ACCEPTED_TOKENS = Metric(
    "speculative_accepted_tokens", "counter", "{token}", "Candidate tokens that were accepted.", _BY_CLASS
)
EMITTED_TOKENS = Metric(
    "speculative_emitted_tokens",
    "counter",
    "{token}",
    "Tokens that decode steps emitted, by whatever method.",
    _BY_CLASS,
)
VANILLA_TIME = Metric(
    "medusa_vanilla_time",
    "counter",
    "s",
    "Engine time that vanilla decoding of the same tokens in the same batches would have taken.",
    _BY_CLASS,
)
DECODE_TIME = Metric(
    "medusa_decode_time", "counter", "s", "Engine time that decoding took, counted as that of vanilla is.", _BY_CLASS
)
COST_SAVED = Metric(
    "medusa_cost_saved",
    "gauge",
    "",
    "Money that speculation has saved since the start, by the policy's price; negative where it cost more.",
    (*_BY_CLASS, "currency"),
)
CONTROL_DISAGREEMENT = Metric(
    "speculative_control_prediction_ratio",
    "gauge",
    "",
    "Measured over predicted time of vanilla requests, over the last minute; 1 when the cost table is right.",
    _BY_CLASS,
)

# Requests, by OpenTelemetry's conventions for GenAI servers.

REQUEST_DURATION = Metric(
    "gen_ai.server.request.duration",
    "histogram",
    "s",
    "Time from the arrival of a request to the end of its answer.",
    (*_GEN_AI, "error.type"),
    _DURATION,
)
TIME_TO_FIRST_TOKEN = Metric(
    "gen_ai.server.time_to_first_token",
    "histogram",
    "s",
    "Time from the arrival of a request to its first token.",
    _GEN_AI,
    _LATENCY,
)
TIME_PER_OUTPUT_TOKEN = Metric(
    "gen_ai.server.time_per_output_token",
    "histogram",
    "s",
    "Time for each token of a sequence after its first.",
    _GEN_AI,
    _PER_TOKEN,
)

# The engine.

QUEUE_DEPTH = Metric("medusa_queue_depth", "gauge", "{sequence}", "Sequences that wait for the engine.", _ENGINE)
QUEUE_OLDEST_AGE = Metric(
    "medusa_queue_oldest_age", "gauge", "s", "How long the sequence at the head of the queue has waited.", _ENGINE
)
RUNNING_SEQUENCES = Metric(
    "medusa_running_sequences", "gauge", "{sequence}", "Sequences that are being decoded.", _ENGINE
)
KV_PAGES_USED = Metric("medusa_kv_pages_used", "gauge", "{page}", "Pages of the KV cache in use.", _ENGINE)
KV_PAGES_LIMIT = Metric("medusa_kv_pages_limit", "gauge", "{page}", "Pages of the KV cache.", _ENGINE)
KV_USE = Metric(
    "medusa_kv_use_ratio",
    "gauge",
    "",
    "Used share of the KV cache, 0 to 1, for autoscalers and balancers that read one number.",
    _ENGINE,
)
ENGINE_UP = Metric("medusa_engine_up", "gauge", "", "1 while the model's engine takes requests, else 0.", _ENGINE)
HEADS_STALE = Metric(
    "medusa_heads_stale",
    "gauge",
    "",
    "1 when the model's heads were trained for another backbone, else 0; no series where that is not known.",
    _ENGINE,
)
STEP_DURATION = Metric(
    "medusa_step_duration",
    "histogram",
    "s",
    "Time of an engine step. Kind: prefill (with prompt rows), verification (with candidates) or vanilla.",
    (*_ENGINE, "kind"),
    _PER_TOKEN,
)
STEP_ROWS = Metric(
    "medusa_step_rows", "histogram", "{row}", "Rows of an engine step, by kind of step.", (*_ENGINE, "kind"), _ROWS
)
VANILLA_STEP = Metric(
    "medusa_vanilla_step_duration",
    "gauge",
    "s",
    "What a step of the last minute's batches costs without candidates, by the measured cost table; mean.",
    _ENGINE,
)
VERIFICATION_RATIO = Metric(
    "medusa_verification_step_ratio",
    "gauge",
    "",
    "Measured time of steps with candidates over the table's time of the same batches without, over the last minute.",
    _ENGINE,
)

# What decisions rest on.

REDIS_UP = Metric("medusa_redis_up", "gauge", "", "1 while the statistics store answers, else 0.")
POLICY_RELOADS = Metric(
    "medusa_policy_reloads",
    "counter",
    "{reload}",
    "Edits of the policy file, by outcome: accepted or rejected.",
    ("outcome",),
)
ALERT_STATE = Metric(
    "medusa_alert_state",
    "gauge",
    "",
    "State of an alert of the policy: 0 inactive, 1 pending, 2 firing.",
    ("alert", "severity", MODEL, CLASS),
)

METRICS: tuple[Metric, ...] = (
    *(ACCEPTANCE_RATE, SPEEDUP_FACTOR, HEAD_ACCURACY, HEAD_ACCURACY_PRIOR, FALLBACK_COUNT, FALLBACK_ACTIVE),
    *(STEPS, DRAFTS, DRAFT_TOKENS, ACCEPTED_TOKENS, EMITTED_TOKENS, CONTROL_DISAGREEMENT),
    *(VANILLA_TIME, DECODE_TIME, COST_SAVED),
    *(REQUEST_DURATION, TIME_TO_FIRST_TOKEN, TIME_PER_OUTPUT_TOKEN),
    *(QUEUE_DEPTH, QUEUE_OLDEST_AGE, RUNNING_SEQUENCES, KV_PAGES_USED, KV_PAGES_LIMIT, KV_USE, ENGINE_UP),
    *(HEADS_STALE, STEP_DURATION, STEP_ROWS, VANILLA_STEP, VERIFICATION_RATIO),
    *(REDIS_UP, POLICY_RELOADS, ALERT_STATE),
)
BY_NAME = {metric.name: metric for metric in METRICS}

# Spans of a request: the server span is named "{operation} {model}", its children:
CHILD_SPANS = ("classify", "decide", "queue", "prefill", "decode")
FALLBACK_EVENT = "speculation.fallback"
"""Event of a decode span: the sequence stopped drafting, for a while or for good, or its class is in fallback."""


class Attributes:
    """Attributes of spans that are this gateway's own; the others are those of OpenTelemetry's conventions.

    Fields of a JSON log line that belongs to a request use the same names.
    """

    REQUEST_ID = "medusa.request.id"
    SEQUENCES = "medusa.sequences"
    CLASS = "medusa.class"
    CLASS_SOURCE = "medusa.class.source"
    RULE = "medusa.rule"
    REASON = "medusa.reason"
    ARM = "medusa.arm"
    POLICY_VERSION = "medusa.policy.version"
    PLAN_METHOD = "medusa.plan.method"
    PLAN_HEADS = "medusa.plan.heads"
    PLAN_MAX_NODES = "medusa.plan.max_nodes"
    PLAN_TREE = "medusa.plan.tree"
    PLAN_ACCEPTANCE = "medusa.plan.acceptance"
    PLAN_TEMPERATURE = "medusa.plan.temperature"
    STATS_SOURCE = "medusa.stats.source"
    STATS_AGE = "medusa.stats.age_s"
    STATS_STEPS = "medusa.stats.steps"
    STATS_SPEEDUP = "medusa.stats.speedup"
    STATS_ACCEPTANCE_RATE = "medusa.stats.acceptance_rate"
    STATS_TOKENS_PER_STEP = "medusa.stats.tokens_per_step"
    STATS_HEAD_ACCURACY = "medusa.stats.head_accuracy"
    PROMPT_TOKENS = "medusa.prompt_tokens"
    CHOICE = "medusa.choice"
    STEPS = "medusa.decode.steps"
    MEDUSA_STEPS = "medusa.decode.medusa_steps"
    DRAFTED = "medusa.decode.drafted_tokens"
    ACCEPTED = "medusa.decode.accepted_tokens"
    EMITTED = "medusa.decode.emitted_tokens"
    SPEEDUP = "medusa.decode.speedup"
    FINISH_REASON = "medusa.decode.finish_reason"
