"""Warnings that torchao brings at every import of transformers, whoever quantises or not, and that say nothing.

Its extensions for GPUs can't be loaded by a torch without CUDA, which needs no Triton either, and it registers enums in
a way that torch would rather have otherwise. All else that these loggers say goes through; the first two do as well
where torch has CUDA.
"""

from __future__ import annotations

import logging
import sys

_CUDA_EXTENSIONS = ("_C_mxfp8", "_C_cutlass_90a")


def silence() -> None:
    """Before transformers is imported. Harmless when repeated."""
    # A logger's filters don't see what its children say.
    for name in ("torchao", "torchao.kernel.intmm"):
        logging.getLogger(name).addFilter(keep_torchao)
    logging.getLogger("torch.utils._pytree").addFilter(keep_pytree)


def keep_torchao(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    extension = message.startswith("Failed to load ") and any(name in message for name in _CUDA_EXTENSIONS)
    if not extension and "Detected no triton" not in message:
        return True
    torch = sys.modules.get("torch")
    return torch is None or torch.version.cuda is not None


def keep_pytree(record: logging.LogRecord) -> bool:
    return "is an Enum subclass and is now natively supported" not in record.getMessage()
