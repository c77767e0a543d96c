"""``verify-lossless`` and ``bench``: what they print, and that the proof notices a difference."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from backends.bench import structured
from backends.bench.load_sweep import STATIC_TREES
from backends.engine.loading import EngineOptions, LoadedCore, build_core, load_core, load_parts
from backends.models.tiny import TINY_MODEL_NAME
from backends.proof.lossless import verify_lossless
from backends.runners.native.bindings import NativeUnavailable, load_library
from gateway.cli import main


def test_tiny_proof_prints_its_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify-lossless", "--tiny", "--prompts", "60", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["prompts"] == 120
    assert report["tokens"] > 1000
    assert report["token_mismatches"] == report["logit_mismatches"] == 0
    assert all(part["accepted_draft_tokens"] > 50 for part in report["by_dtype"].values())


def test_every_shape_of_tokenizer_sends_the_text_of_its_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["verify-lossless", "--tiny", "--tokenizer", "all", "--prompts", "25", "--dtype", "float32", "--json"]
    assert main(arguments) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report["by_dtype"]) == ["byte-level float32", "byte-fallback float32", "llama3 float32"]
    assert report["token_mismatches"] == report["logit_mismatches"] == report["text_mismatches"] == 0


def test_text_that_is_not_that_of_the_tokens_is_caught() -> None:
    options = EngineOptions(model=TINY_MODEL_NAME, dtype="float32", threads=1)
    loaded: LoadedCore = build_core(load_parts(options), options)
    real = loaded.tokenizer.detokenizer

    def forgetful() -> Any:
        made = real()
        made.flush = str  # type: ignore[method-assign]
        return made

    loaded.tokenizer.detokenizer = forgetful  # type: ignore[method-assign]
    loaded.tokenizer.decode = loaded.tokenizer.decode_by_library  # type: ignore[method-assign]
    report = verify_lossless(loaded, [tuple(range(5 + i, 12 + i)) for i in range(40)], seed=1, max_tokens=8)
    assert report.text_mismatches > 0
    assert not report.lossless


def test_grammars_are_proven_too(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["verify-lossless", "--tiny", "--grammar", "--prompts", "40", "--dtype", "float32", "--json"]
    assert main([*arguments, "--max-tokens", "100"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["token_mismatches"] == report["logit_mismatches"] == report["text_mismatches"] == 0
    assert report["whole_answers"] >= 25
    assert report["invalid_answers"] == 0
    assert report["validated_by_jsonschema"] is True
    assert report["by_dtype"]["float32"]["accepted_draft_tokens"] > 100


@pytest.mark.parametrize(
    ("strain", "drafted"),
    [
        (["--prefix-cache", "--pages", "6", "--prompts", "60"], 150),
        (["--prefix-cache", "--pages", "12", "--prompts", "24", "--grammar", "--max-tokens", "100"], 100),
    ],
)
def test_the_cache_and_lost_memory_change_nothing(
    strain: list[str], drafted: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify-lossless", "--tiny", "--dtype", "float32", "--json", *strain]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["token_mismatches"] == report["logit_mismatches"] == report["text_mismatches"] == 0
    assert min(report["cached"], report["evictions"]) > 50
    assert report["preemptions"] > 10
    assert report["by_dtype"]["float32"]["accepted_draft_tokens"] > drafted
    if "--grammar" in strain:
        assert report["invalid_answers"] == 0
        assert report["whole_answers"] >= 15


def test_an_answer_that_breaks_its_grammar_is_caught(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("backends.grammar.matcher.MaskBuffers.apply", lambda self, bits, row: None)
    monkeypatch.setattr("backends.grammar.matcher.GrammarMatcher.allows", lambda self, token: True)
    monkeypatch.setattr("backends.grammar.matcher.GrammarMatcher.advance", lambda self, token: None)
    arguments = ["verify-lossless", "--tiny", "--grammar", "--prompts", "30", "--dtype", "float32"]
    assert main(arguments) == 1
    assert "an answer breaks its grammar" in capsys.readouterr().err


def test_bench_structured_reports_ratios_and_the_cost_of_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    name, (_, schema) = next(iter(structured.SCHEMAS.items()))
    monkeypatch.setattr(structured, "SCHEMAS", {name: ("hi", schema)})
    options = EngineOptions(model=TINY_MODEL_NAME, dtype="float32", threads=1)
    report = structured.run_structured(structured.StructuredOptions(options, rounds=1, max_tokens=150))
    (cell,) = report["cells"]
    assert cell["identical"] is True
    assert cell["by_grammar"] > 10
    assert all(report["mask_us"][way]["rows"] > 20 for way in ("greedy", "drawn"))
    assert min(report["over_free_vanilla"], report["over_constrained_vanilla"], report["again"]) > 0
    assert all(report["beside_grammars"][way]["rounds"] == 2 for way in ("greedy", "drawn"))


def test_the_transformers_path_is_exact_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify-lossless", "--tiny", "--prompts", "12", "--runner", "transformers", "--dtype", "float32"]) == 0
    assert " 0 token mismatches, 0 logit mismatches" in capsys.readouterr().out


class _Skewed:
    """A runner whose logits depend, in the last bits, on how many rows share the call."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._runner.logits(hidden) * (1 + len(hidden) * 2.0**-22)


