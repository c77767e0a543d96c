"""``heads eval`` and ``heads refresh`` on the toy model: numbers against other ways to get them, reports, mistakes."""

import argparse
import json
import math
import re
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from backends.checkpoints.loader import BackboneFacts, load_own
from backends.engine.core import EngineCore
from backends.heads.format import backbone_fingerprint, load_heads, read_heads_config, save_heads
from backends.models.tiny import tiny_heads, tiny_tokenizer
from backends.training.backbone import Backbone
from backends.training.checkpoint import TrainingError
from backends.training.data.answers import generate_answers
from backends.training.data.cleaning import CleaningOptions
from backends.training.data.dataset import Answer, load_hidden_states, read_answers
from backends.training.distill import TrainingRun, train_heads
from backends.training.evaluation.accuracy import evaluate
from backends.training.evaluation.assess import Assessment, AssessOptions, assess, differing_tokens, perplexity
from backends.training.evaluation.race import race
from backends.training.evaluation.report import assessment_html, assessment_text
from backends.training.objective import OutputProjection
from backends.training.refresh import options_for, refresh_heads, sample_prompts
from backends.training.trainer import TrainingOptions
from gateway.commands.errors import CommandError
from gateway.commands.heads import add_parser
from tests.support.engine_helpers import FLAT_COST
from tests.support.toy_language import toy_backbone, toy_model, toy_prompts

OPTIONS = TrainingOptions(
    num_heads=3, inner_size=64, epochs=4, batch_size=512, learning_rate=5e-3, dropout=0.0, draft_vocab_size=None
)
ASSESS = AssessOptions(
    temperatures=(0.0, 1.0), per_class=4, max_new_tokens=24, node_counts=(3, 7), typical=True, rounds=2, cost=FLAT_COST
)


@dataclass
class Toy:
    """A backbone with a file of answers, untrained heads and trained ones."""

    backbone: Backbone
    answers: Path
    untrained: Path
    trained: Path


def run_of(answers: Path, out: Path) -> TrainingRun:
    cleaning = CleaningOptions(balance=0)
    return TrainingRun(
        prompts=None, answers=(answers,), out=out, work_dir=out.with_name("w"), options=OPTIONS, cleaning=cleaning
    )


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Toy:
    folder = tmp_path_factory.mktemp("toy")
    backbone = toy_backbone()
    answers = folder / "answers.jsonl.gz"
    with backbone.engine(kv_tokens=4096, cost=FLAT_COST) as core:
        generate_answers(core, backbone.tokenizer, toy_prompts(120, 20), answers, temperature=1.0, max_new_tokens=24)
    train_heads(backbone, run_of(answers, folder / "trained"), log=lambda line: None)
    sizes = {"hidden_size": backbone.hidden_size, "vocab_size": backbone.vocab_size, "fingerprint": "another"}
    save_heads(tiny_heads(num_heads=2), folder / "untrained", config={"backbone": sizes})
    return Toy(backbone, answers, folder / "untrained", folder / "trained")


@pytest.fixture(scope="module")
def assessment(toy: Toy, tmp_path_factory) -> Assessment:
    work_dir = tmp_path_factory.mktemp("assess")
    held_out = [answer for answer in read_answers([toy.answers]) if answer.held_out]
    return assess(toy.backbone, [toy.untrained, toy.trained], held_out, [], work_dir, ASSESS, log=lambda line: None)


def test_heads_decode_the_same_tokens_in_fewer_steps(assessment: Assessment):
    worse, better = assessment.heads
    assert [(cell.label, cell.temperature) for cell in worse.decoded] == [
        (label, t) for t in (0.0, 1.0) for label in ("all", "chat", "code")
    ]
    for a, b in zip(worse.decoded, better.decoded, strict=True):
        assert a.tokens == b.tokens, "exact decoding gives the same answers whatever the heads"
    assert better.decoded[0].answers == 8
    assert better.decoded[0].tokens_per_step > worse.decoded[0].tokens_per_step + 0.3
    assert better.decoded[0].speedup > worse.decoded[0].speedup
    assert better.decoded[0].accepted_per_step == pytest.approx(better.decoded[0].tokens_per_step - 1, abs=0.05)
    assert (worse.own_backbone, better.own_backbone) == (False, True)


