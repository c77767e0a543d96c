"""Which answers are trained on, and that batches cut into parts or dealt to workers train alike."""

import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from backends.heads.module import MedusaHeads
from backends.training.data.cleaning import CleaningOptions, dropped_answers, repetition
from backends.training.data.dataset import Answer, HiddenStates
from backends.training.objective import OutputProjection
from backends.training.trainer import HeadsTrainer, TrainingOptions
from backends.training.workers import Workers

OPTIONS = TrainingOptions(num_heads=2, inner_size=8, epochs=2, batch_size=50, draft_vocab_size=None, dropout=0.0)


def answer(index: int, label: str = "chat", ids: tuple[int, ...] | None = None) -> Answer:
    return Answer(f"p{index}", label, (1, index), ids or tuple(range(index, index + 12)))


def training_answers(count: int, label: str = "chat", start: int = 0) -> list[Answer]:
    made = (answer(index, label) for index in range(start, start + 2 * count + 20))
    return [each for each in made if not each.held_out][:count]


def test_repetition_is_the_share_of_repeated_4_grams():
    assert repetition(range(20)) == 0.0
    assert repetition([1, 2, 3]) == 0.0
    # Ten 4-grams over a cycle of two: two are new.
    assert repetition([1, 2] * 6 + [1]) == pytest.approx(0.8)


def test_short_duplicate_and_repetitive_answers_are_dropped_and_counted():
    good = training_answers(4)
    short = replace(good[0], answer_ids=(1, 2, 3))
    loop = replace(good[0], answer_ids=(5, 6) * 30)
    answers = [*good, short, replace(good[1], label="other"), loop]
    held_out = next(each for each in map(answer, range(1000)) if each.held_out)
    answers += [replace(held_out, answer_ids=(1,)), replace(held_out, answer_ids=(1,))]
    dropped, report = dropped_answers(answers, CleaningOptions(balance=0))
    assert dropped == {4, 5, 6}, "held-out answers stay, whatever they are"
    assert report.dropped == {"short": 1, "duplicate": 1, "repetitive": 1, "surplus of its class": 0}
    assert (report.kept, report.by_class) == (4, {"chat": 4})


def test_classes_are_balanced_by_a_choice_that_does_not_depend_on_order():
    answers = [*training_answers(90), *training_answers(10, "code", 1000), *training_answers(2, "rare", 2000)]
    options = CleaningOptions(balance=3.0)
    dropped, report = dropped_answers(answers, options)
    assert report.by_class == {"chat": 30, "code": 10, "rare": 2}
    assert report.dropped["surplus of its class"] == 60
    kept = {answers[i].id for i in range(len(answers)) if i not in dropped}
    turned, _ = dropped_answers(answers[::-1], options)
    assert kept == {answers[::-1][i].id for i in range(len(answers)) if i not in turned}


def states() -> HiddenStates:
    generator = torch.Generator().manual_seed(0)
    answers = training_answers(20)
    rows = sum(len(each.answer_ids) for each in answers)
    hidden = torch.randn(rows, 16, generator=generator).bfloat16()
    tokens = torch.cat([torch.tensor(each.answer_ids) for each in answers])
    starts = torch.arange(len(answers) + 1).numpy() * 12
    return HiddenStates(tuple(answers), hidden, tokens, starts)


def trained(work_dir: Path, options: TrainingOptions, workers: Workers | None = None) -> MedusaHeads:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(64, 16, generator=generator)
    trainer = HeadsTrainer(
        states(), OutputProjection(weight, weight, None), options, work_dir=work_dir, workers=workers
    )
    return trainer.run()


def test_dropped_answers_are_not_trained_on():
    all_of_them = states()
    some = replace(all_of_them, dropped=frozenset({0, 2}))
    assert some.training_indices == [1, *range(3, 20)]
    assert len(some.select(held_out=False)) == len(all_of_them.select(held_out=False)) - 2 * 11


def test_a_batch_in_parts_trains_as_a_whole_one(tmp_path):
    whole = trained(tmp_path / "a", OPTIONS).state_dict()
    parts = trained(tmp_path / "b", replace(OPTIONS, accumulation=3)).state_dict()
    for name, tensor in whole.items():
        torch.testing.assert_close(parts[name], tensor, rtol=1e-4, atol=1e-5)


def test_bfloat16_products_keep_float32_parameters(tmp_path):
    exact = trained(tmp_path / "a", OPTIONS)
    mixed = trained(tmp_path / "b", replace(OPTIONS, precision="bfloat16"))
    assert mixed.up.weight.dtype == torch.float32
    assert not torch.equal(mixed.up.weight, exact.up.weight)
    torch.testing.assert_close(mixed.up.weight, exact.up.weight, rtol=0, atol=0.05)


def test_two_processes_train_as_one(tmp_path):
    """Through accelerate with gloo; the second process must write nothing.

    Where the first one fails in what it does first, the other neither waits for it nor begins the same.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    code = """if True:
        import sys, torch
        from pathlib import Path
        from backends.training.checkpoint import TrainingError
        from backends.training.workers import joined_workers
        from tests.backends.training.test_training_data import OPTIONS, trained
        torch.set_num_threads(1)
        with joined_workers() as workers:
            assert workers.count == 2
            try:
                with workers.main_first():
                    assert workers.is_main
                    raise ValueError("the disk is full")
            except ValueError:
                assert workers.is_main
            except TrainingError as error:
                assert not workers.is_main and "the first of the processes" in str(error)
            folder = Path(sys.argv[1]) / str(workers.index)
            heads = trained(folder, OPTIONS, workers)
            assert folder.exists() == workers.is_main
            torch.save(heads.state_dict(), f"{folder}.pt")
        # Threads of a group that is left may abort the process while it exits.
        names = {task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")}
        assert not {name for name in names if "gloo" in name or "tcpstore" in name}, names
    """
    base = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    base |= {"CUDA_VISIBLE_DEVICES": "", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)], env={**base, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        )
        for rank in range(2)
    ]
    assert [process.wait(timeout=90) for process in processes] == [0, 0]
    alone = trained(tmp_path / "alone", OPTIONS).state_dict()
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    for name, tensor in alone.items():
        assert torch.equal(first[name], second[name]), "workers must end with equal parameters"
        torch.testing.assert_close(first[name], tensor, rtol=1e-4, atol=1e-5)