def test_a_batch_dependent_model_is_caught() -> None:
    options = EngineOptions(model=TINY_MODEL_NAME, dtype="float32", threads=1)
    loaded: LoadedCore = build_core(load_parts(options), options)
    loaded.core.runner = _Skewed(loaded.core.runner)
    prompts = [tuple(range(5 + i, 12 + i)) for i in range(20)]
    report = verify_lossless(loaded, prompts, seed=1, max_tokens=8)
    assert report.logit_mismatches > 0
    assert not report.lossless


def test_bench_prints_the_cells(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "--model", TINY_MODEL_NAME, "--rounds", "1", "--concurrency", "1,2", "--temperature", "0.7"]
    assert main([*arguments, "--max-tokens", "8", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {"cpu", "cores", "dtype", "torch"} <= report["machine"].keys()
    assert {(cell["class"], cell["concurrency"]) for cell in report["cells"]} == {
        (name, count) for name in ("code", "chat", "creative") for count in (1, 2)
    }
    for cell in report["cells"]:
        assert cell["identical"]
        assert min(cell["medusa_tps"], cell["vanilla_tps"], cell["generate_tps"]) > 0
        assert {"temperature", "tokens_per_step", "nodes"} <= cell.keys()


def test_bench_of_a_model_that_runs_through_transformers(capsys: pytest.CaptureFixture[str]) -> None:
    """Its attention is the engine's then, which ``generate`` can't use: so on a GPU, and where no compiler is."""
    arguments = ["bench", "--model", TINY_MODEL_NAME, "--runner", "transformers", "--rounds", "2", "--concurrency", "1"]
    assert main([*arguments, "--temperature", "0", "--max-tokens", "6", "--json"]) == 0
    for cell in json.loads(capsys.readouterr().out)["cells"]:
        assert cell["identical"]
        assert cell["generate_tps"] > 0


def test_sweep_prints_the_cells(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "sweep", "--model", TINY_MODEL_NAME, "--rounds", "1", "--concurrency", "2"]
    assert main([*arguments, "--max-tokens", "6", "--json"]) == 0
    cells = json.loads(capsys.readouterr().out)["cells"]
    assert [cell["class"] for cell in cells] == ["code", "chat", "creative", "mixed"]
    for cell in cells:
        assert min(cell[f"{name}_tps"] for name in ("adaptive", "vanilla", "default_tree", "best_static")) > 0
        assert cell["best_static"] in STATIC_TREES


def test_native_kernels_are_built_where_a_compiler_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEDUSA_GATEWAY_NATIVE", "0")
    load_library.cache_clear()
    try:
        with pytest.raises(NativeUnavailable, match="MEDUSA_GATEWAY_NATIVE"):
            load_library()
        loaded = load_core(EngineOptions(model=TINY_MODEL_NAME))
        assert loaded.core.runner.kind == "transformers"
        with pytest.raises(ValueError, match="native runner can't run"):
            load_core(EngineOptions(model=TINY_MODEL_NAME, runner="native"))
    finally:
        load_library.cache_clear()
