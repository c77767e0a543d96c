"""When the Triton kernels are what runs a model, what is refused by name, and how much memory is planned."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from backends.engine import runner_choice
from backends.engine.options import EngineOptions
from backends.models.tiny_architectures import tiny_architecture
from backends.runners.architectures import UnsupportedModel
from backends.runners.triton import availability
from backends.runners.triton.memory import KV_SHARE, DeviceBudget, DeviceTooSmall, buffer_bytes
from backends.runners.triton.tiling import BUCKETS, bucket_of, outputs_of
from backends.runners.triton.weights import load_weights, unsupported_reason
from tests.support.engine_helpers import one_thread

__all__ = ["one_thread"]

GIB = 1 << 30


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        runner_choice, "device_of", lambda name, dtype="auto": torch.device("cuda" if name == "auto" else name)
    )


def choose(options: EngineOptions, model: Any) -> Any:
    return runner_choice.choose_runner(options, model, 320, 64, 64)


@pytest.mark.usefixtures("a_gpu")
def test_what_is_not_exact_on_cuda_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match=r"can't run this model on cuda \(model type 'gemma' .*--runner transf"):
        choose(EngineOptions(device="cuda"), tiny_architecture("gemma"))
    with pytest.raises(UnsupportedModel, match="quantised weights"):
        choose(EngineOptions(device="cuda", quantize="int8"), tiny_architecture("llama"))
    assert runner_choice.why_not_in_triton(EngineOptions(device="cuda:1"), tiny_architecture("qwen3")) is None
    assert runner_choice.why_not_in_kernels(EngineOptions(device="cuda"), tiny_architecture("llama")) is not None


def test_without_a_gpu_the_reason_names_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability, "_interpreted", lambda: False)
    with pytest.raises(ValueError, match=r"triton runner can't run this model here: .* TRITON_INTERPRET=1"):
        choose(EngineOptions(device="cpu", runner="triton"), tiny_architecture("llama"))


def test_without_triton_the_reason_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability.importlib.util, "find_spec", lambda name: None)
    reason = availability.why_not_triton(tiny_architecture("llama"), torch.device("cuda"))
    assert reason == "triton is not installed: pip install 'medusa-gateway[gpu]'"


def test_everything_imports_without_triton() -> None:
    code = "import sys; sys.modules['triton'] = None; import backends.engine.loading"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_models_that_the_kernels_lack_are_named() -> None:
    for fit in ("llama", "mistral", "mistral-window", "qwen2", "qwen3"):
        assert unsupported_reason(tiny_architecture(fit, dtype=torch.float16)) is None
    assert unsupported_reason(tiny_architecture("mistral", head_dim=48)) == (
        "head size 48 is not a power of two from 16 to 256"
    )
    assert unsupported_reason(tiny_architecture("llama", dtype=torch.float64)) == "dtype torch.float64"


def test_weights_are_copied_layer_by_layer() -> None:
    model, told = tiny_architecture("qwen2"), []
    weights = load_weights(model, torch.device("cpu"), 32, lambda done, layers: told.append((done, layers)))
    assert told == [(1, 2), (2, 2)]
    attention, layer = model.model.layers[1].self_attn, weights.layers[1]
    assert torch.equal(layer.qkv[64:96], attention.k_proj.weight)
    assert layer.qkv_bias is not None
    assert torch.equal(layer.qkv_bias[96:], attention.v_proj.bias)
    assert torch.equal(layer.gate_up[96:], model.model.layers[1].mlp.up_proj.weight)
    assert layer.o.data_ptr() != attention.o_proj.weight.data_ptr()
    windows = load_weights(tiny_architecture("mistral-window"), torch.device("cpu"), 32)
    assert [layer.shape.window for layer in windows.layers] == [20, 20]


def test_keys_and_values_get_what_is_free_behind_weights_and_buffers() -> None:
    budget = DeviceBudget(free=140 * GIB, weights=15 * GIB, buffers=1 * GIB, per_token=128 * 1024)
    tokens = budget.kv_tokens(longest=8192, most=10**9)
    assert tokens % 16 == 0
    assert 0.999 < tokens * 128 * 1024 / (KV_SHARE * 124 * GIB) <= 1
    assert budget.kv_tokens(longest=8192, most=100_001) == 100_016
    small = DeviceBudget(free=16 * GIB, weights=15 * GIB, buffers=2 * GIB, per_token=128 * 1024)
    with pytest.raises(DeviceTooSmall, match=r"16.0 GiB free; weights take 15.0 GiB.*hold 0 tokens .*--max-model-len"):
        small.kv_tokens(longest=8192, most=10**6)


def test_buffers_are_those_that_the_runner_makes() -> None:
    """Llama-3-8B's sizes by hand: logits and pieces of attention are most of them."""
    found = buffer_bytes(
        max_rows=256,
        max_context=8192,
        hidden=4096,
        inner=14336,
        heads=32,
        head_size=128,
        vocab=128256,
        itemsize=2,
        splits=34,
    )
    logits, pieces = 256 * 128256 * 4, 256 * 34 * 32 * 130 * 4
    assert logits + pieces < found < 1.4 * (logits + pieces)


def test_a_step_is_filled_up_to_a_bucket() -> None:
    assert [bucket_of(rows, 200) for rows in (1, 3, 17, 129, 192, 193)] == [1, 4, 24, 192, 192, 200]
    assert all(bucket_of(rows, 2048) >= rows for rows in range(1, 2049))
    assert all(outputs_of(outputs, bucket) in (1, 16, 64, bucket) for bucket in BUCKETS for outputs in range(1, bucket))
    assert outputs_of(5, 4) == 4
