"""Self-distillation from prompts to a heads folder: answers, hidden states, training, evaluation."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from backends.heads.format import load_heads, save_heads
from backends.heads.module import MedusaHeads
from backends.training.backbone import Backbone
from backends.training.checkpoint import TrainingError
from backends.training.data.answers import generate_answers, read_prompts
from backends.training.data.cleaning import CleaningOptions, dropped_answers
from backends.training.data.dataset import (
    Answer,
    AnswersError,
    HiddenStates,
)
from backends.training.evaluation.accuracy import ALL_CLASSES, EvaluationReport, evaluate
from backends.training.model_card import count_licences, write_model_card
from backends.training.objective import OutputProjection, frequent_tokens
from backends.training.progress import progress_bar
from backends.training.states import collect_states, read_own_answers
from backends.training.trainer import HeadsTrainer, TrainingOptions
from backends.training.workers import Workers

_COMPARED_NODES = 7


@dataclass(frozen=True)
class TrainingRun:
    """What :func:`train_heads` reads and writes. ``work_dir`` keeps answers, states and checkpoints between runs.

    Held-out answers are taken from the first of the ``answers`` files only, so that adding others leaves the
    evaluation comparable. ``initial``: a heads folder to start from, whose sizes and draft vocabulary are kept.
    ``temperatures``: without ``answers``, every prompt is answered once at each; greedy (0) should come first.
    ``notes`` go into the heads' ``config.json`` as they are.
    """

    prompts: Path | None
    answers: tuple[Path, ...]
    out: Path
    work_dir: Path
    options: TrainingOptions
    resume: bool = False
    initial: Path | None = None
    max_new_tokens: int = 192
    command: str = ""
    temperatures: tuple[float, ...] = (0.0,)
    cleaning: CleaningOptions = field(default_factory=CleaningOptions)
    workers: Workers = field(default_factory=Workers)
    notes: Mapping[str, Any] = field(default_factory=dict)


def train_heads(backbone: Backbone, run: TrainingRun, *, log: Callable[[str], object] = print) -> EvaluationReport:
    """Run all stages, write ``run.out`` and return the evaluation on held-out answers.

    Raises :class:`AnswersError` for unusable input, :class:`TrainingError` when a checkpoint can't be resumed.
    """
    states = training_states(backbone, run, log=log)
    initial = None
    if run.initial is not None:
        initial = load_heads(run.initial, hidden_size=backbone.hidden_size, vocab_size=backbone.vocab_size)
        draft_ids = initial.draft_token_ids
    else:
        draft_ids = frequent_tokens(states, run.options.draft_vocab_size, keep=backbone.end_token_ids)
    projection = OutputProjection.of_model(backbone.model, draft_ids)
    trainer = HeadsTrainer(states, projection, run.options, work_dir=run.work_dir, initial=initial, workers=run.workers)
    if run.resume and trainer.resume():
        log(f"resumed at step {trainer.step} of {trainer.total_steps}")
    started = time.monotonic()
    with progress_bar(trainer.total_steps, "training", "step", initial=trainer.step) as advance:

        def on_epoch(epoch: int) -> None:
            if run.workers.is_main:
                report = evaluate(trainer.heads, trainer.projection, states, node_counts=(7,))
                log(f"after epoch {epoch}: {_brief(report)}")

        heads = trainer.run(progress=lambda p: advance(1, f"loss {p.loss:.3f}"), on_epoch=on_epoch)
    log(f"trained in {time.monotonic() - started:.0f} s")
    if not run.workers.is_main:
        return evaluate(heads, trainer.projection, states)
    report = evaluate_and_save(backbone, heads, states, run)
    log(report_text(report))
    return report


def training_states(backbone: Backbone, run: TrainingRun, *, log: Callable[[str], object]) -> HiddenStates:
    """Hidden states over the run's answers (made here, if the run has only prompts), cleaned.

    Raises :class:`AnswersError` for unusable input, :class:`TrainingError` when nothing is held out.
    """
    with run.workers.main_first():
        # Before answers are made, and long before the prompts' licences are counted.
        if run.prompts is not None:
            _check_prompts(run.prompts, to_answer=not run.answers)
        first, *others = run.answers or _generate(backbone, run, log)
        answers = read_own_answers(backbone, [first], log)
        answers += [answer for answer in read_own_answers(backbone, others, log) if not answer.held_out]
        held_out = sum(answer.held_out for answer in answers)
        if not held_out:
            raise TrainingError(f"none of the {len(answers)} answers is held out: bring more (5% are, by their ids)")
        dropped, cleaned = dropped_answers(answers, run.cleaning)
        if not cleaned.kept:
            raise TrainingError(
                f"nothing is left to train on: of {len(answers)} answers {held_out} are held out for the evaluation; "
                f"dropped: {cleaned.reasons} (see --min-tokens and --max-repetition)"
            )
        # The cache holds all answers, so that other cleaning options need no other cache.
        states = collect_states(backbone, answers, run.work_dir / "hidden", log=log)
    log(f"{len(states.answers)} answers, {len(states.tokens)} tokens; {cleaned}")
    return replace(states, dropped=dropped)


def _check_prompts(path: Path, *, to_answer: bool) -> None:
    """Raises :class:`AnswersError`, and :class:`TrainingError` when the ids tell that training could not go on."""
    prompts = read_prompts(path)
    held_out = sum(Answer(prompt["id"], "", (), ()).held_out for prompt in prompts)
    if to_answer and held_out in (0, len(prompts)):
        raise TrainingError(
            f"{path}: {'all' if held_out else 'none'} of the {len(prompts)} prompts are held out for the evaluation "
            "(5% are, by their ids): bring more"
        )


def heads_config(backbone: Backbone, states: HiddenStates, run: TrainingRun) -> dict[str, Any]:
    """What ``config.json`` says about the heads' backbone and training."""
    training = [states.answers[i] for i in states.training_indices]
    _, cleaned = dropped_answers(states.answers, run.cleaning)
    return {
        "backbone": {
            "name": backbone.name,
            "fingerprint": backbone.fingerprint,
            "hidden_size": backbone.hidden_size,
            "vocab_size": backbone.vocab_size,
        },
        "training": {
            "options": dataclasses.asdict(run.options),
            "answers": len(training),
            "tokens": sum(len(answer.answer_ids) for answer in training),
            "answers_by_class": dict(Counter(answer.label or "unlabelled" for answer in training)),
            "answers_by_temperature": dict(Counter(str(answer.temperature) for answer in training)),
            "cleaning": {**dataclasses.asdict(run.cleaning), **cleaned.to_json()},
            "licences": count_licences(read_prompts(run.prompts) if run.prompts else (), training),
            "command": run.command,
        },
        **run.notes,
    }


