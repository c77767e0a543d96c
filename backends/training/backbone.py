"""The frozen model that heads are trained for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from backends.checkpoints.loader import LoadedHeads
from backends.cost.step_cost import StepCost
from backends.engine.core import EngineCore
from backends.engine.loading import EngineOptions, ModelParts, build_core, load_parts
from backends.heads.format import backbone_fingerprint
from backends.heads.module import MedusaHeads
from backends.models.demo import DEMO_MODEL_NAME, prepare_demo_model
from backends.models.tokenizer import HfTokenizer


@dataclass(frozen=True)
class Backbone:
    """A frozen causal language model of transformers, and its tokenizer.

    ``adapted_from``: see :class:`backends.types.ModelInfo`.
    """

    name: str
    model: Any
    tokenizer: HfTokenizer
    fingerprint: str
    adapted_from: str = ""

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

    @contextlib.contextmanager
    def engine(
        self, *, kv_tokens: int, heads: MedusaHeads | None = None, cost: StepCost | None = None
    ) -> Iterator[EngineCore]:
        """An engine that decodes with this model, with ``heads`` or vanilla. ``cost`` None: measured.

        Within the block the model itself must not be called: where no native kernels run it, the engine has taken its
        attention over.
        """
        attention = self.model.config._attn_implementation
        loaded = None if heads is None else LoadedHeads(heads, "in training", stale=False)
        parts = ModelParts(self.model, self.tokenizer, loaded, self.name)
        options = EngineOptions(kv_tokens=kv_tokens, threads=torch.get_num_threads())
        try:
            yield build_core(parts, options, cost=cost).core
        finally:
            self.model.set_attn_implementation(attention)


def load_backbone(model: str | None, *, threads: int | None = None, device: str = "cpu") -> Backbone:
    """Load a local folder or hub id (None: the demo model), in bfloat16 where the device has it, for ``threads`` CPU
    threads.

    Raises OSError or ValueError for what can't be loaded, :class:`backends.models.demo.DemoModelError`.
    """
    if threads:
        torch.set_num_threads(threads)
    demo = model in (None, DEMO_MODEL_NAME)
    # Named by its folder, the demo model comes without the heads that lie in the package: they are what is to be made.
    folder = str(prepare_demo_model()) if demo else model
    parts = load_parts(EngineOptions(model=folder, device=device, served_name=DEMO_MODEL_NAME if demo else None))
    parts.model.requires_grad_(False)
    fingerprint = backbone_fingerprint(parts.model)
    return Backbone(parts.name, parts.model, parts.tokenizer, fingerprint, parts.adapted_from)
