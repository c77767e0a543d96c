"""New heads from old ones after the model was updated: a short run on a sample of prompts."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from backends.heads.format import load_heads, read_heads_config
from backends.heads.module import MedusaHeads
from backends.training.backbone import Backbone
from backends.training.checkpoint import TrainingError
from backends.training.data.answers import read_prompts
from backends.training.data.dataset import Answer
from backends.training.distill import TrainingRun, before_and_after, train_heads, training_states
from backends.training.evaluation.accuracy import EvaluationReport, evaluate
from backends.training.objective import OutputProjection
from backends.training.trainer import TrainingOptions

# Of the sample, how much is prompts that are held out: in a small sample 5% would be too few to judge by.
_HELD_OUT_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class RefreshReport:
    """The old heads and the new ones on the updated model's answers to held-out prompts."""

    before: EvaluationReport
    after: EvaluationReport

    def __str__(self) -> str:
        return before_and_after(self.before, self.after)


def refresh_heads(
    backbone: Backbone,
    run: TrainingRun,
    *,
    sample: int,
    epochs: int,
    learning_rate: float,
    log: Callable[[str], object] = print,
) -> RefreshReport:
    """Train the heads in ``run.initial`` on for an updated ``backbone``; write them to ``run.out``.

    With ``run.answers`` (the updated model's) all of those are taken, else the model answers ``sample`` of
    ``run.prompts``. ``run.options`` give way to those that the heads were trained with. Raises as :func:`train_heads`
    does, and :class:`TrainingError` when the heads were trained on exactly this model.
    """
    if run.initial is None:
        raise TrainingError("a refresh needs the old heads")
    config = read_heads_config(run.initial)
    trained_for = config.get("backbone", {}).get("fingerprint")
    if trained_for == backbone.fingerprint:
        raise TrainingError(f"{run.initial}: trained on exactly this model; there is nothing to refresh")
    old = load_heads(run.initial, hidden_size=backbone.hidden_size, vocab_size=backbone.vocab_size)
    if not run.answers:
        run = replace(run, prompts=_write_sample(run, sample))
    saved = config.get("training", {}).get("options", {})
    options = replace(options_for(old, saved), epochs=epochs, learning_rate=learning_rate, seed=run.options.seed)
    states = training_states(backbone, run, log=log)
    before = evaluate(old, OutputProjection.of_model(backbone.model, old.draft_token_ids), states)
    notes = {
        "refreshed_from": {
            "fingerprint": trained_for,
            "tokens_per_step_before": before.to_json()["tokens_per_step"],
        }
    }
    after = train_heads(backbone, replace(run, options=options, notes=notes), log=log)
    report = RefreshReport(before, after)
    log(str(report))
    return report


def options_for(heads: MedusaHeads, saved: Mapping[str, Any]) -> TrainingOptions:
    """Options to train ``heads`` on with: their own shape, and what ``saved`` (of their training) says of the rest."""
    known = {field.name for field in dataclasses.fields(TrainingOptions)}
    shape = {
        name: getattr(heads, name)
        for name in ("num_heads", "inner_size", "head_input", "sequential", "layers", "own_output")
        if name in known and hasattr(heads, name)
    }
    return TrainingOptions(**{name: value for name, value in saved.items() if name in known} | shape)


def sample_prompts(prompts: Sequence[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """At most ``count`` prompts, a fifth of them held-out ones as far as there are such; always the same."""

    def order(prompt: dict[str, Any]) -> bytes:
        return hashlib.sha256(f"refresh/{prompt['id']}".encode()).digest()

    ordered = sorted(prompts, key=order)
    held_out = [p for p in ordered if Answer(str(p["id"]), "", (), ()).held_out][: round(count * _HELD_OUT_SHARE)]
    others = [p for p in ordered if not Answer(str(p["id"]), "", (), ()).held_out]
    return held_out + others[: count - len(held_out)]


def _write_sample(run: TrainingRun, count: int) -> Path:
    if run.prompts is None:
        raise TrainingError("give --prompts for the updated model to answer, or its --answers")
    path = run.work_dir / "sample.jsonl"
    with run.workers.main_first():
        if run.workers.is_main:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(p) + "\n" for p in sample_prompts(read_prompts(run.prompts), count)))
    return path
