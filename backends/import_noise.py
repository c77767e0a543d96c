"""Two warnings that torchao brings at every import of transformers, whoever quantises or not, and that say nothing.

Its extensions for GPUs can't be loaded by a torch without CUDA, and it registers enums in a way that torch would rather
have otherwise. All else that these loggers say goes through; the first does as well where torch has CUDA.
"""

from __future__ import annotations

import logging
import sys

_CUDA_EXTENSIONS = ("_C_mxfp8", "_C_cutlass_90a")


def silence() -> None:
    """Before transformers is imported. Harmless when repeated."""
    logging.getLogger("torchao").addFilter(keep_torchao)
    logging.getLogger("torch.utils._pytree").addFilter(keep_pytree)


def keep_torchao(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    if not message.startswith("Failed to load ") or not any(name in message for name in _CUDA_EXTENSIONS):
        return True
    torch = sys.modules.get("torch")
    return torch is None or torch.version.cuda is not None


def keep_pytree(record: logging.LogRecord) -> bool:
    return "is an Enum subclass and is now natively supported" not in record.getMessage()
