"""Any decoder-only model that goes through transformers' attention interface, on any device, in torch operations.

The attention function registered here replaces the model's own: it stores keys and values in the page pool and lets
every row see the slots of its own path. Keys are walked in blocks of 16 by absolute position and each product is a
multiplication followed by a sum over ``head_dim``, so a row's result does not depend on the other rows. Linear layers
get a multiple of 4 rows, at least 4: ``F.linear`` is then bitwise independent of the number of rows on the CPUs tried
(docs/exactness.md). CUDA uses the same code; its linear layers have not been measured for that property.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from backends.batch import PAGE_SIZE, StepBatch
from backends.heads import MedusaHeads
from backends.runner import Proposals, RowSampling
from backends.sampling_torch import draw_rows

ATTENTION_NAME = "medusa_paged"
_ROW_MULTIPLE = 4


@dataclass(slots=True)
class _Step:
    """What the attention function needs: where rows go, and which slots [rows, blocks * 16] each row sees."""

    pools: list[tuple[torch.Tensor, torch.Tensor]]
    slots: torch.Tensor
    seen: torch.Tensor
    hidden_mask: torch.Tensor


class UnsupportedModel(ValueError):
    """The model can't be run by this engine; the message says why."""


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    medusa_step: _Step | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """Called by every attention layer of the model.

    ``query`` [1, heads, rows, head_dim], ``key`` and ``value`` [1, kv_heads, rows, head_dim]; returns
    [1, rows, heads, head_dim] and no weights.
    """
    if medusa_step is None:
        raise RuntimeError("the model was called outside the engine")
    k_pool, v_pool = medusa_step.pools[module.layer_idx]  # type: ignore[index]
    rows = len(medusa_step.slots)
    k_pool[medusa_step.slots] = key[0].transpose(0, 1)[:rows]
    v_pool[medusa_step.slots] = value[0].transpose(0, 1)[:rows]
    heads, head_dim = query.shape[1], query.shape[3]
    kv_heads = key.shape[1]
    scale = head_dim**-0.5 if scaling is None else scaling
    q = query[0].transpose(0, 1).reshape(-1, kv_heads, heads // kv_heads, head_dim).float() * scale
    # Rows that only pad the linear layers see what row 0 sees.
    seen, mask = medusa_step.seen, medusa_step.hidden_mask
    blocks = [slice(start, start + PAGE_SIZE) for start in range(0, seen.shape[1], PAGE_SIZE)]
    scores = [
        (q[:, :, :, None, :] * k_pool[seen[:, block]].float().permute(0, 2, 1, 3)[:, :, None]).sum(-1)
        for block in blocks
    ]
    scores = [
        part.masked_fill(mask[:, None, None, block], -torch.inf) for part, block in zip(scores, blocks, strict=True)
    ]
    highest = scores[0].amax(-1, keepdim=True)
    for part in scores[1:]:
        highest = torch.maximum(highest, part.amax(-1, keepdim=True))
    total = torch.zeros_like(highest)
    out = torch.zeros_like(q)
    for part, block in zip(scores, blocks, strict=True):
        weights = torch.exp(part - highest)
        total = total + weights.sum(-1, keepdim=True)
        values = v_pool[seen[:, block]].float().masked_fill(mask[:, block, None, None], 0.0).permute(0, 2, 3, 1)
        out = out + (weights[:, :, :, None, :] * values[:, :, None]).sum(-1)
    out = (out / total).to(query.dtype)
    return out.reshape(1, -1, heads, head_dim), None


class HfRunner:
    """See :class:`backends.runner.ModelRunner`."""

    kind = "transformers"

    def __init__(self, model: Any, *, num_pages: int, max_rows: int, max_context: int) -> None:
        config = model.config.get_text_config()
        if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
            raise UnsupportedModel(f"{config.model_type}: sliding window attention is not supported")
        if getattr(model, "_can_compile_fullgraph", True) and getattr(config, "is_encoder_decoder", False):
            raise UnsupportedModel(f"{config.model_type}: not a decoder-only model")
        base = getattr(model, model.base_model_prefix, None)
        head = model.get_output_embeddings()
        if base is None or head is None:
            raise UnsupportedModel(f"{config.model_type}: no separate base model and lm_head")
        AttentionInterface.register(ATTENTION_NAME, paged_attention)
        model.set_attn_implementation(ATTENTION_NAME)
        self._model, self._base, self._lm_head = model.eval(), base, head
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self.hidden_size: int = config.hidden_size
        self.vocab_size: int = config.vocab_size
        self.num_pages, self.max_rows, self.max_context = num_pages, max_rows, max_context
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        slots = num_pages * PAGE_SIZE + -(-max_rows // PAGE_SIZE) * PAGE_SIZE
        self._pools = [
            tuple(torch.zeros(slots, kv_heads, head_dim, dtype=self.dtype, device=self.device) for _ in range(2))
            for _ in range(config.num_hidden_layers)
        ]

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> torch.Tensor:
        if batch.rows > self.max_rows:
            raise ValueError(f"{batch.rows} rows in a step of at most {self.max_rows}")
        padding = -batch.rows % _ROW_MULTIPLE
        seen, mask = _visible_slots(batch)

        def put(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).to(self.device, torch.long)

        step = _Step(
            pools=self._pools,  # type: ignore[arg-type]
            slots=put(batch.slots),
            seen=_pad_rows(put(seen), padding),
            hidden_mask=_pad_rows(torch.from_numpy(mask).to(self.device), padding),
        )
        tokens, positions = _pad_rows(put(batch.tokens), padding), _pad_rows(put(batch.positions), padding)
        output = self._base(
            input_ids=tokens[None], position_ids=positions[None], use_cache=False, medusa_step=step
        ).last_hidden_state[0]
        return output[put(batch.out_row)]

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        out = self._lm_head(_pad_rows(hidden, -len(hidden) % _ROW_MULTIPLE))[: len(hidden)].float()
        return out if self._softcap is None else torch.tanh(out / self._softcap) * self._softcap

    def copy_slots(self, source: list[int], target: list[int]) -> None:
        if source:
            take, put = torch.tensor(source, device=self.device), torch.tensor(target, device=self.device)
            for pools in self._pools:
                for pool in pools:
                    pool[put] = pool[take]

    def argmax(self, logits: torch.Tensor, rows: list[int]) -> list[int]:
        return torch.argmax(logits[rows], dim=-1).tolist()

    def sample(self, logits: torch.Tensor, rows: list[int], params: RowSampling) -> list[int]:
        return draw_rows(logits[rows], params)

    def bind_heads(self, heads: MedusaHeads) -> HfHeads:
        return HfHeads(self, heads)

    def embed(self, token_ids: list[int]) -> torch.Tensor:
        return self._model.get_input_embeddings()(torch.tensor(token_ids, device=self.device))


class HfHeads:
    """Medusa heads in torch operations. See :class:`backends.runner.HeadsRunner`."""

    def __init__(self, runner: HfRunner, heads: MedusaHeads) -> None:
        self._runner = runner
        self._heads = heads.to(runner.device)
        self.num_heads = heads.num_heads
        weight = runner._lm_head.weight.detach()
        ids = heads.draft_token_ids
        self._draft_ids = None if ids is None else ids.cpu().numpy()
        self._draft_lm_head = weight if ids is None else weight[ids.long()]

    @torch.inference_mode()
    def propose(self, hidden: torch.Tensor, contexts: list[list[int]], k: int) -> list[Proposals]:
        n = len(contexts)
        pending = [context[-1] for context in contexts]
        states = self._heads.propose_hidden(hidden, self._runner.embed(pending))
        logits = F.linear(states.to(self._draft_lm_head.dtype), self._draft_lm_head).float()
        best = torch.softmax(logits, dim=-1).topk(min(k, logits.shape[-1]), dim=-1)
        ids = best.indices.to("cpu", torch.int32).numpy()
        tokens = ids if self._draft_ids is None else self._draft_ids[ids]
        probabilities = best.values.cpu().numpy()
        return [Proposals(tokens[:, i], probabilities[:, i]) for i in range(n)]


def _pad_rows(tensor: torch.Tensor, padding: int) -> torch.Tensor:
    """Repeat row 0 ``padding`` times at the end."""
    return torch.cat([tensor, tensor[:1].expand(padding, *tensor.shape[1:])]) if padding else tensor


def _visible_slots(batch: StepBatch) -> tuple[np.ndarray, np.ndarray]:
    """Slots [rows, blocks * 16] that each row sees in order of position, and where that is only padding."""
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
    return seen, np.arange(width)[None, :] >= lengths[:, None]
