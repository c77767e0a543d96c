"""Quantised backbones decode losslessly against themselves; what can't be done is refused by name."""

from __future__ import annotations

import json
import logging
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from backends.engine.loading import EngineOptions, build_core, load_parts
from backends.import_noise import keep_pytree, keep_torchao
from backends.models.tiny_architectures import TINY_ARCHITECTURES
from backends.proof.lossless import verify_lossless
from backends.runners.native.packing import quantise_groups, widen_groups
from backends.runners.native.runner import NativeRunner
from backends.runners.quantize import QuantizationError
from tests.support.engine_helpers import (
    CONTEXT,
    FLAT_COST,
    chunk_batch,
    native_or_skip,
    one_thread,
    random_prompt,
    tiny_lm,
)

__all__ = ["one_thread"]
QUANTISED = [name for name in TINY_ARCHITECTURES if name != "gpt2"]


@pytest.mark.parametrize(("how", "dtype"), [("int8", "float32"), ("int8", "bfloat16"), ("int4", "bfloat16")])
@pytest.mark.parametrize("architecture", QUANTISED)
def test_is_lossless_against_itself(architecture: str, how: str, dtype: str) -> None:
    options = EngineOptions(model=f"tiny-random:{architecture}", dtype=dtype, quantize=how, threads=1)
    loaded = build_core(load_parts(options), options, cost=FLAT_COST)
    rng = random.Random(architecture)
    report = verify_lossless(loaded, [random_prompt(rng, 3, 40) for _ in range(4)], seed=3, max_tokens=10)
    assert report.lossless, report
    assert report.accepted


def test_linear_layers_are_quantised_and_the_rest_is_not() -> None:
    options = EngineOptions(model="tiny-random:llama", dtype="bfloat16", quantize="int8", runner="transformers")
    model = load_parts(options).model
    assert type(model.model.layers[0].mlp.up_proj.weight).__name__ == "Int8Tensor"
    assert type(model.lm_head.weight) is torch.nn.Parameter
    assert model.model.embed_tokens.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_kernels_run_eight_bits_and_torchao_the_rest(dtype: str) -> None:
    native_or_skip()
    for runner, kind in (("auto", "native"), ("native", "native"), ("transformers", "transformers")):
        options = EngineOptions(
            model="tiny-random:llama", dtype=dtype, quantize="int8", runner=runner, threads=1, heads=None
        )
        loaded = build_core(load_parts(options), options, cost=FLAT_COST)
        assert loaded.core.runner.kind == kind
        if isinstance(loaded.core.runner, NativeRunner):
            assert loaded.core.runner.int8
    options = EngineOptions(model="tiny-random:llama", dtype="bfloat16", quantize="int4", threads=1)
    assert build_core(load_parts(options), options, cost=FLAT_COST).core.runner.kind == "transformers"


def test_the_kernels_run_the_weights_that_rounding_makes() -> None:
    """Logits are those of a float32 model with the rounded weights, lm_head among them."""
    native_or_skip()
    tokens = random_prompt(random.Random(1), 60, 60)
    runner = NativeRunner(tiny_lm("llama"), num_pages=20, max_rows=128, max_context=CONTEXT, threads=1, int8=True)
    found = runner.logits(runner.forward(chunk_batch(runner, list(range(4)), tokens, 0)))
    rounded = tiny_lm("llama")
    for module in rounded.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data = widen_groups(*quantise_groups(module.weight.data))
    with torch.inference_mode():
        expected = rounded(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)
    torch.testing.assert_close(
        runner.lm_head_rows(torch.tensor([3, 200])), rounded.lm_head.weight[[3, 200]].detach(), rtol=0, atol=0
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (EngineOptions(model="tiny-random:llama", dtype="float32", quantize="int4"), "add --dtype bfloat16"),
        (EngineOptions(model="tiny-random:gpt2", quantize="int8"), "nothing to quantise"),
        (
            EngineOptions(model="tiny-random", dtype="bfloat16", quantize="int4", runner="native"),
            "leave --runner native out",
        ),
        (EngineOptions(model="tiny-random", quantize="int3"), "there are int8, int4"),
    ],
)
def test_what_can_not_be_done_is_refused_by_name(options: EngineOptions, message: str) -> None:
    with pytest.raises(QuantizationError, match=message):
        load_parts(options)


def test_imports_say_nothing_without_a_reason() -> None:
    """With torchao installed, as here, and logs set up as by ``serve``; what else these loggers have to say goes
    through."""
    logs = "import logging; logging.basicConfig()"
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"{logs}; import backends.engine.loading, transformers.quantizers, torchao.quantization",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("", "")

    def record(message: str) -> logging.LogRecord:
        return logging.LogRecord("torchao", logging.WARNING, "", 0, message, None, None)

    missing = "Failed to load /x/torchao/_C_mxfp8.cpython-310-x86_64-linux-gnu.so: no such library"
    assert keep_torchao(record(missing)) == (torch.version.cuda is not None)
    assert keep_torchao(record("Warning: Detected no triton, on systems")) == (torch.version.cuda is not None)
    assert keep_torchao(record("Failed to load /x/torchao/_C.so: undefined symbol"))
    assert keep_torchao(record("Skipping import of cpp extensions"))
    assert keep_pytree(record("something is deprecated"))


@pytest.mark.parametrize(("method", "name"), [("gptq", "GPTQ"), ("awq", "AWQ"), ("bitsandbytes", "bitsandbytes")])
def test_checkpoints_for_gpus_are_refused_on_the_cpu(tmp_path: Path, method: str, name: str) -> None:
    config = transformers.LlamaConfig(num_hidden_layers=1).to_dict() | {"quantization_config": {"quant_method": method}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(QuantizationError, match=f"{name} checkpoints run on a GPU only"):
        load_parts(EngineOptions(model=str(tmp_path), device="cpu"))
    with pytest.raises(QuantizationError, match="quantised already"):
        load_parts(EngineOptions(model=str(tmp_path), device="cpu", quantize="int8"))
