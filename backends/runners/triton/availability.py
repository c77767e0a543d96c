"""Whether the Triton kernels can run a model here. Imports triton only to see whether it is there."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from backends.runners.triton.weights import unsupported_reason

INTERPRET = "TRITON_INTERPRET"
"""Triton's own switch: 1 runs kernels in its interpreter, on a CPU, thousands of times slower. For proofs and tests."""


def why_not_triton(model: Any, device: torch.device) -> str | None:
    """Why the kernels don't run this transformers model on ``device``; None when they do."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install 'medusa-gateway[gpu]'"
    if device.type != "cuda" and not _interpreted():
        return f"it runs on CUDA devices; {INTERPRET}=1 has Triton's interpreter run it on a CPU, for proofs only"
    return unsupported_reason(model)


def _interpreted() -> bool:
    from triton import knobs

    return bool(knobs.runtime.interpret)
