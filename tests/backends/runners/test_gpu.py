"""Checks that need a CUDA device: ``make test-gpu``."""

from __future__ import annotations

import pytest

from backends.proof.setup import prove


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decoding_on_the_device_is_lossless(dtype: str) -> None:
    report = prove(
        model=None,
        heads=None,
        tiny=False,
        dtype=dtype,
        device="cuda",
        runner="auto",
        prompts=50,
        max_tokens=24,
        seed=0,
        progress=lambda done, total: None,
    )
    assert report.accepted > 0
    assert report.lossless, report
