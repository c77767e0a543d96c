"""Stage two: heads and backbone trained together gain tokens per step; all that is written says what was changed."""

import argparse
import copy
import json
import random
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from litestar.testing import TestClient

from backends.engine.loading import EngineOptions, load_core, load_parts
from backends.engine.thread import Engine
from backends.heads.format import backbone_fingerprint, describe_heads, load_heads
from backends.training.adapt import AdaptationReport, adapt_backbone
from backends.training.backbone import Backbone
from backends.training.checkpoint import TrainingError
from backends.training.data.answers import generate_answers
from backends.training.data.cleaning import CleaningOptions
from backends.training.distill import TrainingRun, train_heads, training_states
from backends.training.joint import JointOptions, JointTrainer, divergence
from backends.training.trainer import TrainingOptions
from backends.types import DecodingPlan, GenerationRequest, SamplingParams
from gateway.commands.heads import add_parser
from gateway.http.app import create_app
from gateway.serving.call import ServedModel
from gateway.serving.state import GatewayState
from tests.support.engine_helpers import FLAT_COST
from tests.support.toy_language import sentence, toy_backbone, toy_prompts

STAGE1 = TrainingOptions(
    num_heads=3, inner_size=128, epochs=6, batch_size=512, learning_rate=5e-3, dropout=0.0, draft_vocab_size=None
)
STAGE2 = JointOptions(
    rank=8,
    alpha=16,
    epochs=3,
    answers_per_batch=16,
    heads_learning_rate=2e-3,
    backbone_learning_rate=3e-3,
    alignment=0.5,
    heads_weight=0.5,
)


@dataclass
class Trained:
    """Both stages on the toy model; ``original`` is made anew, since the second stage uses its backbone up."""

    stage1: Path
    stage2: Path
    report: AdaptationReport
    original: Backbone
    held_out: list[tuple[int, ...]]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Trained:
    folder = tmp_path_factory.mktemp("stages")
    prompts = toy_prompts(200, 40)
    backbone = toy_backbone()
    original = replace(backbone, model=copy.deepcopy(backbone.model))
    with backbone.engine(kv_tokens=4096, cost=FLAT_COST) as core:
        generate_answers(
            core, backbone.tokenizer, prompts, folder / "answers.jsonl.gz", temperature=1.0, max_new_tokens=30
        )
    run = TrainingRun(
        prompts=None,
        answers=(folder / "answers.jsonl.gz",),
        out=folder / "stage1",
        work_dir=folder / "work",
        options=STAGE1,
        max_new_tokens=30,
        cleaning=CleaningOptions(balance=0),
    )
    train_heads(backbone, run, log=lambda line: None)
    second = replace(run, initial=folder / "stage1", out=folder / "stage2")
    report = adapt_backbone(backbone, second, STAGE2, log=lambda line: None)
    ids = [tuple(backbone.tokenizer.encode_chat([{"role": "user", "content": p["prompt"]}])) for p in prompts[-40:]]
    return Trained(folder / "stage1", folder / "stage2", report, original, ids)


def engine_tokens_per_step(backbone: Backbone, heads: Path, prompts: list[tuple[int, ...]]) -> float:
    loaded = load_heads(heads, hidden_size=backbone.hidden_size, vocab_size=backbone.vocab_size)
    with backbone.engine(kv_tokens=4096, heads=loaded, cost=FLAT_COST) as core:
        plan, sampling = DecodingPlan(num_heads=3, max_nodes=7), SamplingParams(temperature=0.0, max_tokens=30)
        for number, ids in enumerate(prompts):
            core.add(GenerationRequest(str(number), ids, sampling, plan))
        stats = []
        while core.has_work:
            stats += [chunk.stats for _, chunk in core.step() if chunk.stats]
    return sum(s.emitted_tokens for s in stats) / sum(s.steps for s in stats)


def test_stage_two_accepts_more_tokens_per_step(trained: Trained):
    """By the offline replay and by the engine, each model decoding the held-out prompts with its own heads."""
    before, after = (report.dynamic[7]["all"] for report in (trained.report.before, trained.report.after))
    assert after.tokens_per_step > before.tokens_per_step + 0.1
    parts = load_parts(EngineOptions(model=str(trained.report.backbone), device="cpu", dtype="float32"))
    adapted = Backbone(parts.name, parts.model, parts.tokenizer, "")
    first = engine_tokens_per_step(trained.original, trained.stage1, trained.held_out)
    second = engine_tokens_per_step(adapted, trained.stage2, trained.held_out)
    assert second > first + 0.1


def test_files_say_that_the_backbone_changed(trained: Trained):
    config = json.loads((trained.report.backbone / "config.json").read_text())
    assert config["medusa_gateway"]["adapted_from"] == "toy"
    assert config["medusa_gateway"]["adapted_from_fingerprint"] == trained.original.fingerprint
    described = describe_heads(trained.stage2)["backbone"]
    adapted = load_parts(EngineOptions(model=str(trained.report.backbone), device="cpu"))
    assert described["adapted_from"] == {"name": "toy", "fingerprint": trained.original.fingerprint}
    assert described["fingerprint"] == backbone_fingerprint(adapted.model) != trained.original.fingerprint
    assert 0 < described["drift"]["divergence"] < 1
    assert 0.5 < described["drift"]["agreement"] < 1
    card = (trained.stage2 / "README.md").read_text()
    assert "**The backbone was changed.** toy-adapted was made from toy" in card
    assert "the backbone has changed" in str(trained.report)


