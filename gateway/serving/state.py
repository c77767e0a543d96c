"""What a gateway holds while it runs. Made by whoever starts it and passed to the app; nothing is global."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from litestar import Request

from gateway.admission import Admission
from gateway.auth.access import Access
from gateway.serving.controller import Controller
from gateway.serving.targets import Backends, ServedModel
from gateway.settings import GatewaySettings
from telemetry.service import Telemetry

EXPLAINED_AT_ONCE = 4

_system_random = random.SystemRandom()


def random_seed() -> int:
    """A seed for a request that brings none: non-negative and 63 bits, so it fits every int64."""
    return _system_random.getrandbits(63)


@dataclass(frozen=True, slots=True)
class GatewayState:
    """Backends by the models that they serve, limits, and the sources of time, seeds and ids (injected for tests).

    ``clock`` is monotonic, ``wall_clock`` gives ``created`` timestamps. The app starts and stops the ``controller``
    and what ``access`` keeps current.
    """

    backends: Backends
    settings: GatewaySettings
    admission: Admission
    clock: Callable[[], float] = time.monotonic
    wall_clock: Callable[[], float] = time.time
    new_seed: Callable[[], int] = random_seed
    new_id: Callable[[], str] = field(default=lambda: uuid.uuid4().hex)
    controller: Controller = field(default_factory=Controller.plain)
    telemetry: Telemetry = field(default_factory=Telemetry.off)
    access: Access = field(default_factory=Access)
    explaining: Admission = field(default_factory=lambda: Admission(EXPLAINED_AT_ONCE))
    """Places of requests that only ask what would be done: they take none from those that are done."""
    validating: asyncio.Lock = field(default_factory=asyncio.Lock)
    """One policy is checked at a time, however many are asked about."""

    @classmethod
    def create(
        cls,
        models: Mapping[str, ServedModel] | Backends,
        settings: GatewaySettings | None = None,
        controller: Controller | None = None,
        telemetry: Telemetry | None = None,
        access: Access | None = None,
    ) -> GatewayState:
        """A state with the real clocks, an admission of all places, and the plainest controller.

        ``models``: engines by name, one for each model, which then have the settings' capacity between them; or the
        backends of a file, which bring their own.
        """
        settings = settings or GatewaySettings()
        if isinstance(models, Backends):
            backends, capacity = models, sum(each.places.capacity for each in models.all)
        else:
            capacity = settings.capacity
            backends = Backends.of_engines(models, capacity)
        return cls(
            backends=backends,
            settings=settings,
            admission=Admission(capacity),
            controller=controller or Controller.plain(),
            telemetry=telemetry or Telemetry.off(),
            access=access or Access(),
        )

    @property
    def ready(self) -> bool:
        """Takes requests: not draining, and every required model has a healthy backend."""
        return not self.admission.draining and not self.backends.missing


def gateway_of(request: Request[Any, Any, Any]) -> GatewayState:
    return request.app.state.gateway
