"""Every metric, span and log attribute by name: what dashboards, alert rules and tests may rely on.

Names and units are chosen so that Prometheus calls a metric the same whether it scrapes ``/metrics`` or takes OTLP:
dots become underscores, a unit becomes a suffix, counters end in ``_total``. So no unit is "1", which only one of the
two ways turns into ``_ratio``; annotations in braces are dropped by both.

Label sets are closed: models are those served, classes those of the policy; whatever else turns up is :data:`OTHER`.
"""

from __future__ import annotations

from policy.alerts import LATENCY_BOUNDS, PER_TOKEN_BOUNDS
from telemetry.metric import Metric

OTHER = "other"
"""The value of a label for a model or class that this gateway doesn't know."""
MOST_CLASSES = 64
"""Classes with series of their own; a policy may name more, and they share :data:`OTHER`."""
MOST_ERRORS = 64
"""Values of ``error.type`` with series of their own."""
MOST_TENANTS = 256
"""Keys with series of their own, where series are by tenant at all."""
MOST_HEADS, MOST_RANKS = 16, 5
"""Heads and ranks with an accuracy series of their own."""
WINDOW_S = 60.0
"""Gauges that are rates or ratios are over the last minute; without evidence in it they have no series."""

MODEL, CLASS = "model", "class"
_BY_CLASS = (MODEL, CLASS)
_ENGINE = (MODEL, "backend")
"""A model may have several engines; each is a backend with a name of its own."""
_REQUEST = (*_BY_CLASS, "backend", "tenant")
"""``tenant`` is the API key's name, and empty unless the operator wants series by tenant."""
_GEN_AI = ("gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model", CLASS)

