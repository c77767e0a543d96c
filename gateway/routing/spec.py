"""What an operator says about backends, as the backends file is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from backends.engine.options import EngineOptions
from gateway.routing.circuit_breaker import BreakerSettings

FORMAT_VERSION = 1
Dialect = Literal["openai", "vllm", "sglang", "llamacpp", "medusa-gateway"]
SpeculationMethod = Literal["ngram", "eagle", "medusa", "draft", "mtp"]

SAMPLING_EXTENSIONS = ("top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids")
VLLM_FORMATS = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
OTHER_FORMATS = ("regex", "ebnf", "json_schema", "grammar")
"""Fields beyond OpenAI's that say what an answer must look like: vLLM's, and those of SGLang and llama.cpp."""
EXTENSIONS: Mapping[str, tuple[str, ...]] = {
    "openai": (),
    "vllm": (*SAMPLING_EXTENSIONS, *VLLM_FORMATS, "cache_salt"),
    "sglang": (*SAMPLING_EXTENSIONS, *VLLM_FORMATS),
    "llamacpp": ("top_k", "min_p", "ignore_eos", "grammar", "json_schema"),
    "medusa-gateway": (*SAMPLING_EXTENSIONS, *VLLM_FORMATS, *OTHER_FORMATS, "cache_salt", "decoding"),
}
"""The fields beyond OpenAI's that an upstream of each dialect honours."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Which requests a backend gets. ``priority``: lower is asked first. ``classes`` None: prompts of every class."""

    priority: int = 0
    classes: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """An engine of this process. ``options.threads`` None: the machine's cores, shared evenly by the CPU engines of the
    file."""

    name: str
    serves: str
    placement: Placement = field(default_factory=Placement)
    options: EngineOptions = field(default_factory=EngineOptions)


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds. ``first_byte``: from the request to the first event that says something; ``between_bytes``: from one
    piece of the answer to the next; ``total``: for all of it."""

    connect_s: float = 2.0
    first_byte_s: float = 60.0
    between_bytes_s: float = 30.0
    total_s: float = 600.0


@dataclass(frozen=True, slots=True)
class HealthCheck:
    """``GET path`` below the URL every ``every_s``; ``failures`` in a row make it unhealthy, one success well again."""

    path: str = "/models"
    every_s: float = 5.0
    timeout_s: float = 2.0
    failures: int = 2


@dataclass(frozen=True, slots=True)
class Variant:
    """How an upstream decodes, as the operator says. Upstreams of one model with the same ``name`` are one arm.

    ``method`` None: it drafts nothing. ``tokens``: drafts of a step; None: not said.
    """

    name: str
    method: SpeculationMethod | None = None
    tokens: int | None = None

    @property
    def plain(self) -> bool:
        return self.method is None


PLAIN = Variant("plain")


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """Where an upstream shows figures of its own, from the root of its server, and how often they are read."""

    path: str = "/metrics"
    every_s: float = 5.0


@dataclass(frozen=True, slots=True)
class UpstreamSpec:
    """A server elsewhere. ``url`` ends where OpenAI's does, mostly in ``/v1``. At most one of ``api_key_env`` and
    ``api_key_file`` is set. ``max_running``: sequences that it is expected to run at once; ``max_in_flight``: most that
    it is ever sent. ``ca_file``: certificates to trust instead of the system's. ``variant`` None: how it decodes is not
    said, so it is no arm. ``per_hour``: what it costs, for arms that are chosen by cost. ``metrics`` None: its own
    figures are not read."""

    name: str
    serves: str
    url: str
    placement: Placement = field(default_factory=Placement)
    upstream_model: str = ""
    dialect: Dialect = "openai"
    api_key_env: str | None = None
    api_key_file: str | None = None
    ca_file: str | None = None
    max_running: int = 32
    max_in_flight: int = 128
    timeouts: Timeouts = field(default_factory=Timeouts)
    breaker: BreakerSettings = field(default_factory=BreakerSettings)
    health: HealthCheck = field(default_factory=HealthCheck)
    variant: Variant | None = None
    per_hour: float = 1.0
    metrics: EngineMetrics | None = None


BackendSpec = EngineSpec | UpstreamSpec


@dataclass(frozen=True, slots=True)
class BackendsSpec:
    """A whole file. ``required``: the models without which the gateway is not ready."""

    file: str
    backends: tuple[BackendSpec, ...]
    required: frozenset[str]
    retries: int = 2

    @property
    def engines(self) -> tuple[EngineSpec, ...]:
        return tuple(each for each in self.backends if isinstance(each, EngineSpec))

    @property
    def upstreams(self) -> tuple[UpstreamSpec, ...]:
        return tuple(each for each in self.backends if isinstance(each, UpstreamSpec))
