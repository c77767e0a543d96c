"""The decision on one request: pure, from the policy, the statistics and what is known of the request."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from backends.tree import MAX_DEPTH, CandidateTree
from backends.types import Acceptance, Method
from policy.spec import PolicySpec, RequestFacts, Settings, WantedMethod
from policy.statistics.counters import Arm, temperature_bucket
from policy.statistics.snapshot import KeyStats, LiveStats

DEFAULT_TEMPERATURE = 1.0
_LOT_KEY = b"medusa-gateway control and probe"


class Stage(NamedTuple):
    """One step on the way to a decision: what it set, and why."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True, slots=True)
class Decision:
    """How a request is decoded, and how that came about. Nothing in it is unknown to whoever asks for it.

    ``temperature`` is the one to sample with; ``client_temperature`` the one that was asked for. ``stats_age_s`` None:
    there are no statistics yet. ``arm`` says whose books the request's counters go to. ``most_heads`` and
    ``most_nodes`` bound what a client may ask for, where ``client_override`` lets it ask. ``control_share``: of the
    requests like this one, which part is drawn to decode vanilla; None where none is. ``most_depth`` and ``wanted``:
    the policy's own bound on levels, and its method, whatever the model has: for upstreams.
    """

    method: Method
    num_heads: int
    max_nodes: int
    tree: CandidateTree | None
    acceptance: Acceptance
    temperature: float
    client_temperature: float | None
    deadline_s: float | None
    client_override: bool
    lookup: bool
    most_heads: int
    most_nodes: int
    rule: str
    policy_version: str
    arm: Arm
    bucket: str
    stats_age_s: float | None
    stats_source: str
    stages: tuple[Stage, ...]
    control_share: float | None = None
    most_depth: int = MAX_DEPTH
    wanted: WantedMethod = "auto"

    @property
    def group(self) -> str:
        """Whose this request is, for people: "control" only where it was drawn to be compared with; else "vanilla"
        where the policy or the model lets it draft nothing, or as ``arm`` has it."""
        if self.arm != "control" or any(stage.name == "control" for stage in self.stages):
            return self.arm
        return "vanilla"

    @property
    def reason(self) -> str:
        return "; ".join(stage.reason for stage in self.stages)

    @property
    def probes(self) -> bool:
        """Whether this request is to measure a class in fallback."""
        return any(stage.name == "fallback" and stage.value == "probe" for stage in self.stages)

    def with_stage(self, stage: Stage, **changes: Any) -> Decision:
        return replace(self, stages=(*self.stages, stage), **changes)

    def as_dict(self) -> dict[str, Any]:
        tree = None if self.tree is None else [list(path) for path in self.tree.nodes]
        return {
            "method": self.method,
            "heads": self.num_heads,
            "max_nodes": self.max_nodes,
            "tree": tree,
            "acceptance": self.acceptance,
            "temperature": self.temperature,
            "client_temperature": self.client_temperature,
            "deadline_s": self.deadline_s,
            "client_override": self.client_override,
            "lookup": self.lookup,
            "most_heads": self.most_heads,
            "most_nodes": self.most_nodes,
            "rule": self.rule,
            "reason": self.reason,
            "policy_version": self.policy_version,
            "arm": self.arm,
            "group": self.group,
            "control_share": self.control_share,
            "temperature_bucket": self.bucket,
            "stats_age_s": None if self.stats_age_s is None else round(self.stats_age_s, 3),
            "stats_source": self.stats_source,
            "stages": [stage._asdict() for stage in self.stages],
        }


def lot(request_id: str) -> float:
    """A number in [0, 1) that belongs to a request id: the same on every replica, and nobody's choice."""
    digest = hashlib.blake2b(request_id.encode("utf-8", "surrogatepass"), digest_size=7, key=_LOT_KEY).digest()
    return int.from_bytes(digest, "big") / 2.0**56


def decide(spec: PolicySpec, stats: LiveStats, facts: RequestFacts, now: float, *, probe_due: bool = False) -> Decision:
    """How to decode the request. ``probe_due``: a class in fallback has gone unmeasured for long enough."""
    index, settings = spec.select(facts)
    rule = spec.rule_name(index, facts.class_name)
    stages = [] if index < 0 else [Stage("rule", rule, f"rule '{rule}' is the first that matches")]
    temperature = _temperature(settings, facts, stages)
    bucket = temperature_bucket(temperature)
    found = stats.find(facts.model, facts.class_name, bucket)
    method, arm = _method(spec, settings, stats, facts, stages, probe_due)
    control = spec.of_class(facts.class_name).control
    heads, nodes, tree = 0, 0, None
    if method == "medusa":
        heads, nodes, tree = _shape(settings, found, facts, stages)
    return Decision(
        method=method,
        num_heads=heads,
        max_nodes=nodes,
        tree=tree,
        # Typical acceptance compares drafts with the model; without drafts there is nothing to be lossy about.
        acceptance=settings.acceptance if method == "medusa" else "exact",
        temperature=temperature,
        client_temperature=facts.temperature,
        deadline_s=settings.deadline_s,
        client_override=settings.client_override,
        lookup=settings.lookup and method == "medusa",
        most_heads=min(settings.max_heads, facts.model_heads),
        most_nodes=settings.nodes.high,
        rule=rule,
        policy_version=spec.version,
        arm=arm,
        bucket=bucket,
        stats_age_s=None if found is None else max(now - found.updated_at, 0.0),
        stats_source=stats.source,
        stages=tuple(stages),
        most_depth=settings.max_heads,
        wanted=settings.method,
        control_share=None if {"method", "fallback"} & {stage.name for stage in stages} else control or None,
    )


