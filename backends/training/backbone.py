"""The frozen model that heads are trained for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from backends.heads import backbone_fingerprint


@dataclass(frozen=True)
class Backbone:
    """A frozen causal language model and its tokenizer, as transformers loads them."""

    name: str
    model: Any
    tokenizer: Any
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


def use_threads(count: int) -> None:
    """Let torch use ``count`` CPU threads in this process."""
    torch.set_num_threads(count)


def cpu_has_bf16() -> bool:
    """Whether bfloat16 products run in hardware here; elsewhere they are slower than float32."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


def load_backbone(folder: Path, *, name: str | None = None, dtype: torch.dtype | None = None) -> Backbone:
    """Load a local model folder, in bfloat16 where the CPU has it. Raises what transformers raises."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    dtype = dtype or (torch.bfloat16 if cpu_has_bf16() else torch.float32)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model.eval().requires_grad_(False)
    return Backbone(name or folder.name, model, AutoTokenizer.from_pretrained(folder), backbone_fingerprint(model))
