"""Every architecture decodes losslessly and as transformers does; what can't run is refused with its reason."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from backends.engine.loading import EngineOptions, build_core, load_parts
from backends.models.tiny_architectures import TINY_ARCHITECTURES, tiny_architecture
from backends.proof.lossless import verify_lossless
from backends.runners.architectures import UnsupportedModel, refusal
from backends.runners.hf import HfRunner
from gateway.cli import main
from tests.support.engine_helpers import FLAT_COST, chunk_batch, native_or_skip, one_thread, random_prompt

__all__ = ["one_thread"]

NATIVE = ("llama", "mistral", "qwen2", "qwen3")


def verify(architecture: str, dtype: str, runner: str) -> None:
    options = EngineOptions(model=f"tiny-random:{architecture}", dtype=dtype, runner=runner, threads=1)
    loaded = build_core(load_parts(options), options, cost=FLAT_COST)
    rng = random.Random(architecture)
    report = verify_lossless(loaded, [random_prompt(rng, 3, 60) for _ in range(7)], seed=3, max_tokens=14)
    assert report.lossless, report
    assert report.accepted > 5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", TINY_ARCHITECTURES)
def test_is_lossless_through_transformers(architecture: str, dtype: str) -> None:
    verify(architecture, dtype, "transformers")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", NATIVE)
def test_is_lossless_through_the_kernels(architecture: str, dtype: str) -> None:
    native_or_skip()
    verify(architecture, dtype, "native")


def runner_of(model: Any, max_context: int = 192) -> HfRunner:
    return HfRunner(model, num_pages=40, max_rows=128, max_context=max_context)


@pytest.mark.parametrize("architecture", TINY_ARCHITECTURES)
def test_says_what_transformers_says_past_every_window(architecture: str) -> None:
    """Longer than the probe at load time and than any window here."""
    tokens = random_prompt(random.Random(1), 75, 75)
    reference = tiny_architecture(architecture)
    reference.set_attn_implementation("eager")
    with torch.inference_mode():
        expected = reference(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    runner = runner_of(tiny_architecture(architecture))
    found = runner.logits(runner.forward(chunk_batch(runner, list(range(5)), tokens, 0)))
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (transformers.T5Config(), "t5 is an encoder-decoder model"),
        (transformers.MambaConfig(num_hidden_layers=2), "mamba has layers of type linear_attention"),
        (transformers.RwkvConfig(num_hidden_layers=2), "rwkv has a recurrent state"),
        (transformers.JambaConfig(), "jamba has "),
        (transformers.MixtralConfig(), "mixtral is a mixture of experts"),
        (transformers.GptOssConfig(), "gpt_oss is a mixture of experts"),
        (transformers.BloomConfig(), "bloom uses ALiBi"),
        (transformers.FalconConfig(alibi=True), "falcon uses ALiBi"),
        (transformers.Gemma3TextConfig(use_bidirectional_attention=True), "attends in both directions"),
        (
            transformers.LlamaConfig(
                max_position_embeddings=4096, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
            ),
            None,
        ),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_what_the_configuration_rules_out_is_refused_by_name(config: Any, reason: str | None) -> None:
    found = refusal(config)
    assert found == reason if reason is None else reason in (found or "")


def test_rope_that_grows_with_the_batch_is_refused_only_where_it_would_grow() -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "factor": 3.0,
        "original_max_position_embeddings": 64,
    }
    config = tiny_architecture("phi3", original_max_position_embeddings=64, rope_parameters=rope).config
    assert "context (max_model_len) of at most 64" in (refusal(config) or "")
    assert refusal(config, max_context=64) is None


def test_a_refusal_comes_before_the_weights_are_asked_for(tmp_path: Path) -> None:
    config = transformers.MixtralConfig(num_hidden_layers=1).to_dict() | {"architectures": ["MixtralForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="mixture of experts"):
        load_parts(EngineOptions(model=str(tmp_path)))


def test_a_model_whose_keywords_stop_on_the_way_is_refused() -> None:
    config = transformers.StableLmConfig(
        vocab_size=260,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    with pytest.raises(UnsupportedModel, match="stablelm: keywords don't reach its attention"):
        runner_of(transformers.StableLmForCausalLM(config))


class _Louder(transformers.LlamaForCausalLM):
    """Does something to its logits that the engine can't know of."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out: Any = super().forward(*args, **kwargs)
        out.logits = out.logits * 1.5
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_no_rule_knows_shows_in_the_logits(dtype: torch.dtype) -> None:
    model = tiny_architecture("llama", dtype=dtype)
    model.__class__ = _Louder
    with pytest.raises(UnsupportedModel, match="logits differ from transformers' own"):
        runner_of(model)


def test_command_proves_architectures_and_names_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["verify-lossless", "--tiny", "--dtype", "float32", "--prompts", "3", "--max-tokens", "6"]
    assert main([*arguments, "--architecture", "gemma2"]) == 0
    assert "gemma2 float32: 3 prompts" in capsys.readouterr().out
    assert main([*arguments, "--architecture", "gemini"]) == 2
    assert "no tiny architecture 'gemini'; there are llama" in capsys.readouterr().err
    assert main(["verify-lossless", "--architecture", "phi"]) == 2
    assert "--architecture goes with --tiny" in capsys.readouterr().err