# The convention's buckets begin at 10 ms; a small model's tokens come in one or two.
_LATENCY = LATENCY_BOUNDS
# A whole answer: thousands of tokens of a slow model take many minutes.
_DURATION = (*_LATENCY, 320.0, 640.0, 1280.0, 2560.0)
_PER_TOKEN = PER_TOKEN_BOUNDS
_PER_STEP = (1.0, 1.1, 1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0)
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
_OF_TENANT = (CLASS, "tenant")
TENANT_TIME_SAVED = Metric(
    "medusa_tenant_time_saved",
    "gauge",
    "s",
    "Engine time that speculation has saved a tenant since the start; only where series are by tenant.",
    _OF_TENANT,
)
TENANT_COST_SAVED = Metric(
    "medusa_tenant_cost_saved",
    "gauge",
    "",
    "Money of that time, by the policy's price.",
    (*_OF_TENANT, "currency"),
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

LONGEST_GAP = Metric(
    "medusa_longest_token_gap",
    "histogram",
    "s",
    "Longest time between two pieces of a streamed answer, one value for each answer.",
    _BY_CLASS,
    _LATENCY,
)
QUEUE_WAIT = Metric(
    "medusa_queue_wait",
    "histogram",
    "s",
    "Time that a sequence waited for the engine before it was admitted.",
    _BY_CLASS,
    _LATENCY,
)
PREFILL_DURATION = Metric(
    "medusa_prefill_duration",
    "histogram",
    "s",
    "Time from a sequence's admission to the engine to its first token.",
    _BY_CLASS,
    _LATENCY,
)
TOKENS_PER_STEP = Metric(
    "medusa_tokens_per_step",
    "histogram",
    "{token}",
    "Tokens for each decode step of a sequence, its mean, one value for each sequence; 1 without accepted drafts.",
    _BY_CLASS,
    _PER_STEP,
)
REQUESTS = Metric(
    "medusa_requests",
    "counter",
    "{request}",
    "Requests for an answer, by outcome: ok, server_error, limited (429), unauthorized (401, 403), client_error, left.",
    (*_REQUEST, "outcome"),
)
PROMPT_TOKENS = Metric(
    "medusa_prompt_tokens",
    "counter",
    "{token}",
    "Tokens of prompts, as counted by the engine or upstream, or estimated where an upstream does not say.",
    _REQUEST,
)
CACHED_TOKENS = Metric(
    "medusa_cached_prompt_tokens",
    "counter",
    "{token}",
    "Of the tokens of prompts, those that an engine found in its prefix cache; over all of them: the hit rate.",
    _REQUEST,
)
COMPLETION_TOKENS = Metric(
    "medusa_completion_tokens",
    "counter",
    "{token}",
    "Tokens of answers, also of those that were cut; counted or estimated as those of prompts.",
    _REQUEST,
)
DEADLINE_CUTS = Metric(
    "medusa_deadline_cuts", "counter", "{request}", "Requests with an answer that its deadline cut.", _BY_CLASS
)

# Backends, engines and upstreams alike.

BACKEND_UP = Metric(
    "medusa_backend_up", "gauge", "", "1 while nothing known speaks against asking the backend, else 0.", _ENGINE
)
BREAKER_STATE = Metric(
    "medusa_backend_breaker_state", "gauge", "", "An upstream's circuit: 0 closed, 1 half open, 2 open.", _ENGINE
)
BACKEND_REQUESTS = Metric(
    "medusa_backend_requests",
    "counter",
    "{request}",
    "Requests that went to an upstream, by outcome: completed, abandoned, refused, or how the upstream failed.",
    (*_ENGINE, "outcome"),
)
PLACES_USED = Metric(
    "medusa_places_used", "gauge", "{sequence}", "Places of a backend that sequences hold, queued ones too.", _ENGINE
)
PLACES_LIMIT = Metric(
    "medusa_places_limit", "gauge", "{sequence}", "Places of a backend; requests past that get 429.", _ENGINE
)

# The engine.

OPTIONAL_FAILURES = Metric(
    "medusa_optional_failures",
    "counter",
    "{failure}",
    "Failures of what the engine can do without (heads, planning, lookup, counting ...); answers went on.",
    (*_ENGINE, "part"),
)
QUEUE_DEPTH = Metric("medusa_queue_depth", "gauge", "{sequence}", "Sequences that wait for the engine.", _ENGINE)
QUEUE_OLDEST_AGE = Metric(
    "medusa_queue_oldest_age", "gauge", "s", "How long the sequence at the head of the queue has waited.", _ENGINE
)
RUNNING_SEQUENCES = Metric(
    "medusa_running_sequences", "gauge", "{sequence}", "Sequences that are being decoded.", _ENGINE
)
KV_PAGES_USED = Metric("medusa_kv_pages_used", "gauge", "{page}", "Pages of the KV cache in use.", _ENGINE)
KV_PAGES_LIMIT = Metric("medusa_kv_pages_limit", "gauge", "{page}", "Pages of the KV cache.", _ENGINE)
KV_PAGES_CACHED = Metric(
    "medusa_kv_pages_cached",
    "gauge",
    "{page}",
    "Pages of the KV cache that later prompts can begin with, in use or not.",
    _ENGINE,
)
CACHE_EVICTIONS = Metric(
    "medusa_prefix_cache_evictions",
    "counter",
    "{page}",
    "Pages of the prefix cache that had to give way to others.",
    _ENGINE,
)
PREEMPTIONS = Metric(
    "medusa_preemptions",
    "counter",
    "{sequence}",
    "Sequences that lost their pages to older ones, and went on later.",
    _ENGINE,
)
KV_USE = Metric(
    "medusa_kv_use_ratio",
    "gauge",
    "",
    "Used share of the KV cache, 0 to 1, for autoscalers and balancers that read one number.",
    _ENGINE,
)
_DEVICE = (*_ENGINE, "device")
DEVICE_MEMORY_USED = Metric(
    "medusa_device_memory_used", "gauge", "By", "Memory of an engine's accelerator that anybody holds.", _DEVICE
)
DEVICE_MEMORY_LIMIT = Metric("medusa_device_memory_limit", "gauge", "By", "Memory of an engine's accelerator.", _DEVICE)
DEVICE_UTILIZATION = Metric(
    "medusa_device_utilization_ratio",
    "gauge",
    "",
    "Share of the last moment in which an engine's accelerator ran anything, 0 to 1.",
    _DEVICE,
)
DEVICE_POWER = Metric("medusa_device_power", "gauge", "W", "What an engine's accelerator draws.", _DEVICE)
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
POLICY_REJECTED = Metric(
    "medusa_policy_rejected",
    "gauge",
    "",
    "1 while the policy file holds an edit that was refused: the next start with it will fail; else 0.",
)
KEYS_REJECTED = Metric(
    "medusa_keys_rejected",
    "gauge",
    "",
    "1 while the key file holds an edit that was refused: the next start with it will fail; else 0.",
)
FILE_HANGS = Metric(
    "medusa_file_hangs", "gauge", "", "1 while a file can't be read, since its file system hangs; else 0.", ("file",)
)
POLICY_INFO = Metric(
    "medusa_policy_info",
    "gauge",
    "",
    "Always 1; the version of the policy in force, to see replicas differ.",
    ("version",),
)
KEYS_INFO = Metric(
    "medusa_keys_info",
    "gauge",
    "",
    "Always 1; the version of the API keys in force, to see replicas differ.",
    ("version",),
)
BUILD_INFO = Metric(
    "medusa_build_info",
    "gauge",
    "",
    "Always 1; what runs, and the replica's id, which its answers carry in x-medusa-replica.",
    ("version", "replica", "python"),
)
REDIS_LATENCY = Metric(
    "medusa_redis_latency",
    "gauge",
    "s",
    "The last round with Redis, by use: statistics (several commands), limits (one call).",
    ("use",),
)
LIMITS_DECIDED_LOCALLY = Metric(
    "medusa_limits_decided_locally",
    "counter",
    "{request}",
    "Requests whose key's limits this replica judged by itself, since Redis did not answer.",
)
DRAINING = Metric("medusa_draining", "gauge", "", "1 while the replica drains before it stops, else 0.")
DRAIN_ABORTED = Metric(
    "medusa_drain_aborted", "counter", "{request}", "Requests that were cut since a drain ran out of patience."
)
LOOP_LAG = Metric(
    "medusa_event_loop_lag",
    "histogram",
    "s",
    "How much later than asked the event loop woke a sleeper, ten times a second: what held it up held up all streams.",
    (),
    _LATENCY,
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
    *(VANILLA_TIME, DECODE_TIME, COST_SAVED, TENANT_TIME_SAVED, TENANT_COST_SAVED),
    *(REQUEST_DURATION, TIME_TO_FIRST_TOKEN, TIME_PER_OUTPUT_TOKEN, LONGEST_GAP),
    *(QUEUE_WAIT, PREFILL_DURATION, TOKENS_PER_STEP, REQUESTS, PROMPT_TOKENS, CACHED_TOKENS, COMPLETION_TOKENS),
    *(DEADLINE_CUTS, KV_PAGES_CACHED, CACHE_EVICTIONS, PREEMPTIONS),
    *(BACKEND_UP, BREAKER_STATE, BACKEND_REQUESTS, PLACES_USED, PLACES_LIMIT, OPTIONAL_FAILURES),
    *(QUEUE_DEPTH, QUEUE_OLDEST_AGE, RUNNING_SEQUENCES, KV_PAGES_USED, KV_PAGES_LIMIT, KV_USE, ENGINE_UP),
    *(DEVICE_MEMORY_USED, DEVICE_MEMORY_LIMIT, DEVICE_UTILIZATION, DEVICE_POWER),
    *(HEADS_STALE, STEP_DURATION, STEP_ROWS, VANILLA_STEP, VERIFICATION_RATIO),
    *(REDIS_UP, REDIS_LATENCY, LIMITS_DECIDED_LOCALLY, POLICY_RELOADS, POLICY_REJECTED, KEYS_REJECTED, FILE_HANGS),
    *(POLICY_INFO, KEYS_INFO, BUILD_INFO, DRAINING, DRAIN_ABORTED, LOOP_LAG, ALERT_STATE),
)
BY_NAME = {metric.name: metric for metric in METRICS}

OUTCOMES = ("ok", "server_error", "limited", "unauthorized", "client_error", "left")
"""Values of ``outcome`` of ``medusa_requests``."""
