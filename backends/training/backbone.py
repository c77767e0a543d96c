"""The frozen model that heads are trained for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from backends.demo import DEMO_MODEL_NAME, prepare_demo_model
from backends.engine_core import EngineCore
from backends.heads import backbone_fingerprint
from backends.loading import EngineOptions, ModelParts, build_core, load_parts
from backends.tokenizer import HfTokenizer


@dataclass(frozen=True)
class Backbone:
    """A frozen causal language model of transformers, on the CPU, and its tokenizer."""

    name: str
    model: Any
    tokenizer: HfTokenizer
    fingerprint: str

    @property
    def hidden_size(self) -> int:
        return self.model.config.hidden_size

    @property
    def vocab_size(self) -> int:
        return self.model.config.vocab_size

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        ends = self.model.generation_config.eos_token_id
        return () if ends is None else tuple(ends) if isinstance(ends, list) else (ends,)

    def engine(self, *, kv_tokens: int) -> EngineCore:
        """An engine without heads that decodes with this model; it holds a copy of the weights."""
        parts = ModelParts(self.model, self.tokenizer, None, self.name)
        options = EngineOptions(device="cpu", kv_tokens=kv_tokens, threads=torch.get_num_threads())
        return build_core(parts, options).core


def load_backbone(model: str | None, *, threads: int | None = None) -> Backbone:
    """Load a local folder or hub id (None: the demo model), in bfloat16 where the CPU has it, for ``threads`` threads.

    Raises OSError or ValueError for what can't be loaded, :class:`backends.demo.DemoModelError`.
    """
    if threads:
        torch.set_num_threads(threads)
    demo = model in (None, DEMO_MODEL_NAME)
    # Named by its folder, the demo model comes without the heads that lie in the package: they are what is to be made.
    folder = str(prepare_demo_model()) if demo else model
    parts = load_parts(EngineOptions(model=folder, device="cpu", served_name=DEMO_MODEL_NAME if demo else None))
    parts.model.requires_grad_(False)
    return Backbone(parts.name, parts.model, parts.tokenizer, backbone_fingerprint(parts.model))
