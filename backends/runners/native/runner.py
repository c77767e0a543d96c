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

from backends.heads.expansion import LEAST_SURVIVAL, WIDTH, plan_of_tree
from backends.heads.module import MedusaHeads
from backends.runners.base import Proposals
from backends.runners.batch import ARRAYS, PAGE_SIZE, StepBatch
from backends.runners.cpu_cores import usable_cores
from backends.runners.native import bindings as lib
from backends.runners.native.arena import WeightArena, zeros
from backends.runners.native.checked import address_of, matrix_of, refuse, values_of
from backends.sampling.rows import RowSampling
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
    if config.num_attention_heads % config.num_key_value_heads:
        return f"{config.num_attention_heads} query heads are no multiple of {config.num_key_value_heads} key heads"
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        return "sliding window attention"
    if getattr(config, "mlp_bias", False) or model.model.layers[0].self_attn.o_proj.bias is not None:
        return "biases on the output or MLP projections"
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") not in ("default", "linear", "llama3", "yarn"):
        return f"rope type {rope.get('rope_type')!r} changes with the length of the sequence"
    if 2 * model.model.rotary_emb.inv_freq.shape[0] != head_dim:
        return "rotary embedding over a part of each head"
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
    """See :class:`backends.runners.base.ModelRunner`. Copies the weights of a transformers model, which may then be
    freed.

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
        layers = (lib.Layer * pool[0])(*(self._layer(layer, config) for layer in model.model.layers))
        cos, sin = model.model.rotary_emb(torch.zeros(1, 1, 1), torch.arange(max_context)[None])
        half = head_dim // 2
        self.embeddings: torch.Tensor = model.model.embed_tokens.weight.detach().contiguous()
        self._lm_head = self._packed("lm_head", model.lm_head.weight, self.vocab_size, self.hidden_size)
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
        refuse(self._lib.mg_model_fault(self._model, max_rows, self.threads))
        self._workspace = self._lib.mg_workspace_new(self._model, max_rows, self.threads)
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
        memory, ends = batch.memory, array("i", batch.ends)
        if memory.typecode != "i" or len(ends) != len(ARRAYS) or len(memory) != ends[-1]:
            raise ValueError("a step's memory must hold its arrays as C ints, and end where the last of them does")
        (first, _), (of_ends, _) = memory.buffer_info(), ends.buffer_info()
        refuse(self._lib.mg_forward(self._pool, self._model, first, of_ends, self._workspace, self._hidden.address))
        return self._hidden.rows(batch.outputs)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        address, count = self.states(hidden)
        if count > self._logits.size:
            size = max(count, 2 * self._logits.size)
            self._logits = _Buffer(size, self._vocab_padded, self.vocab_size, torch.float32)
        self._lib.mg_project(
            self._pool,
            self._is_bf16,
            address,
            count,
            self.hidden_size,
            self._lm_head_address,
            self._vocab_padded // LANES,
            self._logits.address,
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
            refuse(self._lib.mg_copy_slots(self._model, first, first + 4 * len(source), len(source)))

    def argmax(self, logits: torch.Tensor, rows: list[int]) -> list[int]:
        index = array("i", [*rows, *rows])
        first, _ = index.buffer_info()
        matrix = self._layout(logits)
        refuse(self._lib.mg_argmax(self._pool, *matrix, first, len(rows), first + 4 * len(rows)))
        return index[len(rows) :].tolist()

    def sample(self, logits: torch.Tensor, rows: list[int], params: RowSampling) -> list[int]:
        count = len(rows)
        index = array("i", [*rows, *rows])
        first, _ = index.buffer_info()
        refuse(
            self._lib.mg_sample(
                self._pool,
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

    def bind_heads(self, heads: MedusaHeads) -> NativeHeads:
        return NativeHeads(self, heads)

    def _packed(self, name: str, weight: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """The kernels' operand of a weight matrix, in the arena."""
        weight = weight.detach()
        address_of(name, weight.contiguous(), (rows, columns), self.dtype)
        return self.arena.keep(pack(weight))

    def _float(self, name: str, tensor: torch.Tensor, *shape: int) -> int:
        kept = tensor.detach().to(torch.float32).contiguous()
        self._kept.append(kept)
        return address_of(name, kept, shape, torch.float32)

    def _layer(self, layer: Any, config: Any) -> lib.Layer:
        attention, mlp = layer.self_attn, layer.mlp
        hidden, inner, head_dim = config.hidden_size, config.intermediate_size, _head_dim(config)
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


class NativeHeads:
    """Medusa heads through the kernels. See :class:`backends.runners.base.HeadsRunner`."""

    def __init__(self, runner: NativeRunner, heads: MedusaHeads) -> None:
        if heads.inner_size % LANES:
            raise ValueError(f"inner size {heads.inner_size} of the heads is not a multiple of {LANES}")
        if heads.hidden_size != runner.hidden_size:
            raise ValueError(f"heads are for hidden size {heads.hidden_size}, the backbone has {runner.hidden_size}")
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
            vocab=runner.vocab_size,
            is_bf16=runner._is_bf16,
            is_int8=int8,
            embed=runner.embeddings.data_ptr(),
            up_bias=address_of("up.bias", bias, (self.num_heads * heads.inner_size,), torch.float32),
            draft_ids=values_of("draft_token_ids", self._draft_ids, len(self._draft_ids), np.int32),
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
        runner, n, vocab = self._runner, len(contexts), len(self._draft_ids)
        pending = [context[-1] for context in contexts]
        k = min(k, MAX_RANKS, vocab)
        hidden = hidden[:n].contiguous()
        block_input = self._heads.block_input(hidden, runner.embeddings[pending]).contiguous()
        count = self.num_heads * n
        logits = torch.empty(count, self._vocab_padded, dtype=torch.float32)
        refuse(
            runner._lib.mg_heads_logits(
                runner._pool,
                ctypes.byref(self._struct),
                address_of("the heads' input", block_input, (n, self._struct.in_size), runner.dtype),
                address_of("hidden", hidden, (n, runner.hidden_size), runner.dtype),
                n,
                logits.data_ptr(),
            )
        )
        ids = np.empty((self.num_heads, n, k), dtype=np.int32)
        probabilities = np.empty((self.num_heads, n, k), dtype=np.float32)
        given, guessed = (ids.ctypes.data, probabilities.ctypes.data)
        refuse(
            runner._lib.mg_top_k(runner._pool, logits.data_ptr(), count, self._vocab_padded, vocab, k, given, guessed)
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
        of_hidden, hidden_rows = runner.states(hidden.contiguous())
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
        refuse(
            runner._lib.mg_heads_follow(
                runner._pool,
                ctypes.byref(self._struct),
                ctypes.byref(follow),
                of_hidden,
                hidden_rows,
                n * width,
            )
        )
        levels: int = follow.levels
        found = []
        for i, used in enumerate(integers[2 * guesses : 2 * guesses + n]):
            begin = i * lists * k
            end = begin + used * k
            following = integers[guesses + begin : guesses + end]
            found.append(Proposals.of_memory(integers[begin:end], floats[begin:end], following, k, levels))
        return found
