"""Llama-shaped models on the CPU, one C call per step.

Runs models built from RMS norm, rotary embedding, grouped-query attention and a SiLU-gated MLP: Llama, Mistral without
a sliding window, Qwen 2 and 3. :func:`unsupported_reason` says why another model is not run here.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from backends.batch import PAGE_SIZE, StepBatch
from backends.cores import usable_cores
from backends.follow import LEAST_SURVIVAL, WIDTH, plan_of_tree
from backends.heads import MedusaHeads
from backends.native import library as lib
from backends.native.arena import WeightArena, zeros
from backends.runner import Proposals, RowSampling
from backends.tree import MAX_RANKS, CandidateTree

LANES = 16
SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")


def unsupported_reason(model: Any) -> str | None:
    """Why the native runner can't run this transformers model; None when it can."""
    config = model.config
    if config.model_type not in SUPPORTED:
        return f"model type {config.model_type!r} is not one of {', '.join(SUPPORTED)}"
    head_dim = _head_dim(config)
    if config.hidden_act != "silu":
        return f"activation {config.hidden_act!r} is not silu"
    if head_dim % LANES or config.hidden_size % LANES or config.intermediate_size % LANES:
        return "hidden, intermediate and head sizes must be multiples of 16"
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        return "sliding window attention"
    if getattr(config, "mlp_bias", False) or model.model.layers[0].self_attn.o_proj.bias is not None:
        return "biases on the output or MLP projections"
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") not in ("default", "linear", "llama3", "yarn"):
        return f"rope type {rope.get('rope_type')!r} changes with the length of the sequence"
    if model.dtype not in (torch.float32, torch.bfloat16):
        return f"dtype {model.dtype}"
    if getattr(config, "quantization_config", None) is not None:
        return "quantised weights"
    return None


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def pack(weight: torch.Tensor) -> torch.Tensor:
    """[N, K] -> the kernels' operand: [ceil(N / 16), K / step, 16, step], zero rows added (step 2 in bfloat16)."""
    step = 2 if weight.dtype == torch.bfloat16 else 1
    n, k = weight.shape
    padded = F.pad(weight, (0, 0, 0, -n % LANES))
    return padded.view(-1, LANES, k // step, step).permute(0, 2, 1, 3).contiguous()


def pack_int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, K] -> the operand of ``int8.h``: [ceil(N / 16), K / 4, 16, 4] uint8 around 128, and each row's scale [N'].

    K must be a multiple of 4.
    """
    padded = F.pad(weight.to(torch.float32), (0, 0, 0, -weight.shape[0] % LANES))
    scale = padded.abs().amax(dim=1).clamp(min=1e-30) / 127.0
    q = ((padded / scale[:, None]).round() + 128.0).to(torch.uint8)
    return q.view(-1, LANES, weight.shape[1] // 4, 4).permute(0, 2, 1, 3).contiguous(), scale


class NativeRunner:
    """See :class:`backends.runner.ModelRunner`. Copies the weights of a transformers model, which may then be freed.

    Between two calls the weights have swept everything else out of the caches, so a torch or numpy operation that takes
    a microsecond elsewhere takes twenty to a hundred here. Hence buffers and views of them that are made once, and
    arrays of the standard library.
    """

    kind = "native"

    def __init__(
        self, model: Any, *, num_pages: int, max_rows: int, max_context: int, threads: int | None = None
    ) -> None:
        reason = unsupported_reason(model)
        if reason:
            raise lib.NativeUnavailable(reason)
        self._lib = lib.load_library()
        self.threads = threads or min(torch.get_num_threads(), usable_cores())
        config = model.config
        self.dtype: torch.dtype = model.dtype
        self.device = torch.device("cpu")
        self.hidden_size: int = config.hidden_size
        self.vocab_size: int = config.vocab_size
        self.num_pages, self.max_rows, self.max_context = num_pages, max_rows, max_context
        self._is_bf16 = int(self.dtype == torch.bfloat16)
        self._kept: list[torch.Tensor] = []  # tensors that C structures point into
        self.arena = WeightArena()
        head_dim, kv_heads = _head_dim(config), config.num_key_value_heads
        scratch_pages = -(-max_rows // PAGE_SIZE)
        pool = (config.num_hidden_layers, num_pages + scratch_pages, kv_heads * head_dim * PAGE_SIZE)
        layers = (lib.Layer * pool[0])(*(self._layer(layer) for layer in model.model.layers))
        cos, sin = model.model.rotary_emb(torch.zeros(1, 1, 1), torch.arange(max_context)[None])
        self.embeddings: torch.Tensor = model.model.embed_tokens.weight.detach().contiguous()
        self._lm_head = self.arena.keep(pack(model.lm_head.weight.detach()))
        self._lm_head_address = self._lm_head.data_ptr()
        self._vocab_padded = self._lm_head.shape[0] * LANES
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
            eps=config.rms_norm_eps,
            scale=model.model.layers[0].self_attn.scaling,
            pages=pool[1],
            layer=layers,
            embed=self._pointer(self.embeddings),
            final_norm=self._float(model.model.norm.weight),
            cos=self._float(cos[0, :, : head_dim // 2]),
            sin=self._float(sin[0, :, : head_dim // 2]),
            k_pool=self._pointer(self._k_pool),
            v_pool=self._pointer(self._v_pool),
        )
        self._workspace = self._lib.mg_workspace_new(self._model, max_rows, max_context, self.threads)
        self._pool = self._lib.mg_pool_new(self.threads)
        if not self._workspace or not self._pool:
            raise MemoryError("no memory or threads for the kernels' workspace")

    def __del__(self) -> None:
        for name, free in (("_workspace", "mg_workspace_free"), ("_pool", "mg_pool_free")):
            if getattr(self, name, None):
                getattr(self._lib, free)(getattr(self, name))
                setattr(self, name, None)

    def forward(self, batch: StepBatch) -> torch.Tensor:
        if batch.rows > self.max_rows:
            raise ValueError(f"{batch.rows} rows in a step of at most {self.max_rows}")
        first, _ = batch.memory.buffer_info()
        starts = (first, *(first + 4 * end for end in batch.ends[:-1]))
        rows = lib.Batch(batch.rows, batch.outputs, *starts)
        self._lib.mg_forward(self._pool, self._model, rows, self._workspace, self._hidden.address)
        return self._hidden.rows(batch.outputs)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        count = hidden.shape[0]
        if count > self._logits.size:
            size = max(count, 2 * self._logits.size)
            self._logits = _Buffer(size, self._vocab_padded, self.vocab_size, torch.float32)
        self._lib.mg_project(
            self._pool,
            self._is_bf16,
            hidden.data_ptr(),
            count,
            self.hidden_size,
            self._lm_head_address,
            self._vocab_padded // LANES,
            self._logits.address,
        )
        return self._logits.rows(count)

    def copy_slots(self, source: list[int], target: list[int]) -> None:
        if source:
            pair = array("i", [*source, *target])
            first, _ = pair.buffer_info()
            self._lib.mg_copy_slots(self._model, first, first + 4 * len(source), len(source))

    def argmax(self, logits: torch.Tensor, rows: list[int]) -> list[int]:
        index = array("i", [*rows, *rows])
        first, _ = index.buffer_info()
        address, stride, columns = self._logits.layout(logits)
        self._lib.mg_argmax(self._pool, address, first, len(rows), stride, columns, first + 4 * len(rows))
        return index[len(rows) :].tolist()

    def sample(self, logits: torch.Tensor, rows: list[int], params: RowSampling) -> list[int]:
        index = array("i", [*rows, *rows])
        first, _ = index.buffer_info()
        address, stride, columns = self._logits.layout(logits)
        failed = self._lib.mg_sample(
            self._pool,
            address,
            first,
            len(rows),
            stride,
            columns,
            params.temperature.ctypes.data,
            params.top_k.ctypes.data,
            params.top_p.ctypes.data,
            params.min_p.ctypes.data,
            params.uniform.ctypes.data,
            first + 4 * len(rows),
        )
        if failed:
            raise MemoryError("no memory to sample")
        return index[len(rows) :].tolist()

    def bind_heads(self, heads: MedusaHeads) -> NativeHeads:
        return NativeHeads(self, heads)

    def _pointer(self, tensor: torch.Tensor) -> int:
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _float(self, tensor: torch.Tensor) -> int:
        return self._pointer(tensor.detach().to(torch.float32).contiguous())

    def _layer(self, layer: Any) -> lib.Layer:
        attention, mlp = layer.self_attn, layer.mlp
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        gate, up = pack(mlp.gate_proj.weight.detach()), pack(mlp.up_proj.weight.detach())
        biases = [projection.bias for projection in projections]
        norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        return lib.Layer(
            qkv=self._pointer(
                self.arena.keep(pack(torch.cat([projection.weight.detach() for projection in projections])))
            ),
            o=self._pointer(self.arena.keep(pack(attention.o_proj.weight.detach()))),
            # Gate and up units alternate, so that one chunk of columns holds both operands of the product.
            gate_up=self._pointer(self.arena.keep(torch.stack([gate, up], dim=1).contiguous())),
            down=self._pointer(self.arena.keep(pack(mlp.down_proj.weight.detach()))),
            attention_norm=self._float(layer.input_layernorm.weight),
            mlp_norm=self._float(layer.post_attention_layernorm.weight),
            qkv_bias=None if biases[0] is None else self._float(torch.cat(biases)),
            q_norm=None if norms[0] is None else self._float(norms[0].weight),
            k_norm=None if norms[1] is None else self._float(norms[1].weight),
        )


class _Buffer:
    """Rows that every call writes again; views of them are made once."""

    def __init__(self, size: int, stride: int, columns: int, dtype: torch.dtype) -> None:
        self.size, self.stride = size, stride
        self._memory = torch.empty(size, stride, dtype=dtype)
        self._columns = columns
        self.address = self._memory.data_ptr()
        self._views: dict[int, torch.Tensor] = {}
        self._last: torch.Tensor | None = None

    def rows(self, count: int) -> torch.Tensor:
        """The first ``count`` rows."""
        view = self._views.get(count)
        if view is None:
            view = self._views[count] = self._memory[:count, : self._columns]
        self._last = view
        return view

    def layout(self, tensor: torch.Tensor) -> tuple[int, int, int]:
        """Address, elements from row to row, and columns of a matrix: most often the rows given last."""
        if tensor is self._last:
            return self.address, self.stride, self._columns
        return tensor.data_ptr(), tensor.stride(0), tensor.shape[1]


class NativeHeads:
    """Medusa heads through the kernels. See :class:`backends.runner.HeadsRunner`."""

    def __init__(self, runner: NativeRunner, heads: MedusaHeads) -> None:
        if heads.inner_size % LANES:
            raise ValueError(f"inner size {heads.inner_size} of the heads is not a multiple of {LANES}")
        self._runner = runner
        self._heads = heads
        self.num_heads = heads.num_heads
        ids = heads.draft_token_ids
        self._draft_ids = np.arange(runner.vocab_size, dtype=np.int32) if ids is None else ids.numpy()
        assert heads.up.bias is not None
        bias = heads.up.bias.detach().to(torch.float32).flatten().contiguous()
        self._kept: list[torch.Tensor] = [bias]
        self._vocab_padded = -(-len(self._draft_ids) // LANES) * LANES
        # Guesses need no more than eight bits, and the heads take half the time. In float32 the backbone's precision
        # was asked for, so the heads keep it too.
        int8 = heads.sequential and runner.dtype == torch.bfloat16 and bool(runner._lib.mg_has_int8())
        up, down = heads.up.weight.detach().flatten(0, 1), heads.down.weight.detach()
        if int8:
            layers = {
                "up8": self._int8(up),
                "down8": self._int8(down.flatten(0, 1)),
                "draft_lm_head8": self._int8(self._draft_rows()),
            }
        else:
            layers = {
                "up": self._keep(pack(up.to(runner.dtype))),
                "down": self._keep(torch.stack([pack(weight.to(runner.dtype)) for weight in down])),
                "draft_lm_head": runner._lm_head.data_ptr() if ids is None else self._keep(pack(self._draft_rows())),
            }
        self._struct = lib.Heads(
            heads=self.num_heads,
            hidden=runner.hidden_size,
            inner=heads.inner_size,
            in_size=heads.up.weight.shape[2],
            draft_vocab_padded=self._vocab_padded,
            draft_vocab=len(self._draft_ids),
            is_bf16=runner._is_bf16,
            is_int8=int8,
            embed=runner.embeddings.data_ptr(),
            up_bias=bias.data_ptr(),
            draft_ids=self._draft_ids.ctypes.data,
            **layers,
        )

    def _draft_rows(self) -> torch.Tensor:
        """Rows of ``lm_head`` [V', H], taken back out of the packed operand [units, K / step, 16, step]."""
        rows = self._runner._lm_head.permute(0, 2, 1, 3).reshape(-1, self._runner.hidden_size)
        return rows[torch.from_numpy(self._draft_ids).long()]

    def _keep(self, weight: torch.Tensor) -> int:
        kept = self._runner.arena.keep(weight)
        self._kept.append(kept)
        return kept.data_ptr()

    def _int8(self, weight: torch.Tensor) -> lib.Int8Layer:
        return lib.Int8Layer(*map(self._keep, pack_int8(weight)))

    def propose(
        self,
        hidden: torch.Tensor,
        contexts: list[list[int]],
        k: int,
        trees: Sequence[CandidateTree | None] = (),
        *,
        rows: Sequence[int] | None = None,
        least: float = LEAST_SURVIVAL,
    ) -> list[Proposals]:
        if self._heads.sequential:
            return self._follow(hidden, range(len(contexts)) if rows is None else rows, contexts, k, trees, least)
        if rows is not None:
            hidden = hidden[list(rows)]
        runner, n = self._runner, len(contexts)
        pending = [context[-1] for context in contexts]
        k = min(k, MAX_RANKS, len(self._draft_ids))
        hidden = hidden.contiguous()
        block_input = self._heads.block_input(hidden, runner.embeddings[pending]).contiguous()
        count = self.num_heads * n
        logits = torch.empty(count, self._vocab_padded, dtype=torch.float32)
        if runner._lib.mg_heads_logits(
            runner._pool,
            ctypes.byref(self._struct),
            block_input.data_ptr(),
            hidden.data_ptr(),
            n,
            logits.data_ptr(),
        ):
            raise MemoryError("no memory for the heads")
        ids = np.empty((self.num_heads, n, k), dtype=np.int32)
        probabilities = np.empty((self.num_heads, n, k), dtype=np.float32)
        runner._lib.mg_top_k(
            runner._pool,
            logits.data_ptr(),
            count,
            self._vocab_padded,
            len(self._draft_ids),
            k,
            ids.ctypes.data,
            probabilities.ctypes.data,
        )
        tokens = self._draft_ids[ids]
        return [Proposals(tokens[:, i], probabilities[:, i]) for i in range(n)]

    def _follow(
        self,
        hidden: torch.Tensor,
        rows: Sequence[int],
        contexts: list[list[int]],
        k: int,
        trees: Sequence[CandidateTree | None],
        least: float,
    ) -> list[Proposals]:
        runner, n = self._runner, len(contexts)
        k = min(k, MAX_RANKS, self._struct.draft_vocab)
        hidden = hidden.contiguous()
        plans = {i: plan_of_tree(tree, self.num_heads, k) for i, tree in enumerate(trees) if tree is not None}
        width, lists = WIDTH, 1 + WIDTH * (self.num_heads - 1)
        for plan in plans.values():
            width, lists = max(width, plan.widest), max(lists, plan.lists)
        given = array("i", [*rows, *(context[-1] for context in contexts)])
        if plans:
            given.extend(plans[i].lists if i in plans else 0 for i in range(n))
            for part in ("above", "ranks"):
                for i in range(n):
                    named = (0, *getattr(plans[i], part)) if i in plans else ()
                    given.extend((*named, *[0] * (lists - len(named))))
        of_rows, _ = given.buffer_info()
        planned = of_rows + 8 * n
        of_plans = (planned, planned + 4 * n, planned + 4 * n * (1 + lists)) if plans else (None, None, None)
        # What the kernel writes: guesses and the lists below them, then what it keeps for each sequence and row.
        guesses = n * lists * k
        sizes = (guesses, guesses, n, n, n * width, n * width, n * width)
        integers, floats = array("i", bytes(4 * sum(sizes))), array("f", bytes(4 * (guesses + n * lists)))
        (of_integers, _), (of_floats, _) = integers.buffer_info(), floats.buffer_info()
        tokens, below, *kept = (of_integers + 4 * start for start in accumulate(sizes[:-1], initial=0))
        follow = lib.Follow(
            *(n, lists, k, WIDTH, least, 0, 0, of_rows, of_rows + 4 * n, *of_plans),
            *(tokens, below, of_floats, of_floats + 4 * guesses, *kept),
        )
        if runner._lib.mg_heads_follow(
            runner._pool, ctypes.byref(self._struct), ctypes.byref(follow), hidden.data_ptr(), n * width
        ):
            raise MemoryError("no memory for the heads")
        levels: int = follow.levels
        found = []
        for i, used in enumerate(integers[2 * guesses : 2 * guesses + n]):
            begin = i * lists * k
            end = begin + used * k
            following = integers[guesses + begin : guesses + end]
            found.append(Proposals.of_memory(integers[begin:end], floats[begin:end], following, k, levels))
        return found
