"""Llama-shaped models through the Triton kernels: on a GPU as CUDA graphs, elsewhere in Triton's interpreter."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Sequence
from typing import Any

import torch
import triton

from backends.heads.module import MedusaHeads
from backends.heads.residual import ResidualHeads
from backends.runners.base import HeadsRunner
from backends.runners.batch import PAGE_SIZE, StepBatch
from backends.runners.torch_heads import heads_in_torch
from backends.runners.triton import ops
from backends.runners.triton.heads import TritonHeads, why_not_in_triton
from backends.runners.triton.sampler import DeviceSampler
from backends.runners.triton.tiling import BUCKETS, Tiling, bucket_of, outputs_of
from backends.runners.triton.weights import DeviceWeights, Progress, load_weights, unsupported_reason
from backends.runners.triton.work_list import ITEM, items_of, lengths_of, most_items
from backends.sampling.rows import RowSampling

log = logging.getLogger(__name__)

Ints = dict[str, torch.Tensor]


class TritonUnavailable(ValueError):
    """The kernels can't run this model, or not here; the message says why."""


class TritonRunner:
    """See :class:`backends.runners.base.ModelRunner`. Copies the weights of a transformers model, layer by layer; the
    model may then be freed.

    A step is one body of launches over buffers that stay (:meth:`_body`): nothing is allocated, nothing is read back,
    and of the step's size it knows the bucket only. A graph for each bucket holds it; the interpreter runs it as it is,
    with the rows that fill the bucket.

    Raises :class:`TritonUnavailable`.
    """

    kind = "triton"
    # The input arrays of a step that a device still works on must not be filled anew, and nothing guards them yet.
    runs_ahead = False
    software = f"torch {torch.__version__}, triton {triton.__version__}" + (", interpreted" if ops.INTERPRETED else "")

    def __init__(
        self,
        model: Any,
        *,
        num_pages: int,
        max_rows: int,
        max_context: int,
        device: torch.device | str = "cuda",
        tiling: Tiling | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.device = torch.device(device)
        if self.device.type != "cuda" and not ops.INTERPRETED:
            raise TritonUnavailable(f"the Triton kernels run on CUDA devices, not on {self.device}")
        if reason := unsupported_reason(model):
            raise TritonUnavailable(reason)
        self.tiling = tiling or ops.default_tiling()
        self.num_pages, self.max_rows, self.max_context = num_pages, max_rows, max_context
        # In the interpreter a step's time says nothing.
        on_device = self.device.type == "cuda"
        self.row_buckets: Sequence[int] = [rows for rows in BUCKETS if rows <= max_rows] if on_device else ()
        self.weights: DeviceWeights = load_weights(model, self.device, max_context, progress)
        weights = self.weights
        self.dtype = weights.embeddings.dtype
        self.vocab_size, self.hidden_size = weights.embeddings.shape
        # Beside the candidates' slots, one page whose first slot is written by rows that fill a bucket.
        self._scratch = num_pages * PAGE_SIZE
        candidates = -(-max_rows // PAGE_SIZE)
        self._trash = self._scratch + candidates * PAGE_SIZE
        shape = weights.shape
        pool = (len(weights.layers), num_pages + candidates + 1, shape.kv_heads, PAGE_SIZE, shape.size)
        self._k_pool, self._v_pool = (self._zeros(*pool) for _ in range(2))
        self._state = _State(self, weights)
        self._ints = _StepInts(self)
        self._sampler = DeviceSampler(self.tiling, self.device, self.vocab_size)
        self._programs = 4
        if self.device.type == "cuda":
            self._programs = 2 * torch.cuda.get_device_properties(self.device).multi_processor_count
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._last_logits: torch.Tensor | None = None
        self._bound_thread: int | None = None

    @property
    def threads(self) -> int:
        return torch.get_num_threads()

    def _zeros(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype or self.dtype, device=self.device)

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> torch.Tensor:
        if batch.rows > self.max_rows:
            raise ValueError(f"{batch.rows} rows in a step of at most {self.max_rows}")
        self.use_device()
        rows = bucket_of(batch.rows, self.max_rows)
        outputs = outputs_of(batch.outputs, rows) if batch.outputs else 0
        self._ints.fill(batch)
        if ops.INTERPRETED:
            self._body(rows, outputs)
        else:
            self._graph(rows, outputs).replay()
        self._last_logits = self._state.logits[: batch.outputs]
        return self._state.hidden[: batch.outputs]

    def _body(self, rows: int, outputs: int) -> None:
        """What a graph holds: a step of ``rows`` rows, of which ``outputs`` get logits."""
        state, ints, weights, tiling = self._state, self._ints.on_device, self.weights, self.tiling
        shape, eps = weights.shape, weights.eps

        def norm(weight: torch.Tensor, chains: int) -> None:
            ops.add_norm(state.x, state.part, weight, state.normed, rows, eps, chains)

        ops.take(weights.embeddings, ints["tokens"], state.x, rows)
        chains = 0
        for layer, k_pool, v_pool in zip(weights.layers, self._k_pool, self._v_pool, strict=True):
            norm(layer.attention_norm, chains)
            ops.linear(tiling, state.normed, layer.qkv, state.qkv, rows, bias=layer.qkv_bias)
            ops.rotate_store(
                tiling,
                shape,
                state.qkv,
                layer.head_norms,
                state.q,
                (k_pool, v_pool),
                ints["positions"],
                ints["slots"],
                weights.rotation,
                rows,
                eps,
            )
            ops.attend(
                tiling,
                layer.shape,
                state.q,
                (k_pool, v_pool),
                state.pieces,
                ints,
                state.attended,
                rows,
                weights.scale,
                self._programs,
            )
            chains = ops.linear(tiling, state.attended, layer.o, state.x, rows, part=state.part)
            norm(layer.mlp_norm, chains)
            ops.linear(tiling, state.normed, layer.gate_up, state.inner, rows, gated=True)
            chains = ops.linear(tiling, state.inner, layer.down, state.x, rows, part=state.part)
        norm(weights.final_norm, chains)
        if outputs:
            ops.take(state.normed, ints["out_row"], state.hidden, outputs)
            ops.linear(tiling, state.hidden, weights.lm_head, state.logits, outputs)

    def _graph(self, rows: int, outputs: int) -> torch.cuda.CUDAGraph:
        """Captured when a bucket is first met, after one run that compiles and loads what it launches."""
        key = rows, outputs
        if key not in self._graphs:
            side = torch.cuda.Stream(self.device)
            side.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(side):
                self._body(rows, outputs)
            torch.cuda.current_stream(self.device).wait_stream(side)
            torch.cuda.synchronize(self.device)
            graph = torch.cuda.CUDAGraph()
            # Other threads may use CUDA meanwhile.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._body(rows, outputs)
            self._graphs[key] = graph
        return self._graphs[key]

    def use_device(self) -> None:
        """Triton launches on the thread's current device, which a new thread has not set."""
        if self.device.type == "cuda" and self._bound_thread != threading.get_ident():
            torch.cuda.set_device(self.device)
            self._bound_thread = threading.get_ident()

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._last_logits is not None and hidden.data_ptr() == self._state.hidden.data_ptr():
            # The step computed them already.
            return self._last_logits[: len(hidden)]
        self.use_device()
        hidden = hidden.to(self.device, self.dtype).contiguous()
        out = self._zeros(len(hidden), self.vocab_size, dtype=torch.float32)
        for at in range(0, len(hidden), self.max_rows):
            part = hidden[at : at + self.max_rows]
            ops.linear(self.tiling, part, self.weights.lm_head, out[at : at + self.max_rows], len(part))
        return out

    def copy_slots(self, source: list[int], target: list[int]) -> None:
        if len(source) != len(target):
            raise ValueError(f"{len(source)} slots to copy from, {len(target)} to copy to")
        if source:
            self.use_device()
            pair = torch.tensor([source, target], dtype=torch.int32).to(self.device, non_blocking=True)
            ops.copy_slots((self._k_pool, self._v_pool), pair[0], pair[1], len(source))

    def argmax(self, logits: torch.Tensor, rows: list[int]) -> list[int]:
        self.use_device()
        return self._sampler.argmax(logits.to(self.device), rows)

    def sample(self, logits: torch.Tensor, rows: list[int], params: RowSampling) -> list[int]:
        self.use_device()
        return self._sampler.sample(logits.to(self.device), rows, params)

    def embed(self, token_ids: list[int]) -> torch.Tensor:
        return self.weights.embeddings[torch.tensor(token_ids, device=self.device)]

    def bind_heads(self, heads: MedusaHeads | ResidualHeads) -> HeadsRunner:
        if isinstance(heads, ResidualHeads):
            return heads_in_torch(self, heads)
        if reason := why_not_in_triton(heads):
            log.warning("the heads run in torch operations, which is slower than the kernels: %s", reason)
            return heads_in_torch(self, heads)
        return TritonHeads(self, heads)


class _State:
    """What a step's launches leave to one another, for ``max_rows`` rows."""

    def __init__(self, runner: TritonRunner, weights: DeviceWeights) -> None:
        rows, shape, hidden = runner.max_rows, weights.shape, runner.hidden_size
        make = functools.partial(runner._zeros, rows)
        self.x, self.normed, self.hidden = make(hidden), make(hidden), make(hidden)
        self.qkv, self.q = make(shape.projected), make(shape.heads, shape.size)
        self.attended, self.inner = make(shape.heads * shape.size), make(weights.inner)
        chains = max(
            runner.tiling.chains(hidden, weight.shape[1])
            for layer in weights.layers
            for weight in (layer.o, layer.down)
        )
        self.part = runner._zeros(chains, rows, hidden, dtype=torch.float32)
        self.logits = make(runner.vocab_size, dtype=torch.float32)
        self.pieces = ops.AttentionBuffers.empty(runner.tiling, shape, rows, runner.max_context, runner.device)


class _StepInts:
    """A step's numbers, one behind the other, so that one copy brings them all to the device."""

    def __init__(self, runner: TritonRunner) -> None:
        rows, tiling = runner.max_rows, runner.tiling
        self._runner = runner
        self._most_items = most_items(rows, runner.max_context, tiling)
        self._most_pages = rows * -(-runner.max_context // PAGE_SIZE)
        sizes = {
            "tokens": rows,
            "positions": rows,
            "slots": rows,
            "row_n": rows,
            "out_row": rows,
            "count": 1,
            "items": ITEM * self._most_items,
            "pages": self._most_pages,
            "tail": 2 * PAGE_SIZE * rows,
        }
        self._copied = torch.cuda.Event() if runner.device.type == "cuda" else None
        self._ends = ends = {}
        total = 0
        for name, size in sizes.items():
            ends[name] = (total, total + size)
            total += -(-size // PAGE_SIZE) * PAGE_SIZE  # 64 bytes: what follows is aligned
        self._host = torch.zeros(total, dtype=torch.int32, pin_memory=runner.device.type == "cuda")
        self._device = self._host.to(runner.device)
        self._arrays = {name: self._host.numpy()[start:end] for name, (start, end) in ends.items()}
        self.on_device: Ints = {name: self._device[start:end] for name, (start, end) in ends.items()}

    def fill(self, batch: StepBatch) -> None:
        """Rows that fill the bucket: token and position 0, no key, and the slot that nobody reads (R7)."""
        runner, arrays = self._runner, self._arrays
        if self._copied is not None:
            # A step without outputs is not waited for, and its numbers may not have been copied yet.
            self._copied.synchronize()
        items = items_of(batch, runner.tiling, runner.weights.shape.group, runner._scratch)
        rows = batch.rows
        for name in ("tokens", "positions", "slots"):
            arrays[name][:rows] = getattr(batch, name)
            arrays[name][rows:] = runner._trash if name == "slots" else 0
        arrays["row_n"][:rows], arrays["row_n"][rows:] = lengths_of(batch), 0
        arrays["out_row"][: batch.outputs], arrays["out_row"][batch.outputs :] = batch.out_row, 0
        arrays["count"][0] = len(items)
        arrays["items"][: items.size] = items.ravel()
        pages, tail = batch.pages, batch.tail_slots
        if len(pages) > self._most_pages:
            raise ValueError(f"{len(pages)} pages in a step of at most {self._most_pages}")
        arrays["pages"][: len(pages)] = pages
        arrays["tail"][: len(tail)] = tail
        used = {"items": items.size, "pages": len(pages), "tail": len(tail)}
        self._copy(0, self._ends["items"][0])
        for name, size in used.items():
            self._copy(self._ends[name][0], self._ends[name][0] + size)
        if self._copied is not None:
            self._copied.record()

    def _copy(self, start: int, end: int) -> None:
        self._device[start:end].copy_(self._host[start:end], non_blocking=True)
