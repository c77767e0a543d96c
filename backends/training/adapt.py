"""Stage two as a command: from a heads folder to an adapted model folder and the heads that belong to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from backends.engine.loading import ADAPTATION_NOTE
from backends.heads.format import load_heads, save_heads
from backends.training.backbone import Backbone, load_backbone
from backends.training.checkpoint import TrainingError
from backends.training.data.answers import generate_answers
from backends.training.data.dataset import Answer, HiddenStates, read_answers
from backends.training.distill import TrainingRun, before_and_after, heads_config, training_states
from backends.training.evaluation.accuracy import EvaluationReport, evaluate
from backends.training.joint import JointOptions, JointTrainer, divergence
from backends.training.model_card import write_model_card
from backends.training.objective import OutputProjection
from backends.training.progress import progress_bar
from backends.training.states import collect_states


@dataclass(frozen=True, slots=True)
class Drift:
    """How far the adapted backbone is from the original, over the original's held-out answers.

    ``divergence``: mean KL(original || adapted) per token in nats; ``agreement``: share of positions at which both find
    the same token likeliest.
    """

    divergence: float
    agreement: float


@dataclass(frozen=True, slots=True)
class AdaptationReport:
    """``before``: the first heads on the original backbone; ``after``: on the adapted one, each on its own greedy
    answers to the held-out prompts. ``backbone``: the folder of the adapted model."""

    before: EvaluationReport
    after: EvaluationReport
    drift: Drift
    backbone: Path

    def __str__(self) -> str:
        return (
            f"{before_and_after(self.before, self.after)}\n"
            "the backbone has changed: mean KL divergence from the original"
            f" {self.drift.divergence:.4f} nats a token, same likeliest token at"
            f" {100 * self.drift.agreement:.1f}% of positions\n"
            f"answers are now the adapted model's; serve it with its heads: --model {self.backbone} --heads "
            f"{self.backbone.parent}"
        )


def adapt_backbone(
    backbone: Backbone, run: TrainingRun, options: JointOptions, *, log: Callable[[str], object] = print
) -> AdaptationReport:
    """Train ``run.initial`` and ``backbone`` together; write heads to ``run.out`` and the model into a folder below.

    ``backbone`` is used up: its model is the adapted one afterwards. Raises as :func:`train_heads` does, and
    :class:`TrainingError` without initial heads.
    """
    if run.initial is None:
        raise TrainingError("stage 2 starts from trained heads; give their folder with --init")
    workers = run.workers
    states = training_states(backbone, run, log=log)
    heads = load_heads(run.initial, hidden_size=backbone.hidden_size, vocab_size=backbone.vocab_size)
    held_out = [answer for answer in states.answers if answer.held_out]
    with workers.main_first():
        before = evaluate_on_own_answers(backbone, heads, held_out, run.work_dir / "before", run.max_new_tokens, log)
    trainer = JointTrainer(backbone.model, heads, states, options, work_dir=run.work_dir, workers=workers)
    if run.resume and trainer.resume():
        log(f"resumed at step {trainer.step} of {trainer.total_steps}")
    with progress_bar(trainer.total_steps, "stage 2", "step", initial=trainer.step) as advance:
        trainer.run(progress=lambda p: advance(1, f"KL {p.alignment:.4f}, heads {p.heads:.3f}"))
    folder = run.out / f"{backbone.name}-adapted"
    model = trainer.merge()
    if workers.is_main:
        save_adapted(backbone, model, folder, options)
    workers.wait()
    # As whoever serves the folder will have it: its rounding, its fingerprint.
    adapted = load_backbone(str(folder), device=str(workers.device))
    drift = measure_drift(adapted, states)
    with workers.main_first():
        config = heads_config(adapted, states, run)
        config["training"]["options"] = dataclasses.asdict(options)
        config["backbone"] |= {
            "adapted_from": {"name": backbone.name, "fingerprint": backbone.fingerprint},
            "drift": dataclasses.asdict(drift),
        }
        if workers.is_main:
            save_heads(heads, run.out, config=config)
        saved = load_heads(run.out, hidden_size=adapted.hidden_size, vocab_size=adapted.vocab_size)
        after = evaluate_on_own_answers(adapted, saved, held_out, run.work_dir / "after", run.max_new_tokens, log)
        if workers.is_main:
            save_heads(saved, run.out, config=config | after.to_json())
            write_model_card(run.out)
    report = AdaptationReport(before, after, drift, folder)
    log(str(report))
    return report


def save_adapted(backbone: Backbone, model: Any, folder: Path, options: JointOptions) -> None:
    """Write ``model`` as a folder that ``from_pretrained`` loads, whose config says what it was made from."""
    note = {
        "adapted_from": backbone.name,
        "adapted_from_fingerprint": backbone.fingerprint,
        "method": f"LoRA of rank {options.rank} trained with Medusa heads (stage 2), merged",
    }
    setattr(model.config, ADAPTATION_NOTE, note)
    model.save_pretrained(folder)
    backbone.tokenizer.save_pretrained(folder)


def evaluate_on_own_answers(
    backbone: Backbone,
    heads: Any,
    prompts: Sequence[Answer],
    folder: Path,
    max_new_tokens: int,
    log: Callable[[str], object],
) -> EvaluationReport:
    """Have ``backbone`` answer the held-out prompts again, greedily, and evaluate ``heads`` on that.

    ``prompts``: answers whose prompts are taken, each once. ``folder`` keeps the answers and states of *this* backbone.
    """
    # Another run's backbone, of the same name perhaps, may have left its answers there.
    folder = folder / backbone.fingerprint[:12]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "answers.jsonl.gz"
    records = [
        {"id": answer.id, "label": answer.label, "prompt_ids": list(answer.prompt_ids)}
        for answer in {answer.id: answer for answer in prompts}.values()
    ]
    longest = max(len(record["prompt_ids"]) for record in records)
    with backbone.engine(kv_tokens=32 * (longest + max_new_tokens)) as core:
        generate_answers(
            core, backbone.tokenizer, records, path, max_new_tokens=max_new_tokens, max_prompt_tokens=longest
        )
    states = collect_states(backbone, read_answers([path]), folder / "hidden", log=log)
    return evaluate(heads, OutputProjection.of_model(backbone.model, heads.draft_token_ids), states)


@torch.inference_mode()
def measure_drift(adapted: Backbone, states: HiddenStates) -> Drift:
    """Compare ``adapted`` with the backbone whose ``states`` these are, over the held-out answers."""
    lm_head = adapted.model.get_output_embeddings().weight
    total, agreeing, rows = 0.0, 0, 0
    for index, answer in enumerate(states.answers):
        if not answer.held_out:
            continue
        ids = torch.tensor([answer.prompt_ids + answer.answer_ids[:-1]], device=lm_head.device)
        hidden = adapted.model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
        hidden = hidden[len(answer.prompt_ids) - 1 :]
        original = states.hidden[states.rows_of(index)].to(hidden)
        total += float(divergence(hidden, original, lm_head))
        ours, theirs = (torch.nn.functional.linear(each, lm_head).argmax(dim=1) for each in (hidden, original))
        agreeing += int((ours == theirs).sum())
        rows += len(hidden)
    return Drift(total / rows, agreeing / rows)
