"""What only a compiler can tell without a GPU: every kernel builds for sm_80 and sm_90, spills nothing, and uses one
family of matrix instructions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from typing import Any

import pytest

from tests.backends.runners.triton import device
from tests.support.triton_compile import TABLE, matrix_instructions

SHARED = {80: 163 * 1024, 90: 227 * 1024}
FAMILY = {80: "HMMA.16816", 90: "HGMMA.64x"}


@cache
def measured() -> dict[str, Any]:
    assert device.DEVICE is not None
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.triton_compile"], capture_output=True, text=True, env=environment
    )
    if "PermissionError" in done.stderr:
        pytest.skip("triton's ptxas can't be run here")
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_no_kernel_spills_and_all_fit_in_shared_memory() -> None:
    for each in measured()["measured"]:
        assert each["stack"] == each["local"] == 0, each
        assert not {"LDL", "STL"} & set(each["instructions"]), each
        assert each["shared"] <= SHARED[each["sm"]], each


def test_products_go_through_one_family_of_matrix_instructions() -> None:
    """R1; and beside them nothing is contracted (R5), and weights are brought 16 bytes at a time."""
    seen = 0
    for each in measured()["measured"]:
        if not each["kernel"].startswith(("linear", "attend")) or "float32" in each["kernel"]:
            assert not matrix_instructions(each), each
            continue
        seen += 1
        families = matrix_instructions(each)
        assert families and all(name.startswith(FAMILY[each["sm"]]) for name in families), each
        assert "FFMA" not in each["instructions"], each
        assert any(name.startswith("LDGSTS") and "128" in name for name in each["instructions"]), each
    assert seen > 30


def test_the_table_in_the_repository_is_true() -> None:
    """After a change of kernels or of triton: python -m tests.support.triton_compile --write, and look at the diff."""
    assert TABLE.read_text() == measured()["table"]