def temperature_of(settings: Settings, facts: RequestFacts) -> float:
    """The temperature that a request is sampled with."""
    return _temperature(settings, facts, [])


def _temperature(settings: Settings, facts: RequestFacts, stages: list[Stage]) -> float:
    limits, asked = settings.temperature, facts.temperature
    value = asked
    if value is None:
        value = DEFAULT_TEMPERATURE if limits.default is None else limits.default
        if limits.default is not None:
            stages.append(Stage("temperature", f"{value:g}", f"temperature {value:g} is the policy's default"))
    clamped = value
    if limits.low is not None:
        clamped = max(clamped, limits.low)
    if limits.high is not None:
        clamped = min(clamped, limits.high)
    if clamped != value:
        whose = "OpenAI's default" if asked is None else "asked for"
        why = f"temperature {value:g} ({whose}) is clamped to {clamped:g} by the policy"
        stages.append(Stage("temperature", f"{clamped:g}", why))
    return clamped


def _method(
    spec: PolicySpec,
    settings: Settings,
    stats: LiveStats,
    facts: RequestFacts,
    stages: list[Stage],
    probe_due: bool,
) -> tuple[Method, Arm]:
    if facts.model_heads == 0:
        stages.append(Stage("method", "vanilla", f"{facts.model} has no Medusa heads"))
        return "vanilla", "control"
    if settings.method != "auto":
        stages.append(Stage("method", settings.method, f"the policy sets method {settings.method}"))
        return settings.method, "policy" if settings.method == "medusa" else "control"
    state = stats.fallbacks.get((facts.model, facts.class_name))
    of_class = spec.of_class(facts.class_name)
    if state is not None and state.mode == "fallback":
        speedup = "unknown" if state.speedup is None else f"{state.speedup:.3f}"
        if probe_due or lot(facts.request_id) >= 1.0 - of_class.fallback.probe:
            why = (
                f"{facts.class_name} is in fallback (speedup {speedup}), and this request probes whether it pays again"
            )
            stages.append(Stage("fallback", "probe", why))
            return "medusa", "policy"
        cause = state.held or f"speculation does not pay for {facts.class_name} (measured speedup {speedup})"
        why = f"{cause}: fallback to vanilla"
        stages.append(Stage("fallback", "vanilla", why))
        return "vanilla", "control"
    if lot(facts.request_id) < of_class.control:
        why = "this request is in the control group, which decodes vanilla to check the predicted speedup"
        stages.append(Stage("control", "vanilla", why))
        return "vanilla", "control"
    return "medusa", "policy"


def _shape(
    settings: Settings, found: KeyStats | None, facts: RequestFacts, stages: list[Stage]
) -> tuple[int, int, CandidateTree | None]:
    """Heads, nodes and tree, within what the policy allows and the model has."""
    most_heads = min(settings.max_heads, facts.model_heads)
    if isinstance(settings.tree, CandidateTree):
        tree = settings.tree.clamp(heads=facts.model_heads)
        cut = "" if tree is settings.tree else f", cut to the {facts.model_heads} heads of {facts.model}"
        stages.append(Stage("tree", f"{len(tree)} nodes", f"the policy gives the tree{cut}"))
        return tree.depth, len(tree), tree
    proposal = None if found is None else found.proposal
    if proposal is None:
        unknown = (
            f"no statistics of {facts.class_name} yet"
            if found is None
            else f"too few drafts of {facts.class_name} were checked yet"
        )
        why = (
            f"{facts.model} has {facts.model_heads} Medusa heads; {unknown}, so all that the policy allows may be used"
        )
        stages.append(Stage("statistics", f"{most_heads} heads, {settings.nodes.high} nodes", why))
        return most_heads, settings.nodes.high, None
    heads = max(min(proposal.heads, most_heads), min(settings.heads.low, most_heads))
    nodes = settings.nodes.clamp(proposal.nodes)
    tree = None
    if settings.tree == "measured" and proposal.tree is not None:
        tree = proposal.tree.clamp(heads=heads, nodes=nodes)
        heads, nodes = tree.depth, len(tree)
    clamped = " within the policy's bounds" if (heads, nodes) != (proposal.heads, proposal.nodes) else ""
    why = f"measured acceptance of {facts.class_name} speaks for {heads} heads and {nodes} nodes{clamped}"
    stages.append(Stage("statistics", f"{heads} heads, {nodes} nodes", why))
    return heads, nodes, tree
