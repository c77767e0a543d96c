"""Every flavour of heads loads, says what its raw tensors say, and drafts losslessly; what doesn't fit is refused."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from backends.checkpoints.loader import BackboneFacts, LoadedHeads, load_checkpoint
from backends.engine.loading import EngineOptions, ModelParts, build_core, load_parts
from backends.heads.format import describe_heads, save_heads
from backends.heads.module import HeadsError
from backends.models.tiny import tiny_heads, tiny_tokenizer
from backends.models.tiny_architectures import tiny_architecture
from backends.proof.lossless import verify_lossless
from backends.runners.base import ProposalRequest
from gateway.cli import main
from tests.support import heads_flavours as made
from tests.support.engine_helpers import (
    FLAT_COST,
    RUNNERS,
    make_runner,
    one_thread,
    random_prompt,
    shared_runner,
    tiny_lm,
)

__all__ = ["one_thread"]


@cache
def backbone() -> BackboneFacts:
    return BackboneFacts.of(tiny_lm("llama"))


def make(flavour: Callable[[Path], made.Made], folder: Path) -> made.Made:
    torch.manual_seed(4)
    return flavour(folder)


@pytest.mark.parametrize("runner_kind", RUNNERS)
@pytest.mark.parametrize("flavour", made.FLAVOURS, ids=lambda flavour: flavour.__name__)
def test_logits_of_every_head_are_those_of_the_raw_tensors(
    flavour: Callable[[Path], made.Made], runner_kind: str, tmp_path: Path
) -> None:
    expected = make(flavour, tmp_path)
    loaded = load_checkpoint(tmp_path, backbone())
    assert loaded.flavour == expected.flavour
    runner = make_runner(runner_kind, tiny_lm("llama"), num_pages=4)
    heads = loaded.bind(runner)
    assert heads.num_heads == expected.heads
    model, pending = tiny_lm("llama"), [4, 60, 70]
    hidden = torch.randn(3, made.HIDDEN)
    with torch.inference_mode():
        embedded = model.get_input_embeddings().weight[pending]
        raw = torch.stack(expected.reference(hidden, model.lm_head.weight, embedded))
    log_probabilities = torch.log_softmax(raw, -1)
    ids = expected.token_ids or list(range(made.VOCAB))
    k = 10
    for i, proposals in enumerate(heads.propose(ProposalRequest(hidden, [[1, 2, token] for token in pending], k))):
        assert proposals.tokens.shape == (expected.heads, k)
        for h in range(expected.heads):
            places = [ids.index(token) for token in proposals.tokens[h].tolist()]
            assert places == log_probabilities[h, i].topk(k).indices.tolist()
            found = torch.from_numpy(proposals.probabilities[h])
            torch.testing.assert_close(found, log_probabilities[h, i, places].exp(), rtol=2e-4, atol=1e-6)
    if hasattr(heads, "logits"):
        torch.testing.assert_close(heads.logits(hidden), raw, rtol=1e-4, atol=1e-4)  # type: ignore[attr-defined]


@pytest.mark.parametrize("flavour", made.FLAVOURS, ids=lambda flavour: flavour.__name__)
def test_every_flavour_drafts_losslessly(flavour: Callable[[Path], made.Made], tmp_path: Path) -> None:
    make(flavour, tmp_path)
    model = tiny_architecture("llama", dtype=torch.bfloat16)
    loaded = load_checkpoint(tmp_path, BackboneFacts.of(model))
    options = EngineOptions(threads=1)
    core = build_core(ModelParts(model, tiny_tokenizer(), loaded, "tiny"), options, cost=FLAT_COST)
    rng = random.Random(flavour.__name__)
    report = verify_lossless(core, [random_prompt(rng, 3, 40) for _ in range(6)], seed=5, max_tokens=12)
    assert report.lossless, report
    assert report.accepted


def test_guesses_do_not_depend_on_company(tmp_path: Path) -> None:
    make(made.v1, tmp_path)
    heads = load_checkpoint(tmp_path, backbone()).bind(shared_runner("transformers"))  # type: ignore[arg-type]
    hidden = torch.randn(6, made.HIDDEN)
    together = heads.propose(ProposalRequest(hidden, [[token] for token in range(6)], 4))
    for i, proposals in enumerate(together):
        [alone] = heads.propose(ProposalRequest(hidden[i : i + 1], [[i]], 4))
        assert alone.tokens.tolist() == proposals.tokens.tolist()
        assert alone.probabilities.tolist() == proposals.probabilities.tolist()


def retensor(folder: Path, name: str, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / name)
    change(tensors)
    save_file(tensors, folder / name)


V2, VLLM = "medusa_lm_head.safetensors", "model.safetensors"


@pytest.mark.parametrize(
    ("flavour", "file", "change", "message"),
    [
        (made.v2, V2, lambda t: t.pop("1.0.linear.weight"), "block 0 of head 1 has no weight matrix"),
        (made.v2, V2, lambda t: [t.pop(n) for n in list(t) if n[0] == "1"], r"heads \[1\] are missing"),
        (made.v2, V2, lambda t: t.update({"0.1.weight": torch.zeros(260, 64)}), "3 heads, but projections of heads"),
        (made.v2, V2, lambda t: t.update({"0.0.linear.weight": torch.zeros(64, 32)}), "must be square"),
        (made.v2, V2, lambda t: t.update({"0.0.linear.bias": torch.zeros(3)}), "a bias of another size"),
        (made.v2, V2, lambda t: t.update({"extra": torch.zeros(3)}), "what is extra beside the heads"),
        (made.v2, V2, lambda t: t.update({"0.0.linear.weight": torch.zeros(64, 64).long()}), "not floating point"),
        (made.vllm, VLLM, lambda t: t.update({"0.0.linear.weight": torch.zeros(64, 64)}), "another kind of heads"),
        (made.vllm_reduced, VLLM, lambda t: t.update(token_map=torch.tensor([999] * 84)), "must hold different tokens"),
        (made.vllm_reduced, VLLM, lambda t: t.update(token_map=torch.tensor([1.5])), "list of token ids"),
        (made.vllm_reduced, VLLM, lambda t: t.pop("token_map"), "vocabulary of 84, the backbone has 260 .*token_map"),
        (made.vllm_reduced, VLLM, lambda t: t.update(token_map=torch.arange(100)), "don't fit a token_map of 100"),
    ],
)
def test_tensors_that_make_no_sense_are_refused_by_name(
    tmp_path: Path, flavour: Any, file: str, change: Any, message: str
) -> None:
    make(flavour, tmp_path)
    retensor(tmp_path, file, change)
    with pytest.raises(HeadsError, match=message):
        load_checkpoint(tmp_path, backbone())


@pytest.mark.parametrize("flavour", [f for f in made.FLAVOURS if f not in (made.own,)], ids=lambda f: f.__name__)
def test_another_hidden_size_is_refused_by_name(flavour: Any, tmp_path: Path) -> None:
    make(flavour, tmp_path)
    with pytest.raises(HeadsError, match="heads are for hidden size 64, the backbone has 128"):
        load_checkpoint(tmp_path, replace(backbone(), hidden_size=128))


def test_another_vocabulary_is_refused_by_name(tmp_path: Path) -> None:
    made.v1(tmp_path, vocab=300)
    with pytest.raises(HeadsError, match="heads are for a vocabulary of 300, the backbone has 260"):
        load_checkpoint(tmp_path, backbone())


def seventeen_heads(tensors: dict[str, torch.Tensor]) -> None:
    some = {name.partition(".")[2]: tensor for name, tensor in tensors.items() if name.startswith("0.")}
    tensors.update({f"{h}.{name}": tensor.clone() for h in range(17) for name, tensor in some.items()})


def test_more_heads_than_a_step_can_verify_are_refused(tmp_path: Path) -> None:
    make(made.v2, tmp_path)
    retensor(tmp_path, V2, seventeen_heads)
    with pytest.raises(HeadsError, match=f"{V2}: 17 heads; from 1 to 16 can be used"):
        load_checkpoint(tmp_path, backbone())


def test_more_heads_than_a_step_can_verify_are_not_trained(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["heads", "train", "--heads", "17", "--prompts", "none", "--out", str(tmp_path / "out")]) == 2
    assert "--heads is 17; at most 16 can be used" in capsys.readouterr().err


class _Bomb:
    def __init__(self, target: Path) -> None:
        self._target = target

    def __reduce__(self) -> Any:
        return Path.touch, (self._target,)


def test_code_in_a_pickle_is_never_run(tmp_path: Path) -> None:
    torch.save({"0.0.linear.weight": _Bomb(tmp_path / "ran")}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(HeadsError, match="holds more than tensors; code in a checkpoint is never run"):
        load_checkpoint(tmp_path, backbone())
    assert not (tmp_path / "ran").exists()


def test_broken_and_missing_files_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HeadsError, match="holds no Medusa heads: looked for"):
        load_checkpoint(tmp_path, backbone())
    (tmp_path / "medusa_lm_head.pt").write_bytes(b"not a checkpoint")
    with pytest.raises(HeadsError, match=r"medusa_lm_head\.pt"):
        load_checkpoint(tmp_path, backbone())
    (tmp_path / V2).write_bytes(b"nor this")
    with pytest.raises(HeadsError, match="is not a safetensors file"):
        load_checkpoint(tmp_path, backbone())

    def unreachable(name: str, **_: Any) -> str:
        raise OSError("offline")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.raises(
        HeadsError, match=r"neither a local folder nor to be had from the hub .*fetch --heads org/heads"
    ):
        load_checkpoint("org/heads", backbone())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"state_dict": {"0.0.linear.weight": torch.zeros(64, 64)}},
            "'state_dict' is of type dict; save the tensors alone",
        ),
        ({"0.0.linear.weight": torch.zeros(64, 64), "epoch": 3}, "'epoch' is of type int"),
        ({0: torch.zeros(64, 64)}, "0 is of type Tensor; save the tensors alone, under names"),
        ([torch.zeros(64, 64)], "is not a dictionary of tensors: its type is list"),
        ({"layers.0.weight": torch.zeros(1), "b": torch.zeros(1)}, "found medusa_lm_head.pt with layers.0.weight, b"),
        ({f"t{i}": torch.zeros(1) for i in range(9)}, "with t0, t1, t2, t3 and 5 more"),
        ({}, "found medusa_lm_head.pt with no tensors"),
    ],
)
def test_what_was_found_instead_of_heads_is_named(tmp_path: Path, content: Any, message: str) -> None:
    torch.save(content, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(HeadsError, match=message):
        load_checkpoint(tmp_path, backbone())
    (tmp_path / "medusa_lm_head.pt").rename(tmp_path / "heads.ckpt")
    with pytest.raises(HeadsError, match=r"found heads\.ckpt"):
        load_checkpoint(tmp_path, backbone())


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "pytorch_model.bin.index.json"])
@pytest.mark.parametrize(
    "content",
    [
        *("", "[]", "null", "{}", "\ud800", "[" * 100_000),
        *('{"weight_map": null}', '{"weight_map": ["a"]}', '{"weight_map": {"a": 1}}', '{"weight_map": {"a": ["b"]}}'),
    ],
    ids=range(10),
)
def test_a_broken_index_is_told(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8", errors="surrogatepass")
    with pytest.raises(HeadsError, match=name):
        load_checkpoint(tmp_path, backbone())


@pytest.mark.parametrize("key", ["backbone", "training"])
@pytest.mark.parametrize("value", [None, "llama", 3, ["a"]])
def test_a_config_of_the_wrong_kinds_is_told(tmp_path: Path, key: str, value: Any) -> None:
    make(made.own, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(HeadsError, match=f"{key} is .*; it must be an object, or left out"):
        load_checkpoint(tmp_path, backbone())
    with pytest.raises(HeadsError, match=f"{key} is "):
        describe_heads(tmp_path)


@pytest.mark.parametrize("accuracy", [None, 1, [1, 2], [["a"]], {"all": 3}, {"all": [[None]]}, "x"])
def test_accuracies_that_say_nothing_are_left_out(tmp_path: Path, accuracy: Any) -> None:
    make(made.own, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "accuracy": accuracy}))
    assert load_checkpoint(tmp_path, backbone()).accuracies == ()


def test_a_scale_that_is_no_number_is_told(tmp_path: Path) -> None:
    make(made.vllm, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "logit_scale": "big"}))
    with pytest.raises(HeadsError, match="logit_scale that is no number: 'big'"):
        load_checkpoint(tmp_path, backbone())


def test_heads_of_another_backbone_are_loud_and_stale(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def about(fingerprint: str) -> dict[str, Any]:
        return {"backbone": {"name": "me", "hidden_size": 64, "vocab_size": 260, "fingerprint": fingerprint}}

    save_heads(tiny_heads(), tmp_path, config=about(backbone().fingerprint))
    with caplog.at_level(logging.WARNING):
        assert load_checkpoint(tmp_path, backbone()).stale is False
        assert not caplog.records
        save_heads(tiny_heads(), tmp_path, config=about("another"))
        assert load_checkpoint(tmp_path, backbone()).stale is True
    assert "trained for another backbone (me); expect few accepted tokens" in caplog.text


def test_an_unmarked_checkpoint_is_of_unknown_age(tmp_path: Path) -> None:
    make(made.v1, tmp_path)
    loaded = load_checkpoint(tmp_path, backbone())
    assert loaded.stale is None
    assert loaded.trained_for == "lmsys/vicuna-7b-v1.3"


def merged_model(folder: Path) -> None:
    """A model that transformers loads, with heads among its tensors."""
    model = tiny_architecture("llama")
    model.save_pretrained(folder)
    heads = {"medusa_head.0.0.linear.weight": torch.zeros(64, 64), "medusa_head.0.0.linear.bias": torch.zeros(64)}
    retensor(folder, VLLM, lambda tensors: tensors.update(heads))
    tiny_tokenizer()._hf.save_pretrained(folder)


def test_merged_heads_belong_to_the_backbone_beside_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    merged_model(tmp_path)
    with caplog.at_level(logging.WARNING):
        parts = load_parts(EngineOptions(model=str(tmp_path), dtype="float32", device="cpu"))
    assert isinstance(parts.heads, LoadedHeads)
    assert (parts.heads.flavour, parts.heads.stale) == ("merged", False)
    assert "answers are those of the changed backbone" in caplog.text
    info = build_core(parts, EngineOptions(threads=1), cost=FLAT_COST).info
    assert (info.num_heads, info.heads_flavour, info.heads_stale) == (1, "merged", False)
    other = load_checkpoint(tmp_path, BackboneFacts.of(tiny_architecture("llama", seed=1)))
    assert other.stale is True
    assert f"serve it: --model {tmp_path}" in other.message


def test_inspect_counts_tensors_and_says_whether_they_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    heads, model = tmp_path / "heads", tmp_path / "model"
    heads.mkdir()
    make(made.v1, heads)
    merged_model(model)
    assert main(["heads", "inspect", str(heads), "--model", str(model)]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["flavour"], facts["num_heads"], facts["num_heads_by_config"]) == ("fasterdecoding-v1", 5, 2)
    assert (facts["layers"], facts["hidden_size"], facts["draft_vocab_size"]) == ([1], 64, 260)
    assert (facts["lm_head"], facts["dtype"]) == ("own", ["float32"])
    assert facts["bytes"] == 4 * facts["parameters"] == 4 * 5 * (64 * 64 + 64 + 260 * 64)
    assert facts["backbone"] == {"name": "lmsys/vicuna-7b-v1.3", "changed_by_training": False}
    assert facts["fit"]["fits"] is True
    assert facts["fit"]["stale"] is None
    made.v1(heads, vocab=300)
    assert main(["heads", "inspect", str(heads), "--model", str(model)]) == 0
    fit = json.loads(capsys.readouterr().out)["fit"]
    assert (fit["fits"], "vocabulary of 300" in fit["reason"]) == (False, True)
    assert main(["heads", "inspect", str(tmp_path / "nothing")]) == 2
    assert "neither a local folder" in capsys.readouterr().err
