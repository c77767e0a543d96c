"""What engines elsewhere say of themselves on their ``/metrics``, in one form. Pure."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

_NAMES: dict[str, tuple[str, ...]] = {
    "running": (
        "vllm:num_requests_running",
        "sglang:num_running_reqs",
        "llamacpp:requests_processing",
        "medusa_running_sequences",
    ),
    "waiting": (
        "vllm:num_requests_waiting",
        "sglang:num_queue_reqs",
        "llamacpp:requests_deferred",
        "medusa_queue_depth",
    ),
    "kv_use": (
        "vllm:kv_cache_usage_perc",
        "vllm:gpu_cache_usage_perc",
        "sglang:token_usage",
        "llamacpp:kv_cache_usage_ratio",
        "medusa_kv_use_ratio",
    ),
    "drafts": ("vllm:spec_decode_num_drafts_total", "speculative_drafts_total"),
    "draft_tokens": (
        "vllm:spec_decode_num_draft_tokens_total",
        "llamacpp:draft_tokens_total",
        "speculative_draft_tokens_total",
    ),
    "accepted_tokens": (
        "vllm:spec_decode_num_accepted_tokens_total",
        "llamacpp:draft_tokens_accepted_total",
        "speculative_accepted_tokens_total",
    ),
    "accept_length": ("sglang:spec_accept_length",),
}
_BY_NAME = {name: figure for figure, names in _NAMES.items() for name in names}
_BY_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
MOST_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """None: it does not say. ``accepted_at``: accepted drafts by their place in a draft, since its start."""

    running: float | None = None
    waiting: float | None = None
    kv_use: float | None = None
    drafts: float | None = None
    draft_tokens: float | None = None
    accepted_tokens: float | None = None
    accept_length: float | None = None
    accepted_at: tuple[float, ...] = ()

    @property
    def acceptance(self) -> float | None:
        if not self.draft_tokens or self.accepted_tokens is None:
            return None
        return self.accepted_tokens / self.draft_tokens

    def since(self, before: EngineFigures) -> EngineFigures:
        """The same, its counts only those since ``before``; all of them where it was started anew in between."""

        def minus(now: float | None, then: float | None) -> float | None:
            return now if now is None or then is None or now < then else now - then

        places = zip(self.accepted_at, before.accepted_at or (0.0,) * len(self.accepted_at), strict=False)
        return EngineFigures(
            self.running,
            self.waiting,
            self.kv_use,
            minus(self.drafts, before.drafts),
            minus(self.draft_tokens, before.draft_tokens),
            minus(self.accepted_tokens, before.accepted_tokens),
            self.accept_length,
            tuple(minus(now, then) or 0.0 for now, then in places),
        )

    def as_dict(self) -> dict[str, Any]:
        found = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "accepted_at"}
        found["acceptance"] = None if self.acceptance is None else round(self.acceptance, 4)
        found["accepted_at"] = list(self.accepted_at)
        return {name: value for name, value in found.items() if value not in (None, [])}


def read_engine_metrics(text: str) -> EngineFigures:
    """Series of one name are summed, shares averaged. Raises ValueError for what is no exposition."""
    found: dict[str, list[float]] = {}
    places: dict[int, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == _BY_POSITION and sample.labels.get("position", "").isdigit():
                place = int(sample.labels["position"])
                places[place] = places.get(place, 0.0) + sample.value
            elif (figure := _BY_NAME.get(sample.name)) is not None:
                found.setdefault(figure, []).append(sample.value)
    values = {
        name: sum(each) / (len(each) if name in ("kv_use", "accept_length") else 1) for name, each in found.items()
    }
    return EngineFigures(**values, accepted_at=tuple(places[place] for place in sorted(places)))
