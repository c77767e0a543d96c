"""Any decoder-only model that goes through transformers' attention interface, on any device, in torch operations.

Attention is :mod:`backends.runners.paged_attention`. Linear layers get a multiple of 4 rows, at least 4: ``F.linear``
is then bitwise independent of the number of rows on the CPUs tried (docs/exactness.md). CUDA uses the same code; its
linear layers have not been measured for that property.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from transformers import AttentionInterface

from backends.heads.module import MedusaHeads
from backends.heads.residual import ResidualHeads
from backends.runners.architectures import UnsupportedModel, check_attention, check_interface, refusal
from backends.runners.base import HeadsRunner
from backends.runners.batch import PAGE_SIZE, BatchBuilder, StepBatch
from backends.runners.paged_attention import (
    ATTENTION_NAME,
    AttentionProbe,
    LayerShape,
    PagedStep,
    paged_attention,
    visible_slots,
)
from backends.runners.row_padding import ROW_MULTIPLE, pad_rows, padding_of
from backends.runners.torch_heads import heads_in_torch
from backends.sampling.rows import RowSampling
from backends.sampling.torch_sampler import best_rows, draw_rows

_PROBE_TOKENS = 24
# How far the engine's logits may be from the model's own, as a share of their spread. Rounding stays well below; a bias
# or a scale that was left out does not.
_TOLERANCE = {torch.float32: 1e-3}
_TOLERANCE_HALF = 0.15


class HfRunner:
    """See :class:`backends.runners.base.ModelRunner`. Takes the model over: it can't be called outside any more.

    Raises :class:`backends.runners.architectures.UnsupportedModel` with the reason for a model that it can't run, among
    them any whose logits for a few tokens are not those of transformers' own forward.
    """

    kind = "transformers"
    row_buckets: Sequence[int] = ()
    software = f"torch {torch.__version__}, transformers {transformers.__version__}"

    def __init__(self, model: Any, *, num_pages: int, max_rows: int, max_context: int) -> None:
        config = model.config.get_text_config()
        if reason := refusal(model.config, max_context):
            raise UnsupportedModel(reason)
        check_interface(model)
        self._model: Any = model.eval()
        self._base: Any = getattr(model, model.base_model_prefix)
        self._lm_head: Any = model.get_output_embeddings()
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self._logit_scale: float = getattr(config, "logit_scale", None) or 1 / getattr(config, "logits_scaling", 1.0)
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self.runs_ahead = self.device.type != "cpu"
        self.vocab_size, self.hidden_size = self._lm_head.weight.shape
        self.num_pages, self.max_rows, self.max_context = num_pages, max_rows, max_context
        expected = self._own_logits(max_context)
        AttentionInterface.register(ATTENTION_NAME, paged_attention)
        model.set_attn_implementation(ATTENTION_NAME)
        slots = num_pages * PAGE_SIZE + -(-max_rows // PAGE_SIZE) * PAGE_SIZE
        self._pools = {layer: self._pool(slots, shape) for layer, shape in self._layer_shapes().items()}
        self._compare(expected)

    @property
    def threads(self) -> int:
        return torch.get_num_threads()

    def _pool(self, slots: int, shape: LayerShape) -> tuple[torch.Tensor, torch.Tensor]:
        def zeros(width: int) -> torch.Tensor:
            return torch.zeros(slots, shape.kv_heads, width, dtype=self.dtype, device=self.device)

        return zeros(shape.key_dim), zeros(shape.value_dim)

    def _probe_ids(self, length: int) -> list[int]:
        return [(7919 * i + 13) % self.vocab_size for i in range(length)]

    @torch.inference_mode()
    def _own_logits(self, max_context: int) -> torch.Tensor:
        """transformers' own logits [tokens, V] for a few tokens, through its eager attention."""
        self._model.set_attn_implementation("eager")
        ids = self._probe_ids(min(_PROBE_TOKENS, max_context, self.max_rows, self.num_pages * PAGE_SIZE))
        return self._model(input_ids=torch.tensor([ids], device=self.device), use_cache=False).logits[0].float()

    @torch.inference_mode()
    def _layer_shapes(self) -> dict[int, LayerShape]:
        probe = AttentionProbe()
        ids = torch.tensor([self._probe_ids(ROW_MULTIPLE)], device=self.device)
        try:
            self._base(input_ids=ids, position_ids=torch.zeros_like(ids), use_cache=False, medusa_step=probe)
        except RuntimeError as error:
            if "outside the engine" not in str(error):
                raise
            raise UnsupportedModel(f"{self._model.config.model_type}: keywords don't reach its attention") from None
        check_attention(self._model.config, probe.layers, probe.foreign)
        return probe.layers

    def _compare(self, expected: torch.Tensor) -> None:
        """Raises :class:`UnsupportedModel` unless the engine says what the model says."""
        builder = BatchBuilder(self.num_pages * PAGE_SIZE)
        pages = list(range(-(-len(expected) // PAGE_SIZE)))
        # One chunk a token, so that every row is an output.
        for position, token in enumerate(self._probe_ids(len(expected))):
            builder.add_chunk(pages, [token], position, last_output=True)
        found = self.logits(self.forward(builder.build()))
        off = ((found - expected).square().mean().sqrt() / expected.std()).item()
        # Not written as off > ...: what is not a number is no match.
        if not off <= _TOLERANCE.get(self.dtype, _TOLERANCE_HALF):
            raise UnsupportedModel(
                f"{self._model.config.model_type}: the engine's logits differ from transformers' own by {off:.1%} of "
                "their spread, so something in this architecture is not supported"
            )

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> torch.Tensor:
        if batch.rows > self.max_rows:
            raise ValueError(f"{batch.rows} rows in a step of at most {self.max_rows}")
        padding = padding_of(batch.rows)
        seen, lengths = visible_slots(batch)

        def put(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).to(self.device, torch.long)

        step = PagedStep(
            pools=self._pools,
            slots=put(batch.slots),
            seen=pad_rows(put(seen), padding),
            lengths=np.append(lengths, np.repeat(lengths[:1], padding)),
        )
        tokens, positions = pad_rows(put(batch.tokens), padding), pad_rows(put(batch.positions), padding)
        output = self._base(
            input_ids=tokens[None], position_ids=positions[None], use_cache=False, medusa_step=step
        ).last_hidden_state[0]
        return output[put(batch.out_row)]

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        # Rows are cut off last: elementwise kernels, too, may treat the odd end of a tensor in another way.
        out = self._lm_head(pad_rows(hidden, padding_of(len(hidden)))).float()
        if self._logit_scale != 1.0:
            out = out * self._logit_scale
        if self._softcap is not None:
            out = torch.tanh(out / self._softcap) * self._softcap
        return out[: len(hidden)]

    def copy_slots(self, source: list[int], target: list[int]) -> None:
        if source:
            take, put = torch.tensor(source, device=self.device), torch.tensor(target, device=self.device)
            for pools in self._pools.values():
                for pool in pools:
                    pool[put] = pool[take]

    def argmax(self, logits: torch.Tensor, rows: list[int]) -> list[int]:
        return best_rows(logits[rows])

    def sample(self, logits: torch.Tensor, rows: list[int], params: RowSampling) -> list[int]:
        return draw_rows(logits[rows], params)

    def bind_heads(self, heads: MedusaHeads | ResidualHeads) -> HeadsRunner:
        if isinstance(heads, ResidualHeads):
            return heads_in_torch(self, heads)
        weight = self._lm_head.weight.detach()
        rows = weight if heads.draft_token_ids is None else weight[heads.draft_token_ids.long()]
        return heads_in_torch(self, heads, lambda states: F.linear(states.to(rows.dtype), rows).float())

    def embed(self, token_ids: list[int]) -> torch.Tensor:
        return self._model.get_input_embeddings()(torch.tensor(token_ids, device=self.device))
