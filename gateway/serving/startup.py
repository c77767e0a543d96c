"""From a backends file to running backends."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Protocol

from backends.runners.cpu_cores import usable_cores
from backends.types import ChatTokenizer, Decoder
from gateway.admission import Places
from gateway.routing.spec import BackendsSpec, EngineSpec
from gateway.serving.backend import Backend
from gateway.serving.call import Grammars, ServedModel
from gateway.serving.targets import Backends, EngineBackend, UpstreamTarget


class Opened(Protocol):
    @property
    def decoder(self) -> Decoder: ...

    @property
    def tokenizer(self) -> ChatTokenizer: ...

    @property
    def grammars(self) -> Grammars | None: ...


def unknown_classes(spec: BackendsSpec, known: Iterable[str]) -> list[str]:
    """Classes that backends ask for and that no prompt can ever be of: misspelt, or missing in the policy."""
    named = {name for each in spec.backends for name in each.placement.classes or ()}
    return sorted(named.difference(known))


def with_threads(engines: Iterable[EngineSpec], cores: int) -> list[EngineSpec]:
    """The engines, those on the CPU that say nothing of threads with an even share of ``cores``.

    Alone, an engine decides for itself: it measures.
    """
    engines = list(engines)
    sharing = [each for each in engines if not each.options.device.startswith("cuda")]
    if len(sharing) < 2:
        return engines
    share = max(cores // len(sharing), 1)
    return [
        replace(each, options=replace(each.options, threads=share))
        if each in sharing and not each.options.threads
        else each
        for each in engines
    ]


def open_backends(spec: BackendsSpec, max_queue: int, open_engine: Callable[[EngineSpec], Opened]) -> Backends:
    """Load every engine, one after another, since each measures what its steps cost. Upstreams are asked only later:
    one that is down keeps nobody from starting.

    Raises :class:`gateway.upstream.api_key.ApiKeyError` before anything is loaded, and what ``open_engine`` raises,
    with every engine closed again.
    """
    opened: dict[str, Backend] = {each.name: UpstreamTarget(each) for each in spec.upstreams}
    engines: list[EngineBackend] = []
    try:
        for each in with_threads(spec.engines, usable_cores()):
            engine = open_engine(each)
            places = Places(engine.decoder.load().max_running + max_queue)
            served = ServedModel(engine.decoder, engine.tokenizer, engine.grammars)
            engines.append(EngineBackend(each.name, served, places, each.placement))
            opened[each.name] = engines[-1]
    except BaseException:
        for engine in engines:
            engine.served.decoder.close()
        raise
    return Backends([opened[each.name] for each in spec.backends], spec.required, spec.retries)
