"""Triton's interpreter, made fit for proofs about bits. For tests and for ``TRITON_INTERPRET=1`` without a GPU.

What triton 3.6 to 3.9 does there, and what is done instead:

- ``tl.dot`` of bfloat16 multiplies the bit patterns: operands are widened.
- ``tl.dot`` calls numpy's matrix product, whose order of sums depends on the shape, which hides differences and makes
  up others: here each element is one chain along K, 16 products at a time, as matrix instructions sum it.
- float32 is cut off to bfloat16: it is rounded to nearest even, as hardware does.
- ``range()`` over a loaded number fails with numpy 2.4 (triton 3.6 only).
- the language is patched and restored for every launch, which takes longer than a small kernel: it stays patched.

It says nothing of races, of how matrix instructions round inside, or of speed.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

K_STEP = 16
_patched = False


def chain_of_products(x: NDArray[Any], y: NDArray[Any], total: NDArray[Any]) -> NDArray[Any]:
    """``total`` [m, n] + ``x`` [m, k] times ``y`` [k, n], float32, along k in ascending order."""
    for at in range(0, x.shape[1], K_STEP):
        part = x[:, at, None] * y[None, at, :]
        for i in range(at + 1, min(at + K_STEP, x.shape[1])):
            part += x[:, i, None] * y[None, i, :]
        total = total + part
    return total


def install() -> None:
    """Patch the interpreter of this process. Kernels of modules that are imported after ``TRITON_INTERPRET=1`` was set
    run in it."""
    global _patched
    if _patched:
        return
    _patched = True
    _interpret_the_language()
    # Every sum of integers is otherwise done twice more, in 64 bits, to see whether it overflows.
    options: Any = interpreter.InterpreterOptions
    interpreter.interpreter_builder.options = options(sanitize_overflow=False)
    builder: Any = interpreter.InterpreterBuilder
    builder.create_dot = _dot
    cast = builder.cast_impl
    builder.cast_impl = lambda self, source, target: _cast(source, target, lambda: cast(self, source, target))
    patch: Any = interpreter._patch_lang
    scopes: dict[int, Any] = {}

    def patch_once(function: Any) -> Any:
        # Patches go to the modules of the language that a kernel's own module sees, the same for all of them.
        seen = id(function.__globals__)
        if seen not in scopes:
            scopes[seen] = patch(function)
            tl.tensor.__index__ = lambda self: int(np.asarray(self.handle.data).item())  # type: ignore[assignment]
        return _Kept

    interpreter._patch_lang = patch_once


def _interpret_the_language() -> None:
    """The language's own functions (``tl.sum``, ``tl.zeros``) are kernels too: where triton was imported before it was
    told to interpret, they would be compiled."""
    modules = [module for name, module in sys.modules.items() if name.startswith("triton.language")]
    for space in (*modules, tl.tensor):
        for name, value in list(vars(space).items()):
            if isinstance(value, JITFunction):
                setattr(space, name, interpreter.InterpretedFunction(value.fn))


class _Kept:
    @staticmethod
    def restore() -> None:
        """Nothing: see the module's docstring."""


def _wide(handle: Any) -> NDArray[Any]:
    data = handle.data
    if handle.dtype.scalar == tl.bfloat16 and data.dtype == np.uint16:
        return (data.astype(np.uint32) << 16).view(np.float32)
    return data.astype(np.float32)


def _dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    with np.errstate(all="ignore"):
        total = chain_of_products(_wide(a), _wide(b), d.data.astype(np.float32))
    return interpreter.TensorHandle(total, d.dtype.scalar)


def _cast(source: Any, target: Any, otherwise: Any) -> Any:
    before, after = source.dtype.scalar, target.scalar
    if before == tl.bfloat16 and after == tl.float32:
        return interpreter.TensorHandle(_wide(source), after)
    if before == tl.float32 and after == tl.bfloat16:
        bits = np.ascontiguousarray(source.data, np.float32).view(np.uint32)
        rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return interpreter.TensorHandle(np.where(np.isnan(source.data), np.uint16(0x7FC0), rounded), after)
    return otherwise()
