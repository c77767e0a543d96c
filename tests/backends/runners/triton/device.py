"""Imported before any kernel: on a machine without a GPU they run in Triton's interpreter, in this process alone."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: it is in the test extra, for Linux on x86-64")

from triton import knobs

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    # Not by the environment, which processes that other tests start would inherit.
    knobs.runtime.interpret = True
interpreted = pytest.mark.skipif(DEVICE.type == "cuda", reason="changes Triton's interpreter, and here is a GPU")


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(DEVICE)


def ints(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)
