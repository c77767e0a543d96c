"""A policy as the decision sees it: settings by class and rule, already merged, and the rules that choose."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from backends.tree import MAX_DEPTH, CandidateTree
from backends.types import Acceptance, PrefillBudget
from policy.alerts import AlertRule, Receiver
from policy.names import Names

BUILT_IN_CLASSES = ("code", "chat", "creative", "unclassified")
"""The labels of the classifier that ships with the gateway, and the one for a prompt that nothing classified."""

FORMAT_VERSION = 1
Turn = Literal["first", "later"]
WantedMethod = Literal["auto", "medusa", "vanilla"]
Objective = Literal["latency", "throughput", "cost"]
"""By what upstreams that decode differently are compared."""
TreeChoice = Literal["auto", "measured"] | CandidateTree


@dataclass(frozen=True, slots=True)
class Range:
    """A closed interval; an end that is None is open."""

    low: float | None = None
    high: float | None = None

    def holds(self, value: float) -> bool:
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)


@dataclass(frozen=True, slots=True)
class Bounds:
    low: int
    high: int

    def clamp(self, value: int) -> int:
        return max(self.low, min(value, self.high))


@dataclass(frozen=True, slots=True)
class TemperatureLimits:
    """None: the operator says nothing, and the client's temperature is used as it is."""

    default: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class FallbackSettings:
    """When a class of a model stops speculating, and when it may come back.

    It stops when the speedup measured over ``window_s`` is under ``min_speedup``. For at least ``hold_s`` it then
    decodes vanilla but for the share ``probe`` of its requests, which go on measuring.
    """

    min_speedup: float = 1.0
    window_s: float = 5.0
    hold_s: float = 20.0
    probe: float = 0.05


@dataclass(frozen=True, slots=True)
class Cost:
    """The operator's price of an hour of the device (or machine) that an engine runs on. ``currency``: any word."""

    per_gpu_hour: float
    currency: str = "USD"

    def of(self, seconds: float) -> float:
        return seconds / 3600 * self.per_gpu_hour


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that a decision depends on, for one class under one rule.

    ``lookup``: whether candidates are also taken from what followed the same tokens earlier in the text.
    ``control``: the share of requests that decode vanilla so that the predicted speedup is checked against truth.
    """

    method: WantedMethod = "auto"
    heads: Bounds = Bounds(1, MAX_DEPTH)
    nodes: Bounds = Bounds(0, 32)
    depth: int = MAX_DEPTH
    tree: TreeChoice = "auto"
    acceptance: Acceptance = "exact"
    temperature: TemperatureLimits = TemperatureLimits()
    deadline_s: float | None = None
    client_override: bool = True
    lookup: bool = True
    control: float = 0.0
    fallback: FallbackSettings = FallbackSettings()
    objective: Objective = "latency"

    @property
    def max_heads(self) -> int:
        return min(self.heads.high, self.depth)


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What is known of a request when it is decided on.

    ``temperature`` is the client's, None if it named none. ``load``: sequences in the engine and waiting for it over
    those it can run at once. ``model_heads``: how many Medusa heads the model has.
    """

    request_id: str
    model: str
    class_name: str = "unclassified"
    tenant: str = ""
    turn: Turn = "first"
    prompt_tokens: int = 0
    temperature: float | None = None
    load: float = 0.0
    model_heads: int = 0


@dataclass(frozen=True, slots=True)
class Conditions:
    """All that are given must hold. None: any value does."""

    classes: frozenset[str] | None = None
    models: Names | None = None
    tenants: Names | None = None
    turn: Turn | None = None
    prompt_tokens: Range | None = None
    temperature: Range | None = None
    load: Range | None = None

    def hold(self, facts: RequestFacts) -> bool:
        if self.classes is not None and facts.class_name not in self.classes:
            return False
        if self.models is not None and not self.models.holds(facts.model):
            return False
        if self.tenants is not None and not self.tenants.holds(facts.tenant):
            return False
        if self.turn is not None and facts.turn != self.turn:
            return False
        if self.prompt_tokens is not None and not self.prompt_tokens.holds(facts.prompt_tokens):
            return False
        # OpenAI's default, as everywhere in this gateway, for a client that named no temperature.
        if self.temperature is not None and not self.temperature.holds(
            1.0 if facts.temperature is None else facts.temperature
        ):
            return False
        return self.load is None or self.load.holds(facts.load)

    @property
    def always(self) -> bool:
        return self == Conditions()


@dataclass(frozen=True, slots=True)
class Rule:
    name: str
    when: Conditions

    def meets(self, class_name: str | None) -> bool:
        """Whether it may apply to requests of that class."""
        return class_name is None or self.when.classes is None or class_name in self.when.classes


class SettingsTable(Mapping[tuple[str | None, int], Settings]):
    """Settings by (class, index of the rule) where the two can meet; each different one is held once.

    Class None stands for every class without a block of its own, index -1 for no rule.
    """

    def __init__(
        self,
        rules: Sequence[Rule],
        group_of: Mapping[str | None, int],
        use_of: Sequence[int],
        merged: Mapping[tuple[int, int], Settings],
    ) -> None:
        """``group_of``: classes with the same block share one; ``use_of``: so do rules with the same settings.

        ``merged`` is by group and use, -1 for no rule.
        """
        self._rules = rules
        self._group_of = group_of
        self._use_of = use_of
        self._merged = merged

    def __getitem__(self, key: tuple[str | None, int]) -> Settings:
        class_name, index = key
        if not -1 <= index < len(self._rules) or (index >= 0 and not self._rules[index].meets(class_name)):
            raise KeyError(key)
        return self._merged[self._group_of[class_name], -1 if index < 0 else self._use_of[index]]

    def __iter__(self) -> Iterator[tuple[str | None, int]]:
        for class_name in self._group_of:
            yield class_name, -1
            yield from ((class_name, index) for index, rule in enumerate(self._rules) if rule.meets(class_name))

    def __len__(self) -> int:
        return sum(1 for _ in self)


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """A whole policy. ``settings`` holds the merged settings, as :class:`SettingsTable` does."""

    version: str
    file: str
    rules: tuple[Rule, ...] = ()
    alerts: tuple[AlertRule, ...] = ()
    receivers: Mapping[str, Receiver] = field(default_factory=dict)
    settings: Mapping[tuple[str | None, int], Settings] = field(default_factory=lambda: {(None, -1): Settings()})
    classes: frozenset[str] = frozenset()
    runbooks: str | None = None
    cost: Cost | None = None
    prefill: PrefillBudget = field(default_factory=PrefillBudget)

    def select(self, facts: RequestFacts) -> tuple[int, Settings]:
        """The first rule that matches (-1: none), and the settings that then apply."""
        index = -1
        for position, rule in enumerate(self.rules):
            if rule.when.hold(facts):
                index = position
                break
        return index, self.settings[facts.class_name if facts.class_name in self.classes else None, index]

    def of_class(self, class_name: str) -> Settings:
        """The settings of a class that no rule changes. Fallback and control group are always these."""
        return self.settings[class_name if class_name in self.classes else None, -1]

    def rule_name(self, index: int, class_name: str) -> str:
        """Where the settings came from, as decisions name it."""
        if index >= 0:
            return self.rules[index].name
        return f"classes.{class_name}" if class_name in self.classes else "default"
