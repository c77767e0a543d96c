"""From a model's name to a running engine."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from backends.checkpoints.loader import BackboneFacts, LoadedHeads, holds_heads, load_checkpoint
from backends.cost.calibration import Calibration
from backends.cost.device_cost import CONTEXTS, event_timer, measure_steps
from backends.cost.fingerprint import facts_of
from backends.cost.idle import IdleMeasuring
from backends.cost.persistence import CostKeeping
from backends.cost.probe import EARLY_ROWS, MEASURE_S, ROWS, CostProbe
from backends.cost.step_cost import Budget, StepCost
from backends.cost.stores import CostStore
from backends.engine.config import EngineConfig
from backends.engine.core import EngineCore, Observer
from backends.engine.cuda import device_of, memory_told, monitor_of
from backends.engine.options import EngineOptions
from backends.engine.runner_choice import choose_runner, kv_tokens_of, why_not_in_kernels, why_not_in_triton
from backends.engine.start_stages import StartStages, tell
from backends.engine.thread import Engine
from backends.grammar.compiler import GrammarCompiler
from backends.models.demo import DEMO_MODEL_NAME, prepare_demo_model
from backends.models.hub import settle_for_the_cache
from backends.models.tiny import TINY_MODEL_NAME, tiny_heads, tiny_model, tiny_tokenizer
from backends.models.tiny_architectures import tiny_architecture
from backends.models.tokenizer import HfTokenizer
from backends.runners.architectures import UnsupportedModel, refusal
from backends.runners.base import ModelRunner
from backends.runners.cpu_cores import torch_has_quick_bf16
from backends.runners.llama_shape import SUPPORTED
from backends.runners.native.bindings import NativeUnavailable, load_library
from backends.runners.quantize import QuantizationError, check_quantization, checkpoint_method, quantize
from backends.speculation.batch_gate import DraftGate
from backends.types import ModelInfo

log = logging.getLogger(__name__)

# Where a model's config.json says that it was adapted together with its heads, and from which model.
ADAPTATION_NOTE = "medusa_gateway"
DEMO_HEADS = Path(__file__).parent.parent / "assets" / "smollm2-135m-instruct-heads"


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
    idle: IdleMeasuring | None = None


def open_engine(
    options: EngineOptions, cost_stores: Sequence[CostStore] = (), stages: StartStages | None = None
) -> OpenedEngine:
    """Load everything, take the cost table over from ``cost_stores`` or measure it, start the engine's thread.

    ``stages``: what the start has done so far. Raises OSError or ValueError for what the user can mend.
    """
    stages = stages or StartStages()
    with stages.stage("loading"), _kernels_ahead(options):
        parts = load_parts(options, stages)
    with stages.stage("loading"):
        loaded = build_core(
            parts,
            options,
            cost_stores=cost_stores,
            early_rows=EARLY_ROWS,
            stages=stages,
            prefix_cache=options.prefix_cache,
        )
    guessed = len(loaded.core.cost.guessed)
    later = f"; what steps of {guessed} sizes cost is guessed until there is an idle moment" if guessed else ""
    tell(f"{loaded.info.name} ({loaded.info.dtype}) is ready after {stages.told()}{later}")
    if loaded.core.runner.kind == "native":
        # The kernels bring their own threads; waking torch's as well, for operations of microseconds, only gets in
        # their way.
        torch.set_num_threads(1)
    device = monitor_of(loaded.core.runner.device)
    engine = Engine(loaded.core, loaded.info, keeping=loaded.keeping, idle=loaded.idle, device=device)
    return OpenedEngine(engine, loaded.tokenizer, loaded.grammars)


@contextlib.contextmanager
def _kernels_ahead(options: EngineOptions) -> Iterator[None]:
    """Compile the kernels while the model is read, as two cores can. Whoever needs them finds them, or the reason why
    they can't be had."""

    def compile_them() -> None:
        with contextlib.suppress(NativeUnavailable):
            load_library()

    wanted = (
        options.runner in ("auto", "native") and options.quantize != "int4" and device_of(options.device).type == "cpu"
    )
    compiling = threading.Thread(target=compile_them if wanted else lambda: None, name="kernels", daemon=True)
    compiling.start()
    yield
    compiling.join()


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


