"""From a model's name to a running engine."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from backends.checkpoints.loader import BackboneFacts, LoadedHeads, holds_heads, load_checkpoint
from backends.cost.calibration import Calibration
from backends.cost.fingerprint import facts_of
from backends.cost.persistence import CostKeeping
from backends.cost.probe import MEASURE_S, CostProbe
from backends.cost.step_cost import StepCost
from backends.cost.stores import CostStore
from backends.engine.config import EngineConfig
from backends.engine.core import EngineCore, Observer
from backends.engine.thread import Engine
from backends.grammar.compiler import GrammarCompiler
from backends.models.demo import DEMO_MODEL_NAME, prepare_demo_model
from backends.models.hub import settle_for_the_cache
from backends.models.tiny import TINY_MODEL_NAME, tiny_heads, tiny_model, tiny_tokenizer
from backends.models.tiny_architectures import tiny_architecture
from backends.models.tokenizer import HfTokenizer
from backends.runners.architectures import UnsupportedModel, refusal
from backends.runners.base import ModelRunner
from backends.runners.batch import PAGE_SIZE
from backends.runners.cpu_cores import cpu_has_bf16
from backends.runners.hf import HfRunner
from backends.runners.native.bindings import NativeUnavailable
from backends.runners.native.runner import NativeRunner
from backends.runners.quantize import QuantizationError, check_quantization, checkpoint_method, quantize
from backends.speculation.batch_gate import DraftGate
from backends.types import START_LOG, ModelInfo

log = logging.getLogger(__name__)
start_log = logging.getLogger(START_LOG)

# Where a model's config.json says that it was adapted together with its heads, and from which model.
ADAPTATION_NOTE = "medusa_gateway"
DEMO_HEADS = Path(__file__).parent.parent / "assets" / "smollm2-135m-instruct-heads"

_KV_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What ``medusa-gateway serve`` can set. ``model`` None: the demo model; "tiny-random": a random one, for tests;
    "auto" and None: chosen here.

    ``kv_tokens``: positions in the KV pool. ``runner``: "auto", "native" or "transformers". ``quantize``: weights of
    the linear layers, "int8" or "int4"; None: as they are. ``measure_anew``: look at no cost table that was kept.
    ``tiny_tokenizer``: the random model's, of :data:`backends.models.tiny.TINY_TOKENIZERS`.
    """

    model: str | None = None
    heads: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    max_model_len: int | None = None
    max_running: int | None = None
    served_name: str | None = None
    kv_tokens: int | None = None
    runner: str = "auto"
    threads: int | None = None
    quantize: str | None = None
    measure_anew: bool = False
    tiny_tokenizer: str = "byte-level"


@dataclass(frozen=True, slots=True)
class OpenedEngine:
    decoder: Engine
    tokenizer: HfTokenizer
    grammars: GrammarCompiler


@dataclass(frozen=True, slots=True)
class LoadedCore:
    """An engine core without a thread, for benchmarks and proofs."""

    core: EngineCore
    tokenizer: HfTokenizer
    info: ModelInfo
    grammars: GrammarCompiler
    keeping: CostKeeping | None = None


def open_engine(options: EngineOptions, cost_stores: Sequence[CostStore] = ()) -> OpenedEngine:
    """Load everything, take the cost table over from ``cost_stores`` or measure it, start the engine's thread.

    Raises OSError or ValueError for what the user can mend.
    """
    began = time.monotonic()
    start_log.info("loading %s", options.model or f"the demo model {DEMO_MODEL_NAME}")
    loaded = build_core(load_parts(options), options, cost_stores=cost_stores)
    start_log.info("%s is ready after %.0f s", loaded.info.name, time.monotonic() - began)
    if loaded.core.runner.kind == "native":
        # The kernels bring their own threads; waking torch's as well, for operations of microseconds, only gets in
        # their way.
        torch.set_num_threads(1)
    return OpenedEngine(Engine(loaded.core, loaded.info, keeping=loaded.keeping), loaded.tokenizer, loaded.grammars)


def load_core(options: EngineOptions, observer: Observer | None = None) -> LoadedCore:
    """Load a model into an :class:`EngineCore`. Raises as :func:`open_engine` does."""
    parts = load_parts(options)
    return build_core(parts, options, observer=observer)


