"""Weight-only quantisation of a backbone through torchao; checkpoints that come quantised.

What the C kernels run in int8 they round themselves (:mod:`backends.runners.native.packing`).

Linear layers of the blocks are quantised; embeddings, ``lm_head`` and the heads keep the model's floating-point type.
Exactness is then against the quantised model's own vanilla decoding. torchao's kernels were measured on a CPU with
avx512: int8 (eager, ``mm`` on converted weights) gives the same row in any multiple of 4 rows, which is what
:mod:`backends.runners.hf` asks for; int4 (``_weight_int4pack_mm_for_cpu``) in any number of rows.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import nn

Quantization = Literal["int8", "int4"]
QUANTIZATIONS: tuple[str, ...] = get_args(Quantization)
INT4_GROUP = 32

# Methods of checkpoints whose kernels exist for GPUs only, by transformers' names.
_GPU_ONLY = {"gptq": "GPTQ", "awq": "AWQ", "bitsandbytes": "bitsandbytes", "fp8": "FP8", "mxfp4": "MXFP4"}


class QuantizationError(ValueError):
    """Weights that can't be quantised, or run quantised, here; the message says what to do."""


def checkpoint_method(config: Any) -> str | None:
    """How a checkpoint's weights are quantised, by its config ("gptq", "awq", ...); None when they are not."""
    found = getattr(config, "quantization_config", None)
    if found is None:
        return None
    method = found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
    return str(getattr(method, "value", method))


def check_quantization(asked: str | None, config: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Raises :class:`QuantizationError` for what can't be done, before weights are loaded."""
    method = checkpoint_method(config)
    if asked is not None and asked not in QUANTIZATIONS:
        raise QuantizationError(f"quantize is {asked!r}; there are {', '.join(QUANTIZATIONS)}")
    if asked is not None and method is not None:
        raise QuantizationError(f"the checkpoint is quantised already ({method}); leave --quantize {asked} out")
    if method in _GPU_ONLY and device.type == "cpu":
        raise QuantizationError(
            f"{_GPU_ONLY[method]} checkpoints run on a GPU only; on the CPU take the original with --quantize int8"
        )
    if asked == "int4" and dtype != torch.bfloat16:
        raise QuantizationError("int4 weights are run in bfloat16 only: add --dtype bfloat16, or take --quantize int8")


def quantize(model: nn.Module, how: Quantization) -> int:
    """Quantise a loaded model in place, where it lies; returns how many layers were.

    Raises :class:`QuantizationError` when torchao is missing or nothing could be quantised.
    """
    device = next(model.parameters()).device
    try:
        from torchao.quantization import quantize_
    except ImportError:
        raise QuantizationError("--quantize needs torchao: pip install 'medusa-gateway[quantize]'") from None
    get_head: Any = model.get_output_embeddings
    head = get_head()
    chosen = [
        module
        for module in model.modules()
        if type(module) is nn.Linear and module is not head and (how == "int8" or module.in_features % INT4_GROUP == 0)
    ]
    if not chosen:
        raise QuantizationError(
            f"nothing to quantise: no linear layers that {how} takes (GPT-2 keeps its weights else)"
        )
    wanted = set(map(id, chosen))
    quantize_(model, _torchao_config(how, device), filter_fn=lambda module, _: id(module) in wanted)
    return len(chosen)


def _torchao_config(how: Quantization, device: torch.device) -> Any:
    from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig

    # set_inductor_config would change settings of the whole process for a compiler that is not used.
    if how == "int8":
        return Int8WeightOnlyConfig(set_inductor_config=False)
    if device.type == "cpu":
        from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig

        return PrototypeInt4WeightOnlyConfig(group_size=INT4_GROUP, set_inductor_config=False)
    return Int4WeightOnlyConfig(
        group_size=INT4_GROUP,
        int4_packing_format="tile_packed_to_4d",  # type: ignore[arg-type]
        set_inductor_config=False,
    )