def load_parts(options: EngineOptions, stages: StartStages | None = None) -> ModelParts:
    """Load from disk or hub. ``stages``: where the time is noted. Raises as :func:`open_engine` does."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    if options.model is not None and options.model.split(":")[0] == TINY_MODEL_NAME:
        return _tiny_parts(options, _dtype(options, torch.device("cpu"), "llama"))
    transformers_logging.disable_progress_bar()
    if options.model is None:
        with (stages or StartStages()).stage("demo model"):
            folder = str(prepare_demo_model(tell))
    else:
        folder = options.model
    name = options.served_name or (DEMO_MODEL_NAME if options.model is None else Path(folder).name)
    device = device_of(options.device, options.dtype)
    settle_for_the_cache(folder)
    # Known before gigabytes of weights are loaded.
    config = AutoConfig.from_pretrained(folder)
    if reason := refusal(config, options.max_model_len):
        raise UnsupportedModel(reason)
    dtype = _dtype(options, device, config.model_type)
    check_quantization(options.quantize, config, device, dtype)
    with memory_told(device, f"the weights of {name}"):
        if checkpoint_method(config) is None:
            model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
            if why_not_in_triton(options, model) is not None:
                model.to(device)  # else the runner takes the weights there, layer by layer
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
    """Through torchao, unless the kernels do it when they pack the weights."""
    if options.quantize is None or why_not_in_kernels(options, model) is None:
        return
    if options.runner == "native" and options.quantize == "int4":
        raise QuantizationError("the native runner runs no int4 weights; leave --runner native out")
    quantize(model, options.quantize)  # type: ignore[arg-type]


def build_core(
    parts: ModelParts,
    options: EngineOptions,
    *,
    cost: StepCost | None = None,
    calibration: Calibration | None = None,
    observer: Observer | None = None,
    cost_stores: Sequence[CostStore] = (),
    early_rows: int = max(ROWS),
    stages: StartStages | None = None,
    prefix_cache: str = "none",
) -> LoadedCore:
    """An engine core around a loaded transformers model. ``cost`` None: one that ``cost_stores`` keep for this model on
    this device, or measured here, steps of more than ``early_rows`` rows only later. ``calibration`` None: one that
    starts with what they keep. ``stages``: where the time is noted. ``prefix_cache``: see :class:`EngineConfig`."""
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
        prefix_cache=prefix_cache,
    )
    with memory_told(device_of(options.device, options.dtype), f"weights and keys and values of {parts.name}"):
        kv_tokens = kv_tokens_of(options, model, longest, max_running, engine_config.max_rows)
        runner = choose_runner(options, model, kv_tokens, engine_config.max_rows, longest)
    bound = None if heads is None else heads.bind(runner)
    keeping, idle, factors, steps = None, None, {}, None
    if cost is None and runner.row_buckets:
        tell(f"measuring what steps of {parts.name} cost (at most {MEASURE_S:g} s)")
        with (stages or StartStages()).stage("measuring"):
            budget, timer = Budget(MEASURE_S, time.perf_counter), event_timer(runner.device)
            heads_ms = CostProbe(runner, bound).measure_heads()
            steps = measure_steps(runner, runner.row_buckets, timer, budget, heads_ms)
        cost = steps.at(CONTEXTS[0])
    elif cost is None:
        facts = facts_of(runner, model.config, heads, options.quantize)
        keeping = CostKeeping(facts, cost_stores, time.time, measure_anew=options.measure_anew)
        probe = CostProbe(runner, bound, most_rows=early_rows)
        tell(f"measuring what steps of {parts.name} cost (at most {MEASURE_S:g} s)")
        with (stages or StartStages()).stage("measuring"), torch_resting(runner):
            record = keeping.open(probe)
        cost, factors = record.cost, record.factors
        idle = IdleMeasuring(probe, cost) if cost.guessed else None
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
        steps=steps,
    )
    grammars = GrammarCompiler(tokenizer.to_json, runner.vocab_size, engine_config.eos_token_ids)
    return LoadedCore(core, tokenizer, info, grammars, keeping, idle)


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


def _load_heads(options: EngineOptions, folder: str, backbone: BackboneFacts) -> LoadedHeads | None:
    """The heads that are asked for, else those that belong to the model; None when there are none."""
    if options.heads is not None:
        return load_checkpoint(options.heads, backbone)
    if options.model is None:
        return load_checkpoint(DEMO_HEADS, backbone)
    # Heads that lie in the model's own folder: merged with its weights, or beside them.
    return load_checkpoint(folder, backbone) if Path(folder).is_dir() and holds_heads(Path(folder)) else None


def _dtype(options: EngineOptions, device: torch.device, model_type: str) -> torch.dtype:
    """Where weights in bfloat16 are read as fast as they can be: on a GPU, through the kernels, or where torch has
    instructions for them."""
    if options.dtype != "auto":
        return {"bfloat16": torch.bfloat16, "float32": torch.float32}[options.dtype]
    quick = device.type == "cuda" or _runs_in_kernels(options, model_type) or torch_has_quick_bf16()
    return torch.bfloat16 if quick else torch.float32


def _runs_in_kernels(options: EngineOptions, model_type: str) -> bool:
    """As far as it is known before the weights are loaded."""
    if options.runner == "transformers" or options.quantize == "int4" or model_type not in SUPPORTED:
        return False
    try:
        load_library()
    except NativeUnavailable:
        return False
    return True


def _eos_token_ids(model: Any, tokenizer: HfTokenizer) -> frozenset[int]:
    found: set[int] = set()
    for value in (getattr(model.generation_config, "eos_token_id", None), tokenizer.eos_token_id):
        if value is not None:
            found.update(value if isinstance(value, list) else [value])
    return frozenset(found)