def test_the_race_is_of_equal_answers_and_names_a_winner(assessment: Assessment):
    """Not who wins: that is for the clock to say."""
    for heads in assessment.heads:
        assert [(cell.label, cell.temperature) for cell in heads.measured] == [
            (cell.label, cell.temperature) for cell in heads.decoded
        ]
        for cell in heads.measured:
            assert cell.identical
            assert 0 < cell.slowest <= cell.speedup <= cell.fastest
            assert cell.tokens_per_s > 0
    first, second = assessment.heads
    assert second.measured[0].tokens_per_step > first.measured[0].tokens_per_step
    assert assessment.winner.overall == max(first.overall, second.overall)
    told = assessment.to_json()["winner"]
    assert (told["folder"], told["by"]) == (assessment.winner.folder, "clock")
    by_table = replace(assessment, heads=[replace(heads, measured=[]) for heads in assessment.heads])
    assert by_table.winner.folder == second.folder, "by the flat cost table fewer steps win"
    assert by_table.to_json()["winner"]["by"] == "cost table"


def test_contestants_take_turns(toy: Toy, monkeypatch: pytest.MonkeyPatch):
    """The clock gives every answer a second, so all are equally fast; the order of the calls is the one promised."""
    order: list[str] = []

    @dataclass
    class Clock:
        now: float = 0.0

        def __call__(self) -> float:
            self.now += 0.5
            return self.now

    prompts = [Answer(str(i), "code", (10 + i, 20), ()) for i in range(3)]
    with toy.backbone.engine(kv_tokens=512, cost=FLAT_COST) as vanilla:
        bound = load_own(toy.trained, BackboneFacts.of(toy.backbone.model)).bind(vanilla.runner)
        heads = EngineCore(vanilla.runner, bound, vanilla.tokenizer, vanilla.config, FLAT_COST, lambda: 0.0)
        monkeypatch.setattr(heads, "add", lambda each: (order.append(each.plan.method), EngineCore.add(heads, each)))
        ((cell, of_class),) = race(
            [heads], prompts, (0.0,), rounds=2, max_new_tokens=8, seed=0, log=lambda line: None, clock=Clock()
        )
    # After the warm-up: by prompts of the first round, then of the second.
    first = ["vanilla", "medusa", "medusa", "vanilla", "vanilla", "medusa"]
    second = ["medusa", "vanilla", "vanilla", "medusa", "medusa", "vanilla"]
    assert order[2:] == first + second
    assert (cell.label, of_class.label) == ("all", "code")
    assert cell.speedup == cell.slowest == cell.fastest == 1.0
    assert cell.tokens_per_s == pytest.approx(8 / 0.5)


def test_accuracy_is_that_of_the_other_evaluation(toy: Toy, tmp_path):
    """Over the same answers, ``heads train`` and ``heads eval`` must say the same."""
    held_out = [answer for answer in read_answers([toy.answers]) if answer.held_out]
    options = replace(ASSESS, temperatures=(1.0,), per_class=1, typical=False)
    found = assess(toy.backbone, [toy.trained], held_out, held_out, tmp_path, options, log=lambda line: None)
    states = load_hidden_states(
        tmp_path / "hidden", held_out, hidden_size=64, backbone_fingerprint=toy.backbone.fingerprint
    )
    heads = load_heads(toy.trained, hidden_size=64, vocab_size=260)
    expected = evaluate(heads, OutputProjection.of_model(toy.backbone.model, None), states, node_counts=(3, 7))
    for cell in found.heads[0].accuracy:
        assert cell.accuracy == expected.accuracy[cell.label]
        for kind in ("dynamic", "static"):
            if kind == "dynamic" or cell.label == "all":
                rates = {n: counts[cell.label].tokens_per_step for n, counts in getattr(expected, kind).items()}
                assert getattr(cell, kind) == rates
    assert [cell.label for cell in found.heads[0].accuracy] == ["all", "chat", "code"]
    assert {cell.temperature for cell in found.heads[0].accuracy} == {1.0}


def test_what_typical_acceptance_changes(assessment: Assessment, toy: Toy):
    assert differing_tokens([1, 2, 3], [1, 5, 3, 4]) == 2
    prompt = Answer("p", "", (1, 40, 41), ())
    log_p = torch.log_softmax(toy.backbone.model(input_ids=torch.tensor([[1, 40, 41, 50, 51]])).logits[0], dim=-1)
    expected = math.exp(-float(log_p[2, 50] + log_p[3, 51]) / 2)
    assert perplexity(toy.backbone, [prompt], [[50, 51]]) == pytest.approx(expected, rel=1e-4)
    for cell in assessment.heads[1].typical:
        assert cell.tokens_per_step >= cell.exact_tokens_per_step
        assert 0 < cell.differing_tokens < 1
        assert cell.perplexity > 1
    exact = [cell for cell in assessment.heads[1].decoded if cell.label == "all"]
    assert [cell.exact_speedup for cell in assessment.heads[1].typical] == [cell.speedup for cell in exact]


