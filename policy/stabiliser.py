"""Keeps a plan from twitching with the noise of the statistics. Pure: what was held comes in, what is held goes out."""

from __future__ import annotations

from dataclasses import dataclass

from backends.tree import CandidateTree
from policy.decision import Decision, Stage

DEAD_BAND = 0.2
DEAD_BAND_NODES = 2
RAISE_HOLD_S = 5.0
"""A plan may shrink at once (too many nodes cost), but grows again only after it has stood for this long."""

HeldKey = tuple[str, str, str, str]
"""(model, class, temperature bucket, rule)"""


@dataclass(frozen=True, slots=True)
class Held:
    """The shape in force for one key, and since when."""

    num_heads: int
    max_nodes: int
    tree: CandidateTree | None
    since: float
    policy_version: str


def stabilise(decision: Decision, held: Held | None, now: float) -> tuple[Held | None, Decision]:
    """The decision, with the shape held where a change isn't due. Only shapes from statistics are held."""
    if decision.method != "medusa" or not any(stage.name == "statistics" for stage in decision.stages):
        return held, decision
    proposed = Held(decision.num_heads, decision.max_nodes, decision.tree, now, decision.policy_version)
    if held is None or held.policy_version != decision.policy_version:
        return proposed, decision
    if (held.num_heads, held.max_nodes, held.tree) == (proposed.num_heads, proposed.max_nodes, proposed.tree):
        return held, decision
    band = max(DEAD_BAND_NODES, DEAD_BAND * held.max_nodes)
    if held.num_heads == proposed.num_heads and abs(held.max_nodes - proposed.max_nodes) <= band:
        return held, _keep(decision, held, "dead-band", "the change is within the dead-band")
    grows = proposed.max_nodes > held.max_nodes or proposed.num_heads > held.num_heads
    if grows and now - held.since < RAISE_HOLD_S:
        return held, _keep(decision, held, "hold", f"the plan changed {now - held.since:.1f} s ago and may grow later")
    return proposed, decision


def _keep(decision: Decision, held: Held, name: str, why: str) -> Decision:
    stage = Stage(name, f"{held.num_heads} heads, {held.max_nodes} nodes", f"{held.max_nodes} nodes are kept: {why}")
    return decision.with_stage(stage, num_heads=held.num_heads, max_nodes=held.max_nodes, tree=held.tree)