def evaluate_and_save(
    backbone: Backbone, heads: MedusaHeads, states: HiddenStates, run: TrainingRun
) -> EvaluationReport:
    """Write the heads folder, read it back as an engine would, evaluate that on held-out answers, note the result."""
    config = heads_config(backbone, states, run)
    save_heads(heads, run.out, config=config)
    saved = load_heads(run.out, hidden_size=backbone.hidden_size, vocab_size=backbone.vocab_size)
    report = evaluate(saved, OutputProjection.of_model(backbone.model, saved.draft_token_ids), states)
    config |= report.to_json()
    save_heads(saved, run.out, config=config)
    write_model_card(run.out)
    return report


def report_text(report: EvaluationReport) -> str:
    """The evaluation as a table for people."""
    lines = [f"held-out: {report.answers} answers, {report.rows} positions"]
    for label, shares in report.accuracy.items():
        for head, ranks in enumerate(shares):
            top = "  ".join(f"top-{k} {100 * sum(ranks[:k]):5.1f}%" for k in (1, 2, 3, 5, 10) if k <= len(ranks))
            lines.append(f"  {label:<10} head {head + 1}: {top}")
    for kind, replays in (("dynamic", report.dynamic), ("static", report.static)):
        for nodes, counts in replays.items():
            by_class = "  ".join(f"{label} {count.tokens_per_step:.3f}" for label, count in sorted(counts.items()))
            lines.append(f"  tokens per step, {kind} tree of {nodes:>2} nodes: {by_class}")
    return "\n".join(lines)


def before_and_after(before: EvaluationReport, after: EvaluationReport) -> str:
    """Two evaluations side by side as a table, by class."""
    nodes = _COMPARED_NODES
    lines = [
        f"{'class':<12} {'top-1 of heads, before':>28} {'after':>28} {f'tokens/step ({nodes} nodes)':>22} {'after':>7}"
    ]
    for label in sorted(before.accuracy.keys() & after.accuracy.keys(), key=lambda name: (name != ALL_CLASSES, name)):
        top1 = ["/".join(f"{100 * ranks[0]:.1f}" for ranks in each.accuracy[label]) for each in (before, after)]
        rates = [each.dynamic[nodes][label].tokens_per_step for each in (before, after)]
        lines.append(f"{label:<12} {top1[0]:>28} {top1[1]:>28} {rates[0]:>22.3f} {rates[1]:>7.3f}")
    return "\n".join(lines)


def _brief(report: EvaluationReport) -> str:
    top1 = "/".join(f"{100 * ranks[0]:.1f}" for ranks in report.accuracy[ALL_CLASSES])
    return f"held-out top-1 {top1}%, {report.dynamic[7][ALL_CLASSES].tokens_per_step:.3f} tokens per step at 7 nodes"


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """How prompts are answered. ``temperature`` 0 is greedy; longer prompts than ``max_prompt_tokens`` are left out."""

    temperature: float = 0.0
    max_new_tokens: int = 192
    max_prompt_tokens: int = 512
    seed: int = 0


def answer_prompts(
    backbone: Backbone, prompts: Path, path: Path, options: AnswerOptions, *, log: Callable[[str], object] = print
) -> None:
    """Append the backbone's answers to ``path``, going on where an earlier run stopped.

    Raises :class:`AnswersError` for a bad prompts file.
    """
    records = read_prompts(prompts)
    path.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with (
        backbone.engine(kv_tokens=32 * (options.max_prompt_tokens + options.max_new_tokens)) as core,
        progress_bar(len(records), "answers", "answer") as advance,
    ):
        left_out = generate_answers(
            core, backbone.tokenizer, records, path, **dataclasses.asdict(options), progress=lambda tokens: advance(1)
        )
    if left_out:
        reason = (
            f"longer than {options.max_prompt_tokens} tokens, or without room for {options.max_new_tokens} new ones"
        )
        if left_out == len(records):
            raise AnswersError(f"{prompts}: all {left_out} prompts are {reason}")
        log(f"{prompts}: {left_out} of {len(records)} prompts left out: {reason}")
    log(f"answers ready in {path} after {time.monotonic() - started:.0f} s")


def _generate(backbone: Backbone, run: TrainingRun, log: Callable[[str], object]) -> list[Path]:
    """One file of answers for each temperature."""
    if run.prompts is None:
        raise AnswersError("give --answers, or --prompts to have the model answer them first")
    paths = []
    for temperature in run.temperatures:
        name = "answers.jsonl.gz" if temperature == 0 else f"answers-{temperature:g}.jsonl.gz"
        options = AnswerOptions(temperature=temperature, max_new_tokens=run.max_new_tokens)
        answer_prompts(backbone, run.prompts, run.work_dir / name, options, log=log)
        paths.append(run.work_dir / name)
    return paths
