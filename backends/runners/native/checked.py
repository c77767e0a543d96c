"""What Python hands to the kernels, looked at before its address is taken.

Shapes, types, strides and devices are checked here; ranges of what a step's arrays hold in C (``checks.h``), where it
takes a microsecond. Both end in a :class:`ValueError` that names the argument.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

_NO_MEMORY = b"no memory"


def address_of(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Where the numbers of a tensor lie that kernels read as a contiguous ``shape`` of ``dtype``."""
    if tensor.shape != shape or tensor.dtype != dtype or tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(
            f"{name} is {_described(tensor)}; the kernels take contiguous {list(shape)} {dtype} on the CPU"
        )
    return tensor.data_ptr()


def matrix_of(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> tuple[int, int]:
    """Address of a matrix whose rows are contiguous, and elements from row to row."""
    if tensor.dim() != 2 or tensor.dtype != dtype or tensor.device.type != "cpu" or not tensor.shape[1]:
        raise ValueError(f"{name} is {_described(tensor)}; the kernels take a matrix of {dtype} on the CPU")
    down, along = tensor.stride()
    if (along != 1 and tensor.shape[1] > 1) or (down < tensor.shape[1] and tensor.shape[0] > 1):
        raise ValueError(f"{name} is {_described(tensor)} with strides {[down, along]}; its rows must be contiguous")
    return tensor.data_ptr(), down


def values_of(name: str, values: NDArray[np.generic], count: int, dtype: type[np.generic]) -> int:
    """Address of ``count`` values in a row."""
    if values.shape != (count,) or values.dtype != dtype or not values.flags.c_contiguous:
        raise ValueError(f"{name} is {list(values.shape)} {values.dtype}; the kernels take [{count}] {dtype.__name__}")
    return values.ctypes.data


def refuse(fault: bytes | None) -> None:
    """Raises what a kernel has answered, unless all is well."""
    if fault is not None:
        raise MemoryError(fault.decode()) if fault.startswith(_NO_MEMORY) else ValueError(fault.decode())


def _described(tensor: torch.Tensor) -> str:
    contiguous = "" if tensor.is_contiguous() else ", not contiguous"
    return f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}{contiguous}"
