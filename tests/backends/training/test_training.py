"""Training and evaluation on a tiny random backbone."""

import gzip
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from backends.cost.step_cost import StepCost
from backends.heads.format import backbone_fingerprint, describe_heads, save_heads
from backends.heads.module import MedusaHeads
from backends.models.tiny import tiny_model, tiny_tokenizer
from backends.training.backbone import Backbone
from backends.training.checkpoint import TrainingError
from backends.training.data.answers import generate_answers
from backends.training.data.dataset import (
    Answer,
    AnswersError,
    HiddenStates,
    cache_hidden_states,
    load_hidden_states,
    read_answers,
    read_jsonl,
)
from backends.training.distill import TrainingRun, train_heads
from backends.training.evaluation.accuracy import Guesses, ReplayCount, evaluate, rank_accuracy, replay, replay_answer
from backends.training.objective import OutputProjection, Targets, Teacher, frequent_tokens, heads_loss
from backends.training.trainer import HeadsTrainer, TrainingOptions
from backends.tree import CandidateTree
from gateway import cli

VOCAB, HIDDEN = 48, 32
OPTIONS = TrainingOptions(num_heads=2, inner_size=16, epochs=4, batch_size=64, draft_vocab_size=24, dropout=0.1)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Tiny products only lose by threads, and badly where the cores are busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def answers() -> list[Answer]:
    """Answers that count upwards: what comes next is learnable from the pending token alone."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for index in range(60):
        start, length = (int(n) for n in torch.randint(3, 20, (2,), generator=generator))
        ids = tuple(3 + (start + step) % 20 for step in range(length + 4))
        made.append(Answer(f"prompt/{index}", ("code", "chat")[index % 2], (1, 3 + start % 20), ids))
    return made


@pytest.fixture(scope="module")
def states(model, answers, tmp_path_factory) -> HiddenStates:
    folder = tmp_path_factory.mktemp("states")
    fingerprint = backbone_fingerprint(model)
    cache_hidden_states(model, answers, folder, backbone_fingerprint=fingerprint, answers_per_chunk=16)
    return load_hidden_states(folder, answers, hidden_size=HIDDEN, backbone_fingerprint=fingerprint)


def projection_of(model, states: HiddenStates, size: int | None = 24) -> OutputProjection:
    return OutputProjection.of_model(model, frequent_tokens(states, size, keep=(2,)))


def test_cached_row_predicts_the_answers_token(model, answers, states):
    assert any(answer.held_out for answer in answers)
    for index in (0, 7, 59):
        ids = torch.tensor([answers[index].prompt_ids + answers[index].answer_ids])
        expected = model.model(input_ids=ids).last_hidden_state[0, len(answers[index].prompt_ids) - 1 : -1]
        torch.testing.assert_close(states.hidden[states.rows_of(index)].float(), expected, rtol=1e-2, atol=2e-2)


def test_targets_stay_inside_their_answer(answers, states):
    targets = states.targets(3)
    first, second = answers[0].answer_ids, answers[1].answer_ids
    assert targets[0, : len(first)].tolist() == [*first[1:], -1]
    assert targets[2, : len(first)].tolist() == [*first[3:], -1, -1, -1]
    assert targets[1, len(first) : len(first) + 2].tolist() == list(second[2:4])


def test_cache_goes_on_where_it_was_killed(model, answers, tmp_path):
    fingerprint = backbone_fingerprint(model)

    class Killed(Exception):
        pass

    def kill(rows: int) -> None:
        raise Killed

    with pytest.raises(Killed):
        cache_hidden_states(
            model, answers, tmp_path, backbone_fingerprint=fingerprint, answers_per_chunk=16, progress=kill
        )
    with (tmp_path / "hidden.bf16").open("ab") as file:
        file.write(b"rows of a chunk that was never finished")
    done = []
    cache_hidden_states(
        model, answers, tmp_path, backbone_fingerprint=fingerprint, answers_per_chunk=16, progress=done.append
    )
    assert len(done) == 3
    resumed = load_hidden_states(tmp_path, answers, hidden_size=HIDDEN, backbone_fingerprint=fingerprint)
    fresh_folder = tmp_path / "fresh"
    cache_hidden_states(model, answers, fresh_folder, backbone_fingerprint=fingerprint, answers_per_chunk=16)
    fresh = load_hidden_states(fresh_folder, answers, hidden_size=HIDDEN, backbone_fingerprint=fingerprint)
    assert torch.equal(resumed.hidden, fresh.hidden)


def test_cache_refuses_another_backbone_or_other_answers(model, answers, tmp_path):
    cache_hidden_states(model, answers, tmp_path, backbone_fingerprint="one")
    with pytest.raises(AnswersError, match="another backbone"):
        cache_hidden_states(model, answers, tmp_path, backbone_fingerprint="two")
    with pytest.raises(AnswersError, match="other answers"):
        cache_hidden_states(model, answers[::-1], tmp_path, backbone_fingerprint="one")


def test_loss_is_cross_entropy_over_the_draft_vocabulary(model, states):
    projection = projection_of(model, states)
    torch.manual_seed(3)
    heads = MedusaHeads(HIDDEN, 2, 16, draft_token_ids=projection.draft_token_ids)
    torch.nn.init.normal_(heads.down.weight, std=0.1)
    rows = torch.arange(40)
    hidden, pending = states.hidden[rows].float(), states.tokens[rows]
    targets = projection.draft_index(states.targets(2))[:, rows]
    loss = heads_loss(
        heads, projection, hidden, pending.expand(2, -1), Targets.of_columns(targets), head_loss_decay=0.5, chunk=7
    )
    loss.backward()
    gradient = heads.down.weight.grad
    assert gradient is not None
    heads.zero_grad()
    guessed = heads.propose_hidden(hidden, projection.embeddings[pending])
    reference = torch.zeros(())
    for head in range(2):
        logits = guessed[head] @ projection.lm_head_rows.T
        share = 0.5**head / 1.5
        reference = reference + share * torch.nn.functional.cross_entropy(logits, targets[head], ignore_index=-1)
    reference.backward()
    torch.testing.assert_close(loss, reference)
    torch.testing.assert_close(gradient, heads.down.weight.grad, rtol=1e-4, atol=1e-6)


def test_soft_targets_are_the_backbones_distribution(model, states):
    projection = projection_of(model, states)
    size = len(projection.lm_head_rows)
    teacher = Teacher(states, projection, ranks=size, batch_size=50)
    rows = torch.tensor([0, 3])
    columns = projection.draft_index(states.targets(2))[:, rows]
    targets = teacher.mix(rows, columns, 0.25)
    torch.testing.assert_close(targets.shares.sum(-1), torch.ones(2, 2))
    for head, n in ((0, 1), (1, 0)):
        expected = 0.25 * (states.hidden[rows[n] + 1 + head].float() @ projection.lm_head_rows.T).softmax(0)
        expected[columns[head, n]] += 0.75
        dense = torch.zeros(size).scatter_add_(0, targets.columns[head, n], targets.shares[head, n])
        torch.testing.assert_close(dense, expected, rtol=1e-4, atol=1e-5)
    torch.manual_seed(3)
    heads = MedusaHeads(HIDDEN, 2, 16, draft_token_ids=projection.draft_token_ids)
    torch.nn.init.normal_(heads.down.weight, std=0.1)
    hidden, pending = states.hidden[rows].float(), states.tokens[rows]
    loss = heads_loss(heads, projection, hidden, pending.expand(2, -1), targets, head_loss_decay=1.0)
    logits = heads.propose_hidden(hidden, projection.embeddings[pending]) @ projection.lm_head_rows.T
    dense = torch.zeros(2, 2, size).scatter_add_(2, targets.columns, targets.shares)
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits.flatten(0, 1), dense.flatten(0, 1)))


def test_no_target_past_the_answers_end_even_with_a_teacher(model, states):
    projection = projection_of(model, states)
    last = states.rows_of(0).stop - 2
    columns = projection.draft_index(states.targets(2))[:, [last]]
    shares = Teacher(states, projection, ranks=4).mix(torch.tensor([last]), columns, 0.5).shares
    assert shares[0].sum() == pytest.approx(1.0)
    assert shares[1].sum() == 0.0


def test_training_makes_the_loss_drop_and_beats_untrained_heads(model, states, tmp_path):
    projection = projection_of(model, states)
    options = replace(OPTIONS, epochs=16, learning_rate=1e-2, dropout=0.0, soft_share=0.0)
    trainer = HeadsTrainer(states, projection, options, work_dir=tmp_path)
    untrained = evaluate(trainer.heads, projection, states, node_counts=(4,))
    losses: list[float] = []
    heads = trainer.run(progress=lambda p: losses.append(p.loss))
    assert len(losses) == trainer.total_steps
    assert sum(losses[-5:]) / 5 < 0.5 * sum(losses[:5]) / 5
    report = evaluate(heads, projection, states, node_counts=(4,))
    assert report.dynamic[4]["all"].tokens_per_step > untrained.dynamic[4]["all"].tokens_per_step + 0.5
    assert report.accuracy["all"][0][0] > 0.9


def test_a_resumed_run_ends_with_the_same_heads(model, states, tmp_path):
    projection = projection_of(model, states)
    straight = HeadsTrainer(states, projection, OPTIONS, work_dir=tmp_path / "straight").run()
    killed = HeadsTrainer(states, projection, OPTIONS, work_dir=tmp_path / "killed")
    killed.run(until_step=killed.steps_per_epoch + 1)
    resumed = HeadsTrainer(states, projection, OPTIONS, work_dir=tmp_path / "killed")
    assert resumed.resume()
    assert resumed.step == killed.steps_per_epoch + 1
    resumed.run()
    for name, tensor in straight.state_dict().items():
        assert torch.equal(tensor, resumed.heads.state_dict()[name]), name


def test_resume_refuses_other_options(model, states, tmp_path):
    projection = projection_of(model, states)
    HeadsTrainer(states, projection, OPTIONS, work_dir=tmp_path).run(until_step=1)
    other = HeadsTrainer(states, projection, replace(OPTIONS, learning_rate=1e-4), work_dir=tmp_path)
    with pytest.raises(TrainingError, match="other options"):
        other.resume()


def test_replay_by_hand():
    # Pending tokens 10, 11, ... ; the answer is 10..15, so six tokens: five come from steps.
    answer = [10, 11, 12, 13, 14, 15]
    guesses = {
        # (pending index, depth, rank): token. At 0: right on rank 1, then right below it, then wrong.
        (0, 0, 0): 99, (0, 0, 1): 11, (0, 1, 0): 12, (0, 2, 0): 99,
        # At 3 (11 and 12 accepted, 13 given by the backbone): all wrong, so 14 comes alone.
        (3, 0, 0): 99,
        # At 4: right, and the answer ends there: the one that the backbone adds would lie past the end.
        (4, 0, 0): 15, (4, 1, 0): 77,
    }  # fmt: skip
    trees = {0: [(0,), (1,), (1, 0), (1, 0, 0)], 3: [(0,)], 4: [(0,), (0, 0)]}
    count = replay_answer(answer, trees.__getitem__, lambda j, depth, rank: guesses[j, depth, rank])
    assert count == ReplayCount(steps=3, tokens=5)
    # A guess that no node of the tree holds is not accepted.
    trees[0] = [(0,)]
    trees |= {1: [], 2: []}
    assert replay_answer(answer, trees.__getitem__, lambda j, d, r: guesses[j, d, r]) == ReplayCount(5, 5)


def test_replay_over_states_drafts_best_first(states):
    """Two ranks and two heads: whether the second node goes wide or deep follows the probabilities of that row."""
    index = next(i for i, answer in enumerate(states.answers) if answer.held_out)
    rows = states.rows_of(index)
    length = rows.stop - rows.start
    ids = torch.full((2, length - 1, 2), 99)
    targets = states.targets(2)[:, rows][:, :-1]
    # Head 1 is right at its second guess, head 2 at its first.
    ids[0, :, 1], ids[1, :, 0] = targets[0], targets[1]
    wide = torch.tensor([[0.5, 0.4], [0.3, 0.1]]).unsqueeze(1).expand(2, length - 1, 2)
    deep = torch.tensor([[0.9, 0.1], [0.8, 0.1]]).unsqueeze(1).expand(2, length - 1, 2)
    kept = torch.arange(rows.start, rows.stop - 1)
    assert replay(states, Guesses(kept, ids, wide), 2)["all"] == ReplayCount(math.ceil((length - 1) / 2), length - 1)
    assert replay(states, Guesses(kept, ids, deep), 2)["all"] == ReplayCount(length - 1, length - 1)
    tree = CandidateTree(((1,), (1, 0)))
    counts = replay(states, Guesses(kept, ids, deep), 2, static_tree=tree)
    assert counts["all"] == ReplayCount(math.ceil((length - 1) / 3), length - 1)
    assert counts[states.answers[index].label] == counts["all"]


def test_rank_accuracy_counts_by_rank_and_skips_rows_without_target():
    tokens = torch.tensor([[[5, 6], [5, 6], [5, 6], [5, 6]]])
    guesses = Guesses(torch.arange(4), tokens, torch.zeros_like(tokens, dtype=torch.float32))
    assert rank_accuracy(guesses, torch.tensor([[5, 6, 7, -1]])) == [pytest.approx([1 / 3, 1 / 3])]


def test_draft_vocabulary_is_what_training_answers_use_most(answers, states):
    ids = frequent_tokens(states, 5, keep=(2,))
    assert ids is not None and ids.dtype == torch.int32
    counts = torch.bincount(torch.cat([torch.tensor(a.answer_ids) for a in answers if not a.held_out]))
    assert ids.tolist() == sorted({2, *counts.argsort(descending=True, stable=True)[:4].tolist()})


def test_answers_are_the_models_own_and_generation_resumes(tmp_path):
    model, tokenizer = tiny_model(), tiny_tokenizer()
    backbone = Backbone("tiny", model, tokenizer, backbone_fingerprint(model))
    prompts = [{"id": str(i), "label": "chat", "prompt": "what is " + "abcdefg"[i:]} for i in range(5)]
    prompts.append({"id": "long", "prompt": "x" * 300})
    path = tmp_path / "answers.jsonl.gz"
    done: list[int] = []
    with backbone.engine(kv_tokens=1024) as core:
        generate_answers(core, tokenizer, prompts[:3], path, max_new_tokens=6)
        with path.open("ab") as file:
            file.write(gzip.compress(b'{"id": "torn", "prom')[:-12])
        generate_answers(core, tokenizer, prompts, path, max_new_tokens=6, progress=done.append)
    records = list(read_jsonl(path))
    assert len(done) == 2
    assert sorted(record["id"] for record in records) == ["0", "1", "2", "3", "4"]
    for record in records:
        ids = torch.tensor([record["prompt_ids"] + record["answer_ids"]])
        logits = model(input_ids=ids).logits[0, len(record["prompt_ids"]) - 1 : -1]
        assert logits.argmax(-1).tolist() == record["answer_ids"]


def test_sampled_answers_do_not_depend_on_interruption(tmp_path):
    model, tokenizer = tiny_model(), tiny_tokenizer()
    prompts = [{"id": str(i), "prompt": "what is " + "abcdefg"[i:]} for i in range(5)]

    def answers(path: Path) -> dict[str, list[int]]:
        return {record["id"]: record["answer_ids"] for record in read_jsonl(path)}

    whole, parts, other = (tmp_path / f"{name}.jsonl.gz" for name in ("whole", "parts", "other"))
    with Backbone("tiny", model, tokenizer, "").engine(kv_tokens=1024) as core:
        generate_answers(core, tokenizer, prompts, whole, temperature=1.0, max_new_tokens=6)
        for some in (prompts[1:3], prompts):
            generate_answers(core, tokenizer, some, parts, temperature=1.0, max_new_tokens=6)
        generate_answers(core, tokenizer, prompts, other, temperature=1.0, max_new_tokens=6, seed=1)
    assert answers(parts) == answers(whole)
    assert answers(other) != answers(whole)
    assert {answer.temperature for answer in read_answers([whole])} == {1.0}


def test_a_model_without_native_kernels_is_itself_again_after_its_engine():
    """Such a model lends the engine its own layers, attention and all; hidden states are taken from it afterwards."""
    model = tiny_model(hidden=40)
    ids = torch.tensor([[1, 50, 60, 2]])
    expected = model(input_ids=ids).logits
    backbone = Backbone("tiny", model, tiny_tokenizer(), "")
    with backbone.engine(kv_tokens=256, cost=StepCost(((1, 1.0),))) as core:
        assert core.runner.kind == "transformers"
        with pytest.raises(RuntimeError, match="outside the engine"):
            model(input_ids=ids)
    assert torch.equal(model(input_ids=ids).logits, expected)


def test_bad_answers_are_named(tmp_path):
    path = tmp_path / "answers.jsonl"
    path.write_text('{"id": 1, "prompt_ids": [1]}\n')
    with pytest.raises(AnswersError, match=r"answers\.jsonl:1: no answer_ids; an answer has id"):
        read_answers([path])
    path.write_text('not json\n{"id": 1}\n')
    with pytest.raises(AnswersError, match=r"answers\.jsonl:1: not JSON"):
        read_answers([path])


def test_from_answers_to_a_heads_folder(model, answers, tmp_path):
    path = tmp_path / "answers.jsonl.gz"
    with gzip.open(path, "wt") as file:
        for a in answers:
            record = {"id": a.id, "label": a.label, "prompt_ids": a.prompt_ids, "answer_ids": a.answer_ids}
            file.write(json.dumps(record) + "\n")
    backbone = Backbone("tiny", model, tiny_tokenizer(), backbone_fingerprint(model))
    run = TrainingRun(
        prompts=None, answers=(path,), out=tmp_path / "heads", work_dir=tmp_path / "work", options=OPTIONS
    )
    report = train_heads(backbone, run, log=lambda line: None)
    described = describe_heads(tmp_path / "heads")
    assert described["backbone"]["fingerprint"] == backbone.fingerprint
    assert (described["num_heads"], described["draft_vocab_size"]) == (2, 21)
    assert described["accuracy"][0] == pytest.approx(report.accuracy["all"][0], abs=1e-5)
    dropped = described["training"]["cleaning"]["dropped"]
    assert described["training"]["answers"] + report.answers + sum(dropped.values()) == len(answers)

    # Going on from these heads, every answer given twice: the same held-out answers, and no worse on them.
    longer = replace(
        run,
        answers=(path, path),
        out=tmp_path / "longer",
        work_dir=tmp_path / "longer.work",
        initial=tmp_path / "heads",
        options=replace(OPTIONS, learning_rate=1e-3),
    )
    better = train_heads(backbone, longer, log=lambda line: None)
    assert better.rows == report.rows
    again = describe_heads(tmp_path / "longer")["training"]
    assert again["answers"] == described["training"]["answers"]
    assert again["cleaning"]["dropped"]["duplicate"] == 2 * dropped["duplicate"] + again["answers"]
    assert better.accuracy["all"][0][0] > report.accuracy["all"][0][0]
    with pytest.raises(TrainingError, match="to start from are"):
        train_heads(backbone, replace(longer, options=replace(OPTIONS, inner_size=8)), log=lambda line: None)


def test_command_line_does_not_import_torch():
    code = (
        "import argparse, sys; from gateway.commands.heads import add_parser; "
        "p = argparse.ArgumentParser(); add_parser(p.add_subparsers()); "
        "a = p.parse_args(['heads', 'train', '--out', 'x']); assert callable(a.run); "
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_command_line_tells_mistakes_in_one_line(tmp_path, capsys):
    def run(*arguments: str) -> int:
        return cli.main(["heads", *arguments])

    assert run("inspect", str(tmp_path)) == 2
    error = capsys.readouterr().err
    assert (
        error.startswith(f"medusa-gateway: error: {tmp_path} holds no Medusa heads: looked for")
        and error.count("\n") == 1
    )
    heads = MedusaHeads(HIDDEN, 2, 8)
    save_heads(heads, tmp_path, config={"backbone": {"hidden_size": HIDDEN, "vocab_size": VOCAB}})
    assert run("inspect", str(tmp_path)) == 0
    assert json.loads(capsys.readouterr().out)["num_heads"] == 2
