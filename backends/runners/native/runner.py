"""Llama-shaped models on the CPU, one C call per step.

Runs models built from RMS norm, rotary embedding, grouped-query attention and a SiLU-gated MLP: Llama, Mistral without
a sliding window, Qwen 2 and 3. :func:`unsupported_reason` says why another model is not run here.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from backends.heads.module import MedusaHeads
from backends.heads.residual import ResidualHeads
from backends.runners.base import HeadsRunner
from backends.runners.batch import ARRAYS, PAGE_SIZE, StepBatch
from backends.runners.cpu_cores import usable_cores
from backends.runners.llama_shape import foreign_to_llama, head_size
from backends.runners.native import bindings as lib
from backends.runners.native.arena import WeightArena, zeros
from backends.runners.native.checked import address_of, matrix_of, refuse, values_of
from backends.runners.native.heads import NativeHeads, why_not_in_kernels
from backends.runners.native.packing import LANES, pack, pack_groups, unpack, unpack_groups
from backends.runners.torch_heads import heads_in_torch
from backends.sampling.rows import RowSampling

log = logging.getLogger(__name__)


def unsupported_reason(model: Any) -> str | None:
    """Why the native runner can't run this transformers model; None when it can."""
    config = model.config
    if reason := foreign_to_llama(model):
        return reason
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        return "sliding window attention"
    if model.dtype not in (torch.float32, torch.bfloat16):
        return f"dtype {model.dtype}"
    return None