@dataclass(frozen=True, slots=True)
class ModelParts:
    """A transformers model with its tokenizer and heads, before an engine is built around them."""

    model: Any
    tokenizer: HfTokenizer
    heads: LoadedHeads | None
    name: str

    @property
    def adapted_from(self) -> str:
        """See :class:`backends.types.ModelInfo`; noted in the model's config by :mod:`backends.training.adapt`."""
        note = getattr(self.model.config, ADAPTATION_NOTE, None)
        return str(note.get("adapted_from", "")) if isinstance(note, dict) else ""


def load_parts(options: EngineOptions) -> ModelParts:
    """Load from disk or hub. Raises as :func:`open_engine` does."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    if options.model is not None and options.model.split(":")[0] == TINY_MODEL_NAME:
        return _tiny_parts(options, _dtype(options.dtype, torch.device("cpu")))
    transformers_logging.disable_progress_bar()
    folder = str(prepare_demo_model()) if options.model is None else options.model
    name = options.served_name or (DEMO_MODEL_NAME if options.model is None else Path(folder).name)
    device = _device(options.device)
    dtype = _dtype(options.dtype, device)
    settle_for_the_cache(folder)
    # Known before gigabytes of weights are loaded.
    config = AutoConfig.from_pretrained(folder)
    if reason := refusal(config, options.max_model_len):
        raise UnsupportedModel(reason)
    check_quantization(options.quantize, config, device, dtype)
    if checkpoint_method(config) is None:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        model.to(device)
    else:
        # Packed weights are made where they are to stay.
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, device_map=device)
    model.eval()
    tokenizer = HfTokenizer.from_pretrained(folder)
    # Heads are compared with the weights that they were trained on, so before those are quantised.
    heads = _load_heads(options, folder, BackboneFacts.of(model))
    _quantize(model, options)
    return ModelParts(model, tokenizer, heads, name)


def _tiny_parts(options: EngineOptions, dtype: torch.dtype) -> ModelParts:
    """Of "tiny-random", or of "tiny-random:ARCHITECTURE"."""
    asked = options.model or TINY_MODEL_NAME
    architecture = asked.partition(":")[2]
    tokenizer = tiny_tokenizer(options.tiny_tokenizer)
    size = len(tokenizer)
    model = (
        tiny_architecture(architecture, dtype=dtype, vocab_size=size)
        if architecture
        else tiny_model(dtype=dtype, vocab_size=size)
    )
    check_quantization(options.quantize, model.config, torch.device("cpu"), dtype)
    _quantize(model, options)
    heads = LoadedHeads(tiny_heads(), "random", stale=False)
    return ModelParts(model, tokenizer, heads, options.served_name or asked)


def _quantize(model: Any, options: EngineOptions) -> None:
    if options.quantize is not None:
        if options.runner == "native":
            raise QuantizationError("the native runner runs no quantised weights; leave --runner native out")
        quantize(model, options.quantize)  # type: ignore[arg-type]


def build_core(
    parts: ModelParts,
    options: EngineOptions,
    *,
    cost: StepCost | None = None,
    calibration: Calibration | None = None,
    observer: Observer | None = None,
    cost_stores: Sequence[CostStore] = (),
) -> LoadedCore:
    """An engine core around a loaded transformers model. ``cost`` None: one that ``cost_stores`` keep for this model on
    this device, or measured here. ``calibration`` None: one that starts with what they keep."""
    model, tokenizer, heads = parts.model, parts.tokenizer, parts.heads
    positions: int = model.config.get_text_config().max_position_embeddings
    longest = min(options.max_model_len or positions, positions)
    if options.kv_tokens is not None:
        # A request that could never get its pages is refused as too long rather than when it is queued.
        longest = min(longest, options.kv_tokens)
    max_running = options.max_running or 32
    engine_config = EngineConfig(
        max_model_len=longest,
        max_running=max_running,
        max_rows=max(256, max_running + 64),
        eos_token_ids=_eos_token_ids(model, tokenizer),
    )
    runner = _runner(options, model, _kv_tokens(options, model, longest, max_running), engine_config.max_rows, longest)
    bound = None if heads is None else heads.bind(runner)
    keeping, factors = None, {}
    if cost is None:
        facts = facts_of(runner, model.config, heads, options.quantize)
        keeping = CostKeeping(facts, cost_stores, time.time, measure_anew=options.measure_anew)
        start_log.info("%s: measuring what steps cost (about %g s at most)", parts.name, MEASURE_S)
        with torch_resting(runner):
            record = keeping.open(CostProbe(runner, bound))
        cost, factors = record.cost, record.factors
    info = ModelInfo(
        name=parts.name,
        max_model_len=longest,
        vocab_size=runner.vocab_size,
        num_heads=0 if bound is None else bound.num_heads,
        dtype=str(runner.dtype).removeprefix("torch."),
        device=str(runner.device),
        created=int(time.time()),
        adapted_from=parts.adapted_from,
        heads_flavour="" if heads is None else heads.flavour,
        heads_stale=None if heads is None else heads.stale,
    )
    gate = DraftGate(cost, () if heads is None else heads.accuracies)
    core = EngineCore(
        runner,
        bound,
        tokenizer,
        engine_config,
        cost,
        time.monotonic,
        observer,
        gate,
        calibration or Calibration(start=factors),
    )
    grammars = GrammarCompiler(tokenizer.to_json, runner.vocab_size, engine_config.eos_token_ids)
    return LoadedCore(core, tokenizer, info, grammars, keeping)


@contextlib.contextmanager
def torch_resting(runner: ModelRunner) -> Iterator[None]:
    """The kernels bring their own threads; waking torch's as well, for operations of microseconds, only gets in their
    way."""
    threads = torch.get_num_threads()
    if runner.kind == "native":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _runner(options: EngineOptions, model: Any, kv_tokens: int, max_rows: int, longest: int) -> NativeRunner | HfRunner:
    sizes = {"num_pages": -(-kv_tokens // PAGE_SIZE), "max_rows": max_rows, "max_context": longest}
    plain = options.quantize is None and checkpoint_method(model.config) is None
    if plain and options.runner != "transformers" and model.device.type == "cpu":
        try:
            return NativeRunner(model, threads=options.threads, **sizes)
        except NativeUnavailable as error:
            if options.runner == "native":
                raise ValueError(f"the native runner can't run this model here: {error}") from error
            log.warning("running through transformers, which is slower: %s", error)
    elif options.runner == "native":
        raise ValueError("the native runner runs on the CPU only")
    if model.device.type == "cuda":
        log.warning(
            "exactness on CUDA is not proven on this machine; run: medusa-gateway verify-lossless --device cuda"
        )
    return HfRunner(model, **sizes)


def _kv_tokens(options: EngineOptions, model: Any, longest: int, max_running: int) -> int:
    if options.kv_tokens is not None:
        if options.kv_tokens < PAGE_SIZE:
            raise ValueError(f"kv_tokens is {options.kv_tokens}; at least {PAGE_SIZE} are needed")
        return options.kv_tokens
    config = model.config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * kv_heads * head_dim * model.dtype.itemsize
    return max(longest, min(max_running * longest, _KV_BYTES // per_token))


def _load_heads(options: EngineOptions, folder: str, backbone: BackboneFacts) -> LoadedHeads | None:
    """The heads that are asked for, else those that belong to the model; None when there are none."""
    if options.heads is not None:
        return load_checkpoint(options.heads, backbone)
    if options.model is None:
        return load_checkpoint(DEMO_HEADS, backbone)
    # Heads that lie in the model's own folder: merged with its weights, or beside them.
    return load_checkpoint(folder, backbone) if Path(folder).is_dir() and holds_heads(Path(folder)) else None


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda: no CUDA device is available to torch here; use --device cpu")
    return torch.device(name)


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" or cpu_has_bf16() else torch.float32
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]


def _eos_token_ids(model: Any, tokenizer: HfTokenizer) -> frozenset[int]:
    found: set[int] = set()
    for value in (getattr(model.generation_config, "eos_token_id", None), tokenizer.eos_token_id):
        if value is not None:
            found.update(value if isinstance(value, list) else [value])
    return frozenset(found)