def test_the_answer_says_that_the_backbone_changed(trained: Trained):
    """From the folders through the engine and the HTTP API."""
    options = EngineOptions(model=str(trained.report.backbone), heads=str(trained.stage2), device="cpu", kv_tokens=1024)
    loaded = load_core(options)
    engine = Engine(loaded.core, loaded.info)
    try:
        state = GatewayState.create({loaded.info.name: ServedModel(engine, loaded.tokenizer)})
        with TestClient(create_app(state), base_url="http://localhost") as client:
            body = {"model": "toy-adapted", "messages": [{"role": "user", "content": sentence(random.Random(5), 2)}]}
            answer = client.post("/v1/chat/completions", json={**body, "max_tokens": 12, "temperature": 0}).json()
            listed = client.get("/v1/models").json()["data"][0]
    finally:
        engine.close()
    assert answer["usage"]["completion_tokens"] == 12
    assert answer["decoding"]["adapted_from"] == listed["adapted_from"] == "toy"
    assert "this model was adapted from toy: its answers are its own" in answer["decoding"]["reason"]


def test_a_resumed_run_ends_with_the_same_model_and_heads(trained: Trained, tmp_path):
    answers = tmp_path / "answers.jsonl.gz"
    answers.write_bytes((trained.stage1.parent / "answers.jsonl.gz").read_bytes())
    run = TrainingRun(
        prompts=None, answers=(answers,), out=tmp_path, work_dir=tmp_path, options=STAGE1, cleaning=CleaningOptions()
    )
    states = training_states(trained.original, run, log=lambda line: None)
    states = replace(states, dropped=frozenset(range(40, len(states.answers))))

    def trainer(folder: str) -> JointTrainer:
        heads = load_heads(trained.stage1, hidden_size=64, vocab_size=260)
        options = replace(STAGE2, epochs=2, answers_per_batch=8, accumulation=2)
        return JointTrainer(copy.deepcopy(trained.original.model), heads, states, options, work_dir=tmp_path / folder)

    straight, killed, resumed = trainer("straight"), trainer("killed"), trainer("killed")
    straight.run()
    killed.run(until_step=straight.steps_per_epoch + 1)
    assert resumed.resume()
    resumed.run()
    assert resumed.step == straight.total_steps
    for part in ("heads", "adapted"):
        expected, found = (getattr(each, part).state_dict() for each in (straight, resumed))
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items()), part
    with pytest.raises(TrainingError, match="other options"):
        other = replace(STAGE2, seed=1)
        JointTrainer(
            copy.deepcopy(trained.original.model), straight.heads, states, other, work_dir=tmp_path / "killed"
        ).resume()


def test_divergence_is_kl_with_its_gradient():
    torch.manual_seed(0)
    hidden, original, lm_head = torch.randn(7, 16, requires_grad=True), torch.randn(7, 16), torch.randn(30, 16)
    log_p, log_q = (torch.log_softmax(each @ lm_head.T, dim=1) for each in (hidden, original))
    expected = torch.nn.functional.kl_div(log_p, log_q, log_target=True, reduction="sum")
    (gradient,) = torch.autograd.grad(expected, hidden)
    found = divergence(hidden, original, lm_head, chunk=3)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, hidden)[0], gradient)


def test_stage_two_on_the_command_line(trained: Trained, tmp_path, capsys):
    trained.original.model.save_pretrained(tmp_path / "toy")
    trained.original.tokenizer.save_pretrained(tmp_path / "toy")
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    answers, out = trained.stage1.parent / "answers.jsonl.gz", tmp_path / "out"
    named = {"--model": tmp_path / "toy", "--init": trained.stage1, "--answers": answers, "--out": out}
    numbers = {"--batch": 32, "--lora-rank": 4, "--max-new-tokens": 20, "--threads": 1}
    options = [str(part) for pair in (named | numbers).items() for part in pair]
    args = parser.parse_args(["heads", "train", "--stage", "2", *options])
    assert args.run(args) == 0
    assert f"--model {out}/toy-adapted --heads {out}" in capsys.readouterr().out
    written = describe_heads(out)["training"]["options"]
    assert (written["rank"], written["alpha"], written["answers_per_batch"], written["epochs"]) == (4, 8, 32, 1)


def test_stage_two_wants_trained_heads(trained: Trained, tmp_path):
    run = TrainingRun(prompts=None, answers=(), out=tmp_path, work_dir=tmp_path, options=STAGE1)
    with pytest.raises(TrainingError, match="--init"):
        adapt_backbone(trained.original, run, STAGE2)
