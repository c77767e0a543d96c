"""Names of spans, their events and attributes, and of the fields of log lines."""

from __future__ import annotations

# Spans of a request: the server span is named "{operation} {model}", its children:
CHILD_SPANS = ("classify", "decide", "queue", "prefill", "decode")
FALLBACK_EVENT = "speculation.fallback"
"""Event of a decode span: the sequence stopped drafting, for a while or for good, or its class is in fallback."""


class Attributes:
    """Attributes of spans that are this gateway's own; the others are those of OpenTelemetry's conventions.

    Fields of a JSON log line that belongs to a request use the same names.
    """

    REQUEST_ID = "medusa.request.id"
    TENANT = "medusa.tenant"
    BACKEND = "medusa.backend"
    ATTEMPTS = "medusa.upstream.attempts"
    UPSTREAM_ARM = "medusa.upstream.arm"
    UPSTREAM_ARM_RULE = "medusa.upstream.arm_rule"
    OUTCOME = "medusa.outcome"
    REPLICA = "medusa.replica"
    DEADLINE = "medusa.deadline_s"
    DEADLINE_OF = "medusa.deadline.set_by"
    CONTROL_SHARE = "medusa.control_share"
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
