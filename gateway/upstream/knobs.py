"""What an upstream is told, request by request, of the policy's bounds on drafting. Pure.

Only what narrows what the server was started with is sent: a server knows its own defaults best.
"""

from __future__ import annotations

from typing import Any

from backends.tree import MAX_DEPTH
from gateway.routing.spec import Dialect, Variant
from policy.decision import Decision


def knobs(dialect: Dialect, variant: Variant | None, decision: Decision) -> dict[str, Any]:
    """Fields of the body. ``variant`` None: how it was started is not known."""
    if variant is not None and variant.plain:
        return {}
    most = min(decision.most_depth, decision.most_nodes)
    started_with = None if variant is None else variant.tokens
    narrower = most < (MAX_DEPTH if started_with is None else started_with)
    if decision.wanted == "vanilla":
        most, narrower = 0, True
    if not narrower:
        return {}
    if dialect == "llamacpp":
        # Its minimum would hold more drafts back than the maximum lets through.
        return {"speculative.n_max": most, "speculative.n_min": 0}
    if dialect == "medusa-gateway":
        if most == 0:
            return {"decoding": {"method": "vanilla"}}
        # More heads than it has would be refused, so they are only named where it said how many there are.
        return {} if started_with is None else {"decoding": {"heads": most}}
    return {}
