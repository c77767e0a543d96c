"""Heads of several layers, with own output layers, or of sizes that no kernel takes: from training to serving."""

from __future__ import annotations

import argparse
import json
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from backends.checkpoints.loader import BackboneFacts, LoadedHeads, load_own
from backends.heads.format import load_heads, save_heads
from backends.heads.module import HeadsError, MedusaHeads
from backends.runners.base import ProposalRequest
from backends.training.backbone import Backbone
from backends.training.checkpoint import TrainingError
from backends.training.data.answers import generate_answers
from backends.training.data.cleaning import CleaningOptions
from backends.training.distill import TrainingRun, train_heads
from backends.training.objective import OutputProjection, Targets, heads_loss
from backends.training.refresh import options_for
from backends.training.trainer import TrainingOptions
from gateway.cli import main
from gateway.commands.errors import CommandError
from gateway.commands.heads import add_parser
from tests.support.engine_helpers import FLAT_COST, make_runner, tiny_lm
from tests.support.toy_language import toy_backbone, toy_prompts

HIDDEN, VOCAB = 64, 260
DRAFT = torch.arange(4, 100, dtype=torch.int32)
OPTIONS = TrainingOptions(
    num_heads=2, inner_size=40, epochs=6, batch_size=512, learning_rate=5e-3, dropout=0.0, draft_vocab_size=96
)
KINDS = {
    "layers": {"layers": 3},
    "own output": {"own_output": True},
    "both": {"layers": 2, "own_output": True},
    "both, sequential": {"layers": 2, "own_output": True, "sequential": True},
    "inner size": {},
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def random_heads(hidden: int = HIDDEN, **shape: Any) -> MedusaHeads:
    """Values that bfloat16 holds exactly, so that a round trip has to be exact."""
    if shape.pop("own_output", False):
        shape["output_rows"] = torch.zeros(len(DRAFT), hidden)
    heads = MedusaHeads(hidden, 2, 40, draft_token_ids=DRAFT, **shape)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.copy_((torch.randn(parameter.shape, generator=generator) * 0.2).to(torch.bfloat16))
    return heads.eval().requires_grad_(False)


def saved(folder: Path, heads: MedusaHeads) -> Path:
    save_heads(heads, folder, config={"backbone": {"name": "toy", "hidden_size": HIDDEN, "vocab_size": VOCAB}})
    return folder


def by_formula(
    tensors: dict[str, torch.Tensor], x: torch.Tensor, e: torch.Tensor, head: int, lm_head: torch.Tensor
) -> torch.Tensor:
    """Logits of one head for a state and an embedding, from the file's tensors alone."""

    def unit(v: torch.Tensor) -> torch.Tensor:
        return v / v.pow(2).mean(-1, keepdim=True).sqrt()

    for prefix in sorted(name.removesuffix("up.weight") for name in tensors if name.endswith("up.weight")):
        up, down = tensors[f"{prefix}up.weight"][head].float(), tensors[f"{prefix}down.weight"][head].float()
        inner = torch.cat([unit(x), unit(e)], -1) @ up.T + tensors[f"{prefix}up.bias"][head].float()
        x = x + (inner * inner.sigmoid()) @ down.T
    output = tensors["output.weight"][head].float() if "output.weight" in tensors else lm_head[DRAFT.long()]
    return x @ output.T


@pytest.mark.parametrize("kind", KINDS)
def test_a_round_trip_keeps_what_heads_say(kind: str, tmp_path: Path) -> None:
    heads = load_heads(saved(tmp_path, random_heads(**KINDS[kind])), hidden_size=HIDDEN, vocab_size=VOCAB)
    x, e, lm_head = torch.randn(3, HIDDEN), torch.randn(2, 3, HIDDEN), torch.randn(VOCAB, HIDDEN)
    found = heads.logits(heads.path_hidden(x, e), lm_head[DRAFT.long()])
    tensors = load_file(tmp_path / "medusa_heads.safetensors")
    if not heads.sequential:
        expected = [by_formula(tensors, x, e[0], head, lm_head) for head in range(2)]
        torch.testing.assert_close(found, torch.stack(expected), rtol=1e-4, atol=1e-4)
    else:
        torch.testing.assert_close(found[0], by_formula(tensors, x, e[0], 0, lm_head), rtol=1e-4, atol=1e-4)
        second = by_formula(tensors, heads.follow_hidden(0, x, e[0]), e[1], 1, lm_head)
        torch.testing.assert_close(found[1], second, rtol=1e-4, atol=1e-4)


def test_files_that_are_no_such_heads_are_refused(tmp_path: Path) -> None:
    weights, config = tmp_path / "medusa_heads.safetensors", tmp_path / "config.json"
    saved(tmp_path, random_heads(layers=3, own_output=True))
    tensors = load_file(weights)

    def refused(words: str, **changed: torch.Tensor | None) -> None:
        made = {**tensors, **{name.replace("__", "."): tensor for name, tensor in changed.items()}}
        save_file({name: tensor for name, tensor in made.items() if tensor is not None}, weights)
        with pytest.raises(HeadsError, match=words):
            load_heads(tmp_path, hidden_size=HIDDEN, vocab_size=VOCAB)

    refused(r"lacks further\.0\.down\.weight", further__0__down__weight=None)
    refused(r"output\.weight is \[2, 5, 64\], expected \[2, 96, 64\]", output__weight=torch.zeros(2, 5, 64))
    refused(r"has stray lm_head", lm_head=torch.zeros(2))
    told = json.loads(config.read_text())
    config.write_text(json.dumps({**told, "sequential": None}))
    refused("must say whether the heads are 'sequential'")
    # A reader of the plain form would leave out what it doesn't know.
    config.write_text(json.dumps({**told, "format": "medusa-gateway/1"}))
    refused(r"has stray further\.0\.down\.weight.*output\.weight")


def test_the_loss_has_gradients_for_output_layers() -> None:
    heads = random_heads(own_output=True).requires_grad_(True)
    assert heads.output is not None
    projection = OutputProjection(torch.randn(len(DRAFT), HIDDEN), torch.randn(VOCAB, HIDDEN), DRAFT)
    hidden, pending = torch.randn(30, HIDDEN), torch.arange(30)
    targets = torch.stack([torch.arange(30), torch.arange(30) + 1])
    loss = heads_loss(
        heads, projection, hidden, pending.expand(2, -1), Targets.of_columns(targets), head_loss_decay=0.5, chunk=7
    )
    loss.backward()
    found = {name: parameter.grad for name, parameter in heads.named_parameters()}
    heads.zero_grad(set_to_none=True)
    states = heads.propose_hidden(hidden, projection.embeddings[pending])
    parts = [F.cross_entropy(states[h] @ heads.output.weight[h].T, targets[h]) for h in range(2)]
    expected = (parts[0] + 0.5 * parts[1]) / 1.5
    expected.backward()
    torch.testing.assert_close(loss, expected)
    for name, parameter in heads.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_beside_the_kernels_they_guess_as_beside_transformers(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    loaded = LoadedHeads(random_heads(**KINDS[kind]), "test", stale=None)
    native, torch_runner = (make_runner(name, tiny_lm("llama")) for name in ("native", "transformers"))
    hidden, contexts = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(1)), [[4 + i] for i in range(5)]
    with caplog.at_level(logging.WARNING):
        ours, theirs = (
            loaded.bind(runner).propose(ProposalRequest(hidden, contexts, 4)) for runner in (native, torch_runner)
        )
    assert "the heads run in torch operations" in caplog.text
    for one, other in zip(ours, theirs, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert torch.allclose(torch.from_numpy(one.probabilities), torch.from_numpy(other.probabilities), atol=1e-4)
        assert (one.below is None) == (kind != "both, sequential")


@dataclass
class Toy:
    backbone: Backbone
    folder: Path

    def run(self, name: str, **changed: Any) -> TrainingRun:
        run = TrainingRun(
            prompts=None,
            answers=(self.folder / "answers.jsonl.gz",),
            out=self.folder / name,
            work_dir=self.folder / f"{name}.work",
            options=replace(OPTIONS, **{key: value for key, value in changed.items() if key != "initial"}),
            cleaning=CleaningOptions(balance=0),
        )
        return replace(run, initial=changed.get("initial"))


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    folder, backbone = tmp_path_factory.mktemp("toy"), toy_backbone()
    with backbone.engine(kv_tokens=4096, cost=FLAT_COST) as core:
        path = folder / "answers.jsonl.gz"
        generate_answers(core, backbone.tokenizer, toy_prompts(60, 10), path, temperature=1.0, max_new_tokens=24)
    backbone.model.save_pretrained(folder / "model")
    backbone.tokenizer.save_pretrained(folder / "model")
    return Toy(backbone, folder)


@pytest.mark.parametrize("kind", KINDS)
def test_from_training_to_a_proof(toy: Toy, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Trained heads guess better than untrained ones, are told by ``inspect``, and change no answer."""
    shape = KINDS[kind]
    run = toy.run(kind.replace(" ", "-"), **shape)
    untrained = train_heads(toy.backbone, toy.run(f"{kind}-0", **{**shape, "learning_rate": 0.0}), log=lambda _: None)
    trained = train_heads(toy.backbone, run, log=lambda _: None)
    before, after = (report.dynamic[7]["all"].tokens_per_step for report in (untrained, trained))
    assert after > before + 0.1
    assert main(["heads", "inspect", str(run.out)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["format"] == f"medusa-gateway/{3 if shape else 1}"
    assert told["layers"] == shape.get("layers", 1)
    assert told["lm_head"] == ("own" if "own_output" in shape else "the backbone's")
    assert told["sequential"] == ("sequential" in shape)
    arguments = ["--model", str(toy.folder / "model"), "--heads", str(run.out), "--prompts", "12", "--json"]
    assert main(["verify-lossless", *arguments]) == 0
    proof = json.loads(capsys.readouterr().out)
    assert (proof["prompts"], proof["token_mismatches"], proof["logit_mismatches"]) == (24, 0, 0)
    assert all(part["accepted_draft_tokens"] > 10 for part in proof["by_dtype"].values())


def test_training_goes_on_from_simpler_heads(toy: Toy) -> None:
    """New layers change nothing at first; fewer than there were are refused by name."""
    plain = toy.run("plain")
    report = train_heads(toy.backbone, plain, log=lambda _: None)
    grown = toy.run("grown", initial=plain.out, layers=2, own_output=True, learning_rate=0.0)
    again = train_heads(toy.backbone, grown, log=lambda _: None)
    assert again.dynamic[7]["all"].tokens == report.dynamic[7]["all"].tokens
    assert again.accuracy["all"][0] == pytest.approx(report.accuracy["all"][0], abs=0.01)
    loaded = load_own(grown.out, BackboneFacts.of(toy.backbone.model)).heads
    assert isinstance(loaded, MedusaHeads)
    options = options_for(loaded, {})
    assert (options.layers, options.own_output, options.inner_size) == (2, True, 40)
    for changed, words in (({"own_output": True}, "layers .*: 2, not 1"), ({"layers": 2}, "own output layers")):
        with pytest.raises(TrainingError, match=words):
            train_heads(toy.backbone, toy.run("no", initial=grown.out, **changed), log=lambda _: None)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--output", "shared", "--draft-vocab", "100"], "leave --draft-vocab 100 out"),
        (["--output", "reduced", "--draft-vocab", "0"], "say --output shared"),
        (["--draft-vocab", "-5"], "--draft-vocab is -5"),
        (["--stage", "2", "--layers", "2"], "--layers and --output belong to stage 1"),
        (["--stage", "2", "--output", "own"], "--layers and --output belong to stage 1"),
        (["--sequential", "--input", "hidden"], "--sequential needs --input hidden+token"),
    ],
)
def test_options_that_contradict_each_other(arguments: list[str], words: str) -> None:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    args = parser.parse_args(["heads", "train", "--out", "x", *arguments])
    with pytest.raises(CommandError, match=re.escape(words)):
        args.run(args)
