"""The backends of a gateway, by the models that they serve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from backends.types import CostTeller, ModelInfo
from gateway.admission import Places
from gateway.routing.choice import Candidate
from gateway.routing.spec import Placement
from gateway.serving import engine_answer, remote_answer
from gateway.serving.arms import ChosenArm, Offer
from gateway.serving.backend import Backend, Parameters, Prompts
from gateway.serving.call import Call, ServedModel
from gateway.serving.planning import check_options
from gateway.settings import GatewaySettings
from gateway.upstream.backend import Note, UpstreamBackend
from gateway.wire.errors import ModelNotFound
from gateway.wire.requests import DecodingOptions, GenerationFields
from policy.decision import Decision
from policy.spec import RequestFacts


@dataclass(frozen=True, slots=True)
class EngineBackend:
    """An engine of this process."""

    name: str
    served: ServedModel
    places: Places
    placement: Placement = field(default_factory=Placement)

    kind = "engine"
    retry_after_s = None

    @property
    def info(self) -> ModelInfo:
        return self.served.decoder.info

    @property
    def model(self) -> str:
        return self.info.name

    @property
    def healthy(self) -> bool:
        return self.served.decoder.alive

    @property
    def max_running(self) -> int:
        return self.served.decoder.load().max_running

    @property
    def max_model_len(self) -> int:
        return self.info.max_model_len

    def load(self, own_places: int) -> float:
        # The call that holds them is not submitted yet.
        load = self.served.decoder.load()
        return (load.running + load.waiting) / max(load.max_running, 1)

    def lacking(self, body: GenerationFields) -> tuple[str, ...]:
        return ()

    def candidate(self, body: GenerationFields, hops: int = 0) -> Candidate:
        """As ``body`` sees it. What the model can't do (heads that it has not, say) is refused later, by name."""
        # Counted by places: what was admitted a moment ago may not be in the engine's own books yet.
        return Candidate(
            self.name,
            load=self.places.in_flight / max(self.max_running, 1),
            free=self.places.free,
            priority=self.placement.priority,
            classes=self.placement.classes,
            down=None if self.healthy else "its engine has stopped",
        )

    def as_dict(self) -> dict[str, Any]:
        decoder = self.served.decoder
        load = decoder.load()
        return {
            "name": self.name,
            "kind": self.kind,
            "model": self.model,
            "healthy": self.healthy,
            "reason": None if self.healthy else "its engine has stopped",
            "device": self.info.device,
            "dtype": self.info.dtype,
            "heads": self.info.num_heads,
            "heads_flavour": self.info.heads_flavour or None,
            "heads_stale": self.info.heads_stale,
            "priority": self.placement.priority,
            "classes": None if self.placement.classes is None else sorted(self.placement.classes),
            "in_flight": self.places.in_flight,
            "capacity": self.places.capacity,
            "running": load.running,
            "waiting": load.waiting,
            "max_running": load.max_running,
            "kv_pages_used": load.kv_pages_used,
            "kv_pages_total": load.kv_pages_total,
            "kv_pages_cached": load.kv_pages_cached,
            "prefix_cache": {
                "prompt_tokens": load.cache_prompt_tokens,
                "hit_tokens": load.cache_hit_tokens,
                "evicted_pages": load.cache_evictions,
            },
            "preemptions": load.preemptions,
            "step_cost": decoder.step_cost() if isinstance(decoder, CostTeller) else None,
        }

    def check_options(self, options: DecodingOptions | None) -> None:
        check_options(options, self.info)

    async def measure(self, call: Call, parameters: Parameters, settings: GatewaySettings) -> Prompts:
        return await engine_answer.measure(call, self.served, parameters, settings)

    def plan(
        self, call: Call, facts: RequestFacts, decision: Decision, why: str | None, arm: ChosenArm | None = None
    ) -> engine_answer.EnginePlan:
        return engine_answer.EnginePlan.of(call, self.served, facts, decision, why)


class UpstreamTarget(UpstreamBackend):
    """Another server, as something that answers calls."""

    def load(self, own_places: int) -> float:
        return (self.places.in_flight - own_places) / self.max_running

    def check_options(self, options: DecodingOptions | None) -> None:
        """What it can't do keeps it from being chosen."""

    async def measure(self, call: Call, parameters: Parameters, settings: GatewaySettings) -> Prompts:
        return remote_answer.measure(call, parameters, settings)

    def plan(
        self, call: Call, facts: RequestFacts, decision: Decision, why: str | None, arm: ChosenArm | None = None
    ) -> remote_answer.RemotePlan:
        return remote_answer.RemotePlan.of(call, self, decision, why, arm)

    def offer(self, candidate: Candidate) -> Offer | None:
        """As one of the arms of its model; None where it is none. ``candidate``: its own."""
        spec = self.spec
        if spec.variant is None:
            return None
        return Offer(candidate, spec.variant, spec.max_running, spec.per_hour, self.suspect)


class Backends:
    """All backends, in the operator's order. ``required``: models without which the gateway is not ready.

    Raises ValueError for two backends of one name.
    """

    def __init__(self, backends: Sequence[Backend], required: frozenset[str], retries: int = 2) -> None:
        self.all = tuple(backends)
        self.required = required
        self.retries = retries
        self._by_name = {each.name: each for each in self.all}
        if len(self._by_name) < len(self.all):
            raise ValueError("two backends have the same name")
        self._by_model: dict[str, tuple[Backend, ...]] = {}
        # The first stands for the model where one must: an engine knows more of it than an upstream tells.
        for each in sorted(self.all, key=lambda backend: backend.kind != EngineBackend.kind):
            self._by_model[each.model] = (*self._by_model.get(each.model, ()), each)

    @classmethod
    def of_engines(cls, models: Mapping[str, ServedModel], capacity: int) -> Backends:
        """One engine for each model, each of which may take all of the gateway's places."""
        engines = [EngineBackend(name, served, Places(capacity)) for name, served in models.items()]
        return cls(engines, frozenset(each.model for each in engines))

    @property
    def models(self) -> tuple[str, ...]:
        return tuple(self._by_model)

    @property
    def engines(self) -> tuple[EngineBackend, ...]:
        return tuple(each for each in self.all if isinstance(each, EngineBackend))

    @property
    def upstreams(self) -> tuple[UpstreamTarget, ...]:
        return tuple(each for each in self.all if isinstance(each, UpstreamTarget))

    @property
    def missing(self) -> list[str]:
        """The required models that no healthy backend serves."""
        return sorted(name for name in self.required if not any(each.healthy for each in self._by_model[name]))

    def __getitem__(self, name: str) -> Backend:
        return self._by_name[name]

    def of_model(self, name: str) -> tuple[Backend, ...]:
        """At least one. Raises :class:`ModelNotFound`."""
        try:
            return self._by_model[name]
        except KeyError:
            names = ", ".join(sorted(self._by_model)) or "none"
            raise ModelNotFound(
                f"The model '{name[:200]}' is not served here; served: {names}.", param="model"
            ) from None

    async def start(self, note: Note) -> None:
        """Open the upstreams' clients and begin to check them."""
        for each in self.upstreams:
            await each.start(note)

    async def stop(self) -> None:
        for each in self.upstreams:
            await each.stop()
