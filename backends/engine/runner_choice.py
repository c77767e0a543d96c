"""Which runner a model gets, on which device, and how large its KV cache is."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from backends.engine.cuda import device_of
from backends.engine.options import EngineOptions
from backends.engine.start_stages import tell
from backends.runners.architectures import UnsupportedModel
from backends.runners.base import ModelRunner
from backends.runners.batch import PAGE_SIZE
from backends.runners.hf import HfRunner
from backends.runners.llama_shape import head_size
from backends.runners.native.bindings import NativeUnavailable, load_library
from backends.runners.native.runner import NativeRunner, unsupported_reason
from backends.runners.quantize import checkpoint_method
from backends.runners.triton.availability import why_not_triton
from backends.runners.triton.memory import DeviceBudget, buffer_bytes
from backends.runners.triton.tiling import GPU

log = logging.getLogger(__name__)

_KV_BYTES = 2 << 30
_WITHOUT_KERNELS = "which is slower where the kernels fit the CPU"


def why_not_in_kernels(options: EngineOptions, model: Any) -> str | None:
    """Why the native runner is not what runs a model with these options; None: it is."""
    if options.runner == "transformers":
        return "the transformers runner is asked for"
    if options.quantize == "int4":
        return "int4 weights"
    if options.runner == "triton":
        return "the triton runner is asked for"
    if device_of(options.device, options.dtype).type != "cpu":
        return "it runs on the CPU only"
    try:
        load_library()
    except NativeUnavailable as error:
        return str(error)
    return unsupported_reason(model)


def why_not_in_triton(options: EngineOptions, model: Any) -> str | None:
    """Why the Triton kernels are not what runs a model with these options; None: they are."""
    device = device_of(options.device, options.dtype)
    if options.runner not in ("auto", "triton") or (options.runner == "auto" and device.type != "cuda"):
        return f"the {options.runner} runner is asked for"
    if options.quantize is not None:
        return "quantised weights"
    return why_not_triton(model, device)


def choose_runner(options: EngineOptions, model: Any, kv_tokens: int, max_rows: int, longest: int) -> ModelRunner:
    """The runner for a loaded transformers model. Raises ValueError where the one that is asked for, or any that is
    exact on the device, can't run it."""
    sizes: dict[str, Any] = {"num_pages": -(-kv_tokens // PAGE_SIZE), "max_rows": max_rows, "max_context": longest}
    device = device_of(options.device, options.dtype)
    if (not_in_triton := why_not_in_triton(options, model)) is None:
        # Imported here: triton is an extra, and kernels decide at import whether they are interpreted.
        from backends.runners.triton.runner import TritonRunner

        return TritonRunner(model, device=device, progress=_tell_of_layers(), **sizes)
    if options.runner == "triton":
        raise ValueError(f"the triton runner can't run this model here: {not_in_triton}")
    reason = why_not_in_kernels(options, model)
    if reason is None:
        return NativeRunner(model, threads=options.threads, int8=options.quantize == "int8", **sizes)
    if options.runner == "native":
        raise ValueError(f"the native runner can't run this model here: {reason}")
    if device.type == "cuda":
        if options.runner == "auto":
            raise UnsupportedModel(
                f"the Triton kernels can't run this model on {device} ({not_in_triton}), and torch's own operations "
                "give a row other bits in other company there. Take --device cpu; or --runner transformers, and trust "
                "it as far as verify-lossless --device cuda --runner transformers goes"
            )
        log.warning(
            "torch operations on CUDA are not exact by construction; run: medusa-gateway verify-lossless --device cuda "
            "--runner transformers"
        )
        return HfRunner(model, **sizes)
    plain = options.quantize != "int4" and checkpoint_method(model.config) is None
    if options.runner == "auto" and plain:
        log.warning("no C kernels here (%s): torch operations run the model, %s", reason, _WITHOUT_KERNELS)
    return HfRunner(model, **sizes)


def _tell_of_layers() -> Callable[[int, int], None]:
    """A line now and then while weights go to the device: after each quarter of the layers."""
    told = 0

    def tell_of(done: int, layers: int) -> None:
        nonlocal told
        if 4 * done // layers > told:
            told = 4 * done // layers
            tell(f"weights of {done} of {layers} layers are on the device")

    return tell_of


def kv_tokens_of(options: EngineOptions, model: Any, longest: int, max_running: int, max_rows: int) -> int:
    """Tokens of the KV cache: what is asked for, else by memory."""
    if options.kv_tokens is not None:
        if options.kv_tokens < PAGE_SIZE:
            raise ValueError(f"kv_tokens is {options.kv_tokens}; at least {PAGE_SIZE} are needed")
        return options.kv_tokens
    config = model.config.get_text_config()
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * kv_heads * head_size(config) * model.dtype.itemsize
    device = device_of(options.device, options.dtype)
    if device.type == "cuda" and why_not_in_triton(options, model) is None:
        free, _ = torch.cuda.mem_get_info(device)
        budget = DeviceBudget(
            free=free,
            weights=sum(parameter.nbytes for parameter in model.parameters()),
            buffers=buffer_bytes(
                max_rows=max_rows,
                max_context=longest,
                hidden=config.hidden_size,
                inner=config.intermediate_size,
                heads=config.num_attention_heads,
                head_size=head_size(config),
                vocab=config.vocab_size,
                itemsize=model.dtype.itemsize,
                splits=GPU.splits(longest),
            ),
            per_token=per_token,
        )
        return budget.kv_tokens(longest, max_running * longest)
    return max(longest, min(max_running * longest, _KV_BYTES // per_token))
