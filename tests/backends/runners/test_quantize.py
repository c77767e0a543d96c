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
from backends.runners.quantize import QuantizationError
from tests.support.engine_helpers import FLAT_COST, one_thread, random_prompt

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
    model = load_parts(EngineOptions(model="tiny-random:llama", dtype="bfloat16", quantize="int8")).model
    assert type(model.model.layers[0].mlp.up_proj.weight).__name__ == "Int8Tensor"
    assert type(model.lm_head.weight) is torch.nn.Parameter
    assert model.model.embed_tokens.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (EngineOptions(model="tiny-random:llama", dtype="float32", quantize="int4"), "add --dtype bfloat16"),
        (EngineOptions(model="tiny-random:gpt2", quantize="int8"), "nothing to quantise"),
        (EngineOptions(model="tiny-random", quantize="int8", runner="native"), "leave --runner native out"),
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
