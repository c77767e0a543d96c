"""The statistics as decisions read them: an immutable snapshot, made about once a second, never on a request's path."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from policy.fallback import FallbackState
from policy.planner import Proposal, propose
from policy.statistics.counters import StatsKey, sum_tallies
from policy.statistics.estimate import Estimate


@dataclass(frozen=True, slots=True)
class KeyStats:
    """Derived once per refresh. ``steps`` is the weight of the evidence after decay, not a count of all time."""

    steps: float
    speedup: float | None
    tokens_per_step: float | None
    acceptance_rate: float | None
    accuracies: tuple[tuple[float, ...], ...]
    proposal: Proposal | None
    updated_at: float
    from_prior: bool
    shifts: int

    @classmethod
    def of(cls, estimate: Estimate) -> KeyStats:
        slow = estimate.slow
        accuracies = slow.accuracies
        return cls(
            steps=slow.steps,
            speedup=slow.speedup,
            tokens_per_step=slow.tokens_per_step,
            acceptance_rate=slow.acceptance_rate,
            accuracies=tuple(map(tuple, accuracies)),
            proposal=propose(accuracies, slow.attempts),
            updated_at=estimate.updated_at,
            from_prior=estimate.from_prior,
            shifts=estimate.shifts,
        )

    @property
    def first_accuracy(self) -> float | None:
        """How often any guess of the first head is right; None without enough evidence for a proposal."""
        return sum(self.accuracies[0]) if self.proposal is not None and self.accuracies else None

    def as_dict(self, now: float) -> dict[str, Any]:
        return {
            "steps": round(self.steps, 1),
            "speedup": _rounded(self.speedup),
            "tokens_per_step": _rounded(self.tokens_per_step),
            "acceptance_rate": _rounded(self.acceptance_rate),
            "head_accuracy": [[round(rate, 4) for rate in ranks] for ranks in self.accuracies],
            "proposed_heads": self.proposal.heads if self.proposal else None,
            "proposed_nodes": self.proposal.nodes if self.proposal else None,
            "age_s": round(now - self.updated_at, 3),
            "from_prior": self.from_prior,
            "shifts": self.shifts,
        }


@dataclass(frozen=True, slots=True)
class LiveStats:
    """What the fleet (or, without a store, this replica) has measured lately.

    ``by_key`` is by (model, class, temperature bucket), ``by_class`` by (model, class); only requests that the policy
    lets speculate count. ``source``: "fleet" or "local".
    """

    taken_at: float = 0.0
    source: str = "local"
    by_key: Mapping[tuple[str, str, str], KeyStats] = field(default_factory=dict)
    by_class: Mapping[tuple[str, str], KeyStats] = field(default_factory=dict)
    fallbacks: Mapping[tuple[str, str], FallbackState] = field(default_factory=dict)

    def find(self, model: str, class_name: str, bucket: str) -> KeyStats | None:
        """The nearest statistics there are: of the temperature bucket, else of the class at any temperature."""
        found = self.by_key.get((model, class_name, bucket))
        if found is None or found.proposal is None:
            return self.by_class.get((model, class_name), found)
        return found


def live_stats(
    estimates: Mapping[StatsKey, Estimate],
    fallbacks: Mapping[tuple[str, str], FallbackState],
    *,
    now: float,
    source: str,
    previous: LiveStats,
) -> LiveStats:
    """A new snapshot; what has not changed since ``previous`` is taken over from it."""
    by_key: dict[tuple[str, str, str], KeyStats] = {}
    members: dict[tuple[str, str], list[Estimate]] = {}
    changed: set[tuple[str, str]] = set()
    for key, estimate in estimates.items():
        if key.arm != "policy":
            continue
        short = key.model, key.class_name, key.bucket
        before = previous.by_key.get(short)
        if before is not None and before.updated_at == estimate.updated_at and before.steps == estimate.slow.steps:
            by_key[short] = before
        else:
            by_key[short] = KeyStats.of(estimate)
            changed.add(short[:2])
        members.setdefault(short[:2], []).append(estimate)
    by_class = {
        name: previous.by_class[name]
        if name not in changed and name in previous.by_class
        else KeyStats.of(_merged(estimates_of_class))
        for name, estimates_of_class in members.items()
    }
    return LiveStats(now, source, by_key, by_class, dict(fallbacks))


def _merged(estimates: list[Estimate]) -> Estimate:
    if len(estimates) == 1:
        return estimates[0]
    return Estimate(
        slow=sum_tallies(each.slow for each in estimates),
        updated_at=max(each.updated_at for each in estimates),
        shifts=sum(each.shifts for each in estimates),
        from_prior=all(each.from_prior for each in estimates),
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