def test_the_report_is_one_page_with_plots_and_nothing_from_outside(assessment: Assessment):
    """Well nested, and names from outside are escaped."""

    class Checker(HTMLParser):
        def __init__(self) -> None:
            super().__init__()
            self.open: list[str] = []
            self.seen: dict[str, int] = {}

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            self.seen[tag] = self.seen.get(tag, 0) + 1
            if tag != "meta":
                self.open.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert self.open.pop() == tag

    page = assessment_html(replace(assessment, model="<script>x"))
    checker = Checker()
    checker.feed(page)
    assert not checker.open
    assert checker.seen["svg"] == 4
    assert "script" not in checker.seen
    assert not re.findall(r'(?:src|href)="(?!#)', page)
    assert "untrained was trained for another backbone" in page
    text = assessment_text(assessment)
    assert "trained: tokens/step" in text
    assert "trained: tokens/s " in text
    assert f"best: {Path(assessment.winner.folder).name}, speedup" in text
    assert "(trained for another backbone)" in text


def test_eval_on_the_command_line(toy: Toy, tmp_path, capsys):
    toy.backbone.model.save_pretrained(tmp_path / "model")
    toy.backbone.tokenizer.save_pretrained(tmp_path / "model")
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())

    def run(*arguments: str) -> int:
        shared = ["heads", "eval", "--model", str(tmp_path / "model"), "--heads", str(toy.trained)]
        args = parser.parse_args([*shared, *arguments])
        return args.run(args)

    short = ("--per-class", "1", "--max-new-tokens", "6", "--temperatures", "0")
    report = tmp_path / "report.html"
    assert run("--heads", str(toy.untrained), *short, "--json", "--report", str(report)) == 0
    found = json.loads(capsys.readouterr().out)
    assert [Path(heads["folder"]).name for heads in found["heads"]] == ["trained", "untrained"]
    assert [cell["label"] for cell in found["heads"][0]["decoded"]] == ["all", "chat", "code", "creative"]
    assert found["cost_ms"]["1"] > 0
    assert report.read_text().startswith("<!doctype html>")
    with pytest.raises(CommandError, match=r"missing/config.json can't be read"):
        run("--heads", str(tmp_path / "missing"), *short)
    with pytest.raises(CommandError, match="no prompt leaves room for 250 new tokens"):
        run("--max-new-tokens", "250")
    with pytest.raises(SystemExit):
        run("--per-class", "0")
    assert "0 is less than 1" in capsys.readouterr().err
    path = tmp_path / "none.jsonl"
    path.write_text("")
    with pytest.raises(CommandError, match="no answers in it"):
        run("--answers", str(path))
    path.write_text('{"id": "1", "prompt_ids": [1], "answer_ids": [2, 3]}\n')
    with pytest.raises(CommandError, match="held-out"):
        run("--answers", str(path))


def test_refresh_gains_back_what_an_update_cost(toy: Toy, tmp_path):
    """The update: noise on every weight, to which the old heads were never used."""
    model = toy_model()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter += 0.012 * torch.randn(parameter.shape, generator=generator)
    updated = Backbone("toy-2", model, tiny_tokenizer(), backbone_fingerprint(model))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(prompt) + "\n" for prompt in toy_prompts(150, 25)))
    run = replace(
        run_of(toy.answers, tmp_path / "new"), answers=(), prompts=prompts, initial=toy.trained, max_new_tokens=24
    )
    lines: list[str] = []
    report = refresh_heads(updated, run, sample=100, epochs=3, learning_rate=3e-3, log=lines.append)
    before, after = (each.dynamic[7]["all"].tokens_per_step for each in (report.before, report.after))
    assert after > before + 0.05
    assert "tokens/step" in lines[-1] and f"{before:.3f}" in lines[-1] and f"{after:.3f}" in lines[-1]
    config = read_heads_config(tmp_path / "new")
    assert config["backbone"]["fingerprint"] == updated.fingerprint
    assert config["refreshed_from"]["fingerprint"] == toy.backbone.fingerprint
    with pytest.raises(TrainingError, match="nothing to refresh"):
        refresh_heads(toy.backbone, run, sample=9, epochs=1, learning_rate=1e-3)


def test_a_sample_keeps_a_fifth_for_the_evaluation():
    prompts = toy_prompts(150, 40)
    chosen = sample_prompts(prompts, 100)
    held_out = [p for p in chosen if Answer(p["id"], "", (), ()).held_out]
    assert (len(chosen), len(held_out)) == (100, 20)
    assert sample_prompts(prompts[::-1], 100) == chosen
    assert len(sample_prompts(prompts, 1000)) == 190


def test_options_to_go_on_with_are_the_heads_own():
    heads = tiny_heads(num_heads=3)
    options = options_for(heads, {"num_heads": 9, "dropout": 0.4, "alignment": 2.0})
    assert (options.num_heads, options.inner_size, options.dropout) == (3, heads.inner_size, 0.4)
