"""What there is to say of a metric, and what Prometheus calls it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]

_UNIT_SUFFIXES = {"s": "seconds", "By": "bytes", "W": "watts"}


@dataclass(frozen=True, slots=True)
class Metric:
    """``labels``: every attribute that a series may have. ``buckets``: upper bounds of a histogram, in ``unit``."""

    name: str
    kind: Kind
    unit: str
    description: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def prometheus(self) -> str:
        """The name of the series in Prometheus; histograms add ``_bucket``, ``_sum`` and ``_count``."""
        name = re.sub(r"[^A-Za-z0-9:]+", "_", self.name)
        suffix = _UNIT_SUFFIXES.get(re.sub(r"\{.*\}", "", self.unit), "")
        name = f"{name}_{suffix}" if suffix else name
        return f"{name}_total" if self.kind == "counter" else name
