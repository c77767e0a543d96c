"""What a gateway holds while it runs. Made by whoever starts it and passed to the app; nothing is global."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from litestar import Request

from backends.types import ChatTokenizer, Decoder
from gateway.admission import Admission
from gateway.controller import Controller
from gateway.errors import ModelNotFound
from gateway.settings import GatewaySettings

_system_random = random.SystemRandom()


def random_seed() -> int:
    """A seed for a request that brings none: non-negative and 63 bits, so it fits every int64."""
    return _system_random.getrandbits(63)


@dataclass(frozen=True, slots=True)
class ServedModel:
    decoder: Decoder
    tokenizer: ChatTokenizer


@dataclass(frozen=True, slots=True)
class GatewayState:
    """Models by the name they are served under, limits, and the sources of time, seeds and ids (injected for tests).

    ``clock`` is monotonic, ``wall_clock`` gives ``created`` timestamps. The app starts and stops the ``controller``.
    """

    models: Mapping[str, ServedModel]
    settings: GatewaySettings
    admission: Admission
    clock: Callable[[], float] = time.monotonic
    wall_clock: Callable[[], float] = time.time
    new_seed: Callable[[], int] = random_seed
    new_id: Callable[[], str] = field(default=lambda: uuid.uuid4().hex)
    controller: Controller = field(default_factory=Controller.plain)

    @classmethod
    def create(
        cls,
        models: Mapping[str, ServedModel],
        settings: GatewaySettings | None = None,
        controller: Controller | None = None,
    ) -> GatewayState:
        """A state with the real clocks, an admission of the settings' capacity, and the plainest controller."""
        settings = settings or GatewaySettings()
        return cls(
            models=models,
            settings=settings,
            admission=Admission(settings.capacity),
            controller=controller or Controller.plain(),
        )

    def served(self, name: str) -> ServedModel:
        try:
            return self.models[name]
        except KeyError:
            names = ", ".join(sorted(self.models)) or "none"
            raise ModelNotFound(
                f"The model '{name[:200]}' is not served here; served: {names}.", param="model"
            ) from None

    @property
    def ready(self) -> bool:
        """Takes requests: not draining, and at least one engine alive."""
        return not self.admission.draining and any(model.decoder.alive for model in self.models.values())


def gateway_of(request: Request[Any, Any, Any]) -> GatewayState:
    return request.app.state.gateway