class NativeRunner:
    """See :class:`backends.runners.base.ModelRunner`. Copies the weights of a transformers model, which may then be
    freed.

    Between two calls the weights have swept everything else out of the caches, so a torch or numpy operation that takes
    a microsecond elsewhere takes twenty to a hundred here. Hence buffers and views of them that are made once, and
    arrays of the standard library.

    What :class:`backends.runners.native.heads.NativeHeads` shares with it: ``library`` (the bound kernels),
    ``thread_pool`` (their threads), ``embeddings`` [V, H], ``lm_head`` (packed: :func:`pack` or :func:`pack_groups`),
    :meth:`lm_head_rows` and ``arena`` (where further weights are kept).

    ``int8``: linear layers and ``lm_head`` in eight bits, in groups (:func:`pack_groups`); embeddings, activations,
    keys and values in the model's dtype.
    """

    kind = "native"
    runs_ahead = False
    row_buckets: Sequence[int] = ()

    def __init__(
        self,
        model: Any,
        *,
        num_pages: int,
        max_rows: int,
        max_context: int,
        threads: int | None = None,
        int8: bool = False,
    ) -> None:
        reason = unsupported_reason(model)
        if reason:
            raise lib.NativeUnavailable(reason)
        self.library = lib.load_library()
        self.software = self.library.build
        self.threads = threads or min(torch.get_num_threads(), usable_cores())
        config = model.config
        self.dtype: torch.dtype = model.dtype
        self.device = torch.device("cpu")
        self.hidden_size: int = config.hidden_size
        self.vocab_size: int = config.vocab_size
        self.num_pages, self.max_rows, self.max_context = num_pages, max_rows, max_context
        self._is_bf16, self.int8 = int(self.dtype == torch.bfloat16), int8
        self._kept: list[torch.Tensor] = []  # tensors that C structures point into
        self.arena = WeightArena()
        head_dim, kv_heads = head_size(config), config.num_key_value_heads
        scratch_pages = -(-max_rows // PAGE_SIZE)
        pool = (config.num_hidden_layers, num_pages + scratch_pages, kv_heads * head_dim * PAGE_SIZE)
        layers = (lib.Layer * pool[0])(*(self._layer(layer, config) for layer in model.model.layers))
        cos, sin = model.model.rotary_emb(torch.zeros(1, 1, 1), torch.arange(max_context)[None])
        half = head_dim // 2
        self.embeddings: torch.Tensor = model.model.embed_tokens.weight.detach().contiguous()
        self.lm_head = self._packed("lm_head", model.lm_head.weight, self.vocab_size, self.hidden_size)
        self._lm_head_address = self.lm_head.data_ptr()
        self._vocab_padded = self.lm_head.shape[0] * LANES
        self._hidden = _Buffer(max_rows, self.hidden_size, self.hidden_size, self.dtype)
        self._logits = _Buffer(0, self._vocab_padded, self.vocab_size, torch.float32)
        self._k_pool, self._v_pool = (zeros(pool, self.dtype) for _ in range(2))
        self._layers = layers
        self._model = lib.Model(
            layers=pool[0],
            hidden=self.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate=config.intermediate_size,
            is_bf16=self._is_bf16,
            is_int8=int8,
            vocab=self.vocab_size,
            max_context=max_context,
            eps=config.rms_norm_eps,
            scale=model.model.layers[0].self_attn.scaling,
            pages=pool[1],
            layer=layers,
            embed=address_of("embed_tokens", self.embeddings, (self.vocab_size, self.hidden_size), self.dtype),
            final_norm=self._float("norm", model.model.norm.weight, self.hidden_size),
            cos=self._float("cos", cos[0, :, :half], max_context, half),
            sin=self._float("sin", sin[0, :, :half], max_context, half),
            k_pool=address_of("k_pool", self._k_pool, pool, self.dtype),
            v_pool=address_of("v_pool", self._v_pool, pool, self.dtype),
        )
        refuse(self.library.mg_model_fault(self._model, max_rows, self.threads))
        self._workspace = self.library.mg_workspace_new(self._model, max_rows, self.threads)
        self.thread_pool = self.library.mg_pool_new(self.threads)
        if not self._workspace or not self.thread_pool:
            raise MemoryError("no memory or threads for the kernels' workspace")

    def __del__(self) -> None:
        for name, free in (("_workspace", "mg_workspace_free"), ("thread_pool", "mg_pool_free")):
            if getattr(self, name, None):
                getattr(self.library, free)(getattr(self, name))
                setattr(self, name, None)

    def forward(self, batch: StepBatch) -> torch.Tensor:
        if batch.rows > self.max_rows:
            raise ValueError(f"{batch.rows} rows in a step of at most {self.max_rows}")
        memory, ends = batch.memory, array("i", batch.ends)
        if memory.typecode != "i" or len(ends) != len(ARRAYS) or len(memory) != ends[-1]:
            raise ValueError("a step's memory must hold its arrays as C ints, and end where the last of them does")
        (first, _), (of_ends, _) = memory.buffer_info(), ends.buffer_info()
        refuse(
            self.library.mg_forward(
                self.thread_pool, self._model, first, of_ends, self._workspace, self._hidden.address
            )
        )
        return self._hidden.rows(batch.outputs)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        address, count = self.states(hidden)
        if count > self._logits.size:
            size = max(count, 2 * self._logits.size)
            self._logits = _Buffer(size, self._vocab_padded, self.vocab_size, torch.float32)
        refuse(
            self.library.mg_project(
                self.thread_pool,
                self._is_bf16,
                self.int8,
                address,
                count,
                self.hidden_size,
                self._lm_head_address,
                self._vocab_padded // LANES,
                self._logits.address,
            )
        )
        return self._logits.rows(count)

    def states(self, hidden: torch.Tensor) -> tuple[int, int]:
        """Address and number of hidden states [n, H]; most often those that :meth:`forward` gave last."""
        if hidden is self._hidden.last:
            return self._hidden.address, self._hidden.count
        count = hidden.shape[0]
        return address_of("hidden", hidden, (count, self.hidden_size), self.dtype), count

    def copy_slots(self, source: list[int], target: list[int]) -> None:
        if len(source) != len(target):
            raise ValueError(f"{len(source)} slots to copy from, {len(target)} to copy to")
        if source:
            pair = array("i", [*source, *target])
            first, _ = pair.buffer_info()
            refuse(self.library.mg_copy_slots(self._model, first, first + 4 * len(source), len(source)))

    def argmax(self, logits: torch.Tensor, rows: list[int]) -> list[int]:
        index = array("i", [*rows, *rows])
        first, _ = index.buffer_info()
        matrix = self._layout(logits)
        refuse(self.library.mg_argmax(self.thread_pool, *matrix, first, len(rows), first + 4 * len(rows)))
        return index[len(rows) :].tolist()

    def sample(self, logits: torch.Tensor, rows: list[int], params: RowSampling) -> list[int]:
        count = len(rows)
        index = array("i", [*rows, *rows])
        first, _ = index.buffer_info()
        refuse(
            self.library.mg_sample(
                self.thread_pool,
                *self._layout(logits),
                first,
                count,
                values_of("temperature", params.temperature, count, np.float32),
                values_of("top_k", params.top_k, count, np.int32),
                values_of("top_p", params.top_p, count, np.float32),
                values_of("min_p", params.min_p, count, np.float32),
                values_of("uniform", params.uniform, count, np.float64),
                first + 4 * count,
            )
        )
        return index[count:].tolist()

    def _layout(self, logits: torch.Tensor) -> tuple[int, int, int, int]:
        """Address, rows, elements from row to row, and columns: most often of the logits given last."""
        if logits is self._logits.last:
            return self._logits.address, self._logits.count, self._logits.stride, self.vocab_size
        address, stride = matrix_of("logits", logits, torch.float32)
        return address, logits.shape[0], stride, logits.shape[1]

    def embed(self, token_ids: list[int]) -> torch.Tensor:
        return self.embeddings[token_ids]

    def lm_head_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """``lm_head`` of some tokens [n, H], taken back out of the packed operand."""
        rows = unpack_groups(self.lm_head, self.hidden_size) if self.int8 else unpack(self.lm_head)
        return rows[ids].to(self.dtype)

    def bind_heads(self, heads: MedusaHeads | ResidualHeads) -> HeadsRunner:
        if isinstance(heads, ResidualHeads):
            return heads_in_torch(self, heads)
        reason = why_not_in_kernels(heads)
        if reason is None:
            return NativeHeads(self, heads)
        log.warning("the heads run in torch operations, which is slower than the kernels: %s", reason)
        return heads_in_torch(self, heads)

    def _packed(self, name: str, weight: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """The kernels' operand of a weight matrix, in the arena."""
        weight = weight.detach()
        address_of(name, weight.contiguous(), (rows, columns), self.dtype)
        return self.arena.keep(pack_groups(weight) if self.int8 else pack(weight))

    def _float(self, name: str, tensor: torch.Tensor, *shape: int) -> int:
        kept = tensor.detach().to(torch.float32).contiguous()
        self._kept.append(kept)
        return address_of(name, kept, shape, torch.float32)

    def _layer(self, layer: Any, config: Any) -> lib.Layer:
        attention, mlp = layer.self_attn, layer.mlp
        hidden, inner, head_dim = config.hidden_size, config.intermediate_size, head_size(config)
        q_size, kv_size = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
        qkv_size = q_size + 2 * kv_size
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        # Gate and up units alternate, so that one chunk of columns holds both operands of the product.
        gate_up = [projection.weight.detach().unflatten(0, (-1, LANES)) for projection in (mlp.gate_proj, mlp.up_proj)]
        weights = {
            "qkv": (torch.cat([projection.weight for projection in projections]), qkv_size, hidden),
            "o": (attention.o_proj.weight, hidden, q_size),
            "gate_up": (torch.stack(gate_up, dim=1).flatten(0, 2), 2 * inner, hidden),
            "down": (mlp.down_proj.weight, hidden, inner),
        }
        biases = [projection.bias for projection in projections]
        floats = {
            "attention_norm": (layer.input_layernorm.weight, hidden),
            "mlp_norm": (layer.post_attention_layernorm.weight, hidden),
            "qkv_bias": (None if biases[0] is None else torch.cat(biases), qkv_size),
            **{
                name: (getattr(getattr(attention, name, None), "weight", None), head_dim)
                for name in ("q_norm", "k_norm")
            },
        }
        kept = {name: self._packed(name, *weight) for name, weight in weights.items()}
        self._kept += kept.values()
        return lib.Layer(
            **{name: weight.data_ptr() for name, weight in kept.items()},
            **{name: None if each is None else self._float(name, each, size) for name, (each, size) in floats.items()},
        )


class _Buffer:
    """Rows that every call writes again; views of them are made once. ``last``: the view given last, of ``count`` rows;
    who sees it again need not ask torch about it."""

    def __init__(self, size: int, stride: int, columns: int, dtype: torch.dtype) -> None:
        self.size, self.stride = size, stride
        self._memory = torch.empty(size, stride, dtype=dtype)
        self._columns = columns
        self.address = self._memory.data_ptr()
        self._views: dict[int, torch.Tensor] = {}
        self.last: torch.Tensor | None = None
        self.count = 0

    def rows(self, count: int) -> torch.Tensor:
        """The first ``count`` rows."""
        view = self._views.get(count)
        if view is None:
            view = self._views[count] = self._memory[:count, : self._columns]
        self.last, self.count = view, count
        return view
