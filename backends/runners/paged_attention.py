"""Attention over the page pool in torch operations, for any model that goes through transformers' attention interface.

The function registered here replaces the model's own: it stores keys and values in the pool and lets every row see the
slots of its own path. Keys are walked in blocks of 16 by absolute position, and each product is a multiplication
followed by a sum over ``head_dim``, so a row's result does not depend on the other rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from backends.runners.batch import PAGE_SIZE, StepBatch

ATTENTION_NAME = "medusa_paged"

# Arguments that transformers passes to every attention function and that say nothing new here.
_KNOWN = frozenset({"position_ids", "is_causal", "use_cache", "cache", "output_attentions", "position_embeddings"})


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer keeps for each position."""

    kv_heads: int
    key_dim: int
    value_dim: int


@dataclass(slots=True)
class AttentionProbe:
    """Passed instead of a step: notes what the layers ask for, and computes nothing."""

    layers: dict[int, LayerShape] = field(default_factory=dict)
    foreign: set[str] = field(default_factory=set)


@dataclass(slots=True)
class PagedStep:
    """Where rows go, and which slots [rows + padding, blocks * 16] each row sees, in order of position.

    ``lengths`` [rows + padding]: how many of them are real. A window hides all but the last of those.
    """

    pools: dict[int, tuple[torch.Tensor, torch.Tensor]]
    slots: torch.Tensor
    seen: torch.Tensor
    lengths: np.ndarray
    views: dict[int, tuple[torch.Tensor, list[slice]]] = field(default_factory=dict)

    def view(self, window: int | None) -> tuple[torch.Tensor, list[slice]]:
        """What is hidden [rows + padding, blocks * 16], and the blocks in which some row sees something."""
        key = window or 0
        if key not in self.views:
            positions = np.arange(self.seen.shape[1])[None, :]
            hidden = positions >= self.lengths[:, None]
            if window:
                hidden |= positions < self.lengths[:, None] - window
            blocks = [slice(start, start + PAGE_SIZE) for start in range(0, hidden.shape[1], PAGE_SIZE)]
            # A block that is hidden from every row would add exact zeros.
            blocks = [block for block in blocks if not hidden[:, block].all()]
            self.views[key] = torch.from_numpy(hidden).to(self.seen.device), blocks
        return self.views[key]


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    softcap: float | None = None,
    sliding_window: int | None = None,
    medusa_step: PagedStep | AttentionProbe | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Called by every attention layer of the model.

    ``query`` [1, heads, rows, key_dim], ``key`` [1, kv_heads, rows, key_dim], ``value`` [1, kv_heads, rows, value_dim];
    returns [1, rows, heads, value_dim] and no weights.
    """
    if medusa_step is None:
        raise RuntimeError("the model was called outside the engine")
    layer: int = module.layer_idx  # type: ignore[assignment]
    if isinstance(medusa_step, AttentionProbe):
        medusa_step.layers[layer] = LayerShape(key.shape[1], key.shape[3], value.shape[3])
        medusa_step.foreign |= {
            name for name, given in others.items() if isinstance(given, torch.Tensor) and name not in _KNOWN
        }
        return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None
    k_pool, v_pool = medusa_step.pools[layer]
    rows = len(medusa_step.slots)
    k_pool[medusa_step.slots] = key[0].transpose(0, 1)[:rows]
    v_pool[medusa_step.slots] = value[0].transpose(0, 1)[:rows]
    heads, key_dim = query.shape[1], query.shape[3]
    kv_heads, value_dim = key.shape[1], value.shape[3]
    scale = key_dim**-0.5 if scaling is None else scaling
    q = query[0].transpose(0, 1).reshape(-1, kv_heads, heads // kv_heads, key_dim).float() * scale
    seen = medusa_step.seen
    hidden, blocks = medusa_step.view(sliding_window)
    scores = []
    for block in blocks:
        part = (q[:, :, :, None, :] * k_pool[seen[:, block]].float().permute(0, 2, 1, 3)[:, :, None]).sum(-1)
        if softcap is not None:
            part = torch.tanh(part / softcap) * softcap
        scores.append(part.masked_fill(hidden[:, None, None, block], -torch.inf))
    highest = scores[0].amax(-1, keepdim=True)
    for part in scores[1:]:
        highest = torch.maximum(highest, part.amax(-1, keepdim=True))
    total = torch.zeros_like(highest)
    out = q.new_zeros(*q.shape[:3], value_dim)
    for part, block in zip(scores, blocks, strict=True):
        weights = torch.exp(part - highest)
        total = total + weights.sum(-1, keepdim=True)
        values = v_pool[seen[:, block]].float().masked_fill(hidden[:, block, None, None], 0.0).permute(0, 2, 3, 1)
        out = out + (weights[:, :, :, None, :] * values[:, :, None]).sum(-1)
    out = (out / total).to(query.dtype)
    return out.reshape(1, -1, heads, value_dim), None


def visible_slots(batch: StepBatch) -> tuple[np.ndarray, np.ndarray]:
    """Slots [rows, blocks * 16] that each row sees in order of position, and how many of them are real [rows]."""
    lengths = batch.full_pages * PAGE_SIZE + np.diff(batch.tail_offsets)
    width = -(-int(lengths.max()) // PAGE_SIZE) * PAGE_SIZE
    seen = np.zeros((batch.rows, width), dtype=np.int64)
    for row in range(batch.rows):
        start = batch.page_offsets[batch.sequence[row]]
        full = batch.full_pages[row]
        pages = batch.pages[start : start + full].astype(np.int64)
        tail = batch.tail_slots[batch.tail_offsets[row] : batch.tail_offsets[row + 1]]
        seen[row, : full * PAGE_SIZE] = (pages[:, None] * PAGE_SIZE + np.arange(PAGE_SIZE)).ravel()
        seen[row, full * PAGE_SIZE : lengths[row]] = tail
    return seen, lengths
