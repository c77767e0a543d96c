"""Self-distillation from prompts to a heads folder: answers, hidden states, training, evaluation."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from backends.heads import MedusaHeads, backbone_fingerprint, load_heads, save_heads
from backends.training.dataset import (
    Answer,
    AnswersError,
    HiddenStates,
    cache_hidden_states,
    load_hidden_states,
    read_answers,
    read_jsonl,
)
from backends.training.evaluate import ALL_CLASSES, EvaluationReport, evaluate
from backends.training.model_card import count_licences, write_model_card
from backends.training.objective import OutputProjection, frequent_tokens
from backends.training.trainer import HeadsTrainer, TrainingError, TrainingOptions


@dataclass(frozen=True)
class Backbone:
    """A frozen causal language model and its tokenizer, as transformers loads them."""

    name: str
    model: Any
    tokenizer: Any
    fingerprint: str

    @property
    def hidden_size(self) -> int:
        return self.model.config.hidden_size

    @property
    def vocab_size(self) -> int:
        return self.model.config.vocab_size

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        ends = self.model.generation_config.eos_token_id
        return () if ends is None else tuple(ends) if isinstance(ends, list) else (ends,)


def use_threads(count: int) -> None:
    """Let torch use ``count`` CPU threads in this process."""
    torch.set_num_threads(count)


def cpu_has_bf16() -> bool:
    """Whether bfloat16 products run in hardware here; elsewhere they are slower than float32."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


def load_backbone(folder: Path, *, name: str | None = None, dtype: torch.dtype | None = None) -> Backbone:
    """Load a local model folder, in bfloat16 where the CPU has it. Raises what transformers raises."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    dtype = dtype or (torch.bfloat16 if cpu_has_bf16() else torch.float32)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model.eval().requires_grad_(False)
    return Backbone(name or folder.name, model, AutoTokenizer.from_pretrained(folder), backbone_fingerprint(model))


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """Records with id, label and prompt. Raises :class:`AnswersError` for one that lacks id or prompt."""
    prompts = list(read_jsonl(path))
    for number, record in enumerate(prompts, start=1):
        if not isinstance(record.get("prompt"), str) or "id" not in record:
            raise AnswersError(f"{path}: record {number} needs id and prompt")
    return prompts


@torch.inference_mode()
def generate_answers(
    backbone: Backbone,
    prompts: Sequence[dict[str, Any]],
    path: Path,
    *,
    max_new_tokens: int = 192,
    max_prompt_tokens: int = 512,
    batch_size: int = 48,
    progress: Callable[[int], object] = lambda answers: None,
) -> None:
    """Append the backbone's greedy answers to ``path`` (.jsonl.gz), skipping prompts answered there already.

    Each prompt is one user message under the model's chat template. Longer prompts than ``max_prompt_tokens`` are left
    out. ``progress`` is called with the answers of each finished batch.
    """
    done = list(read_jsonl(path)) if path.exists() else []
    # A killed run leaves a torn gzip member behind, after which nothing could be read: start from a clean copy.
    staged = path.with_name(f".{path.name}.tmp")
    with gzip.open(staged, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in done)
    os.replace(staged, path)
    answered = {record["id"] for record in done}
    tokenizer = backbone.tokenizer
    waiting = []
    for prompt in prompts:
        if prompt["id"] in answered:
            continue
        message = [{"role": "user", "content": prompt["prompt"]}]
        text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) <= max_prompt_tokens:
            waiting.append((prompt, ids))
    # Prompts of like length share a batch, so that little of it is padding.
    waiting.sort(key=lambda item: len(item[1]))
    ends = backbone.end_token_ids
    for begin in range(0, len(waiting), batch_size):
        batch = waiting[begin : begin + batch_size]
        longest = max(len(ids) for _, ids in batch)
        padding = ends[0] if ends else 0
        input_ids = torch.tensor([[padding] * (longest - len(ids)) + ids for _, ids in batch])
        mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for _, ids in batch])
        output = backbone.model.generate(
            input_ids=input_ids,
            attention_mask=mask,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            pad_token_id=padding,
        )
        with gzip.open(path, "at", encoding="utf-8") as file:
            for (prompt, ids), row in zip(batch, output[:, longest:].tolist(), strict=True):
                end = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
                record = {
                    "id": prompt["id"],
                    "label": prompt.get("label", ""),
                    "prompt_ids": ids,
                    "answer_ids": row[:end],
                }
                file.write(json.dumps(record) + "\n")
        progress(len(batch))


@dataclass(frozen=True)
class TrainingRun:
    """What :func:`train_heads` reads and writes. ``work_dir`` keeps answers, states and checkpoints between runs."""

    prompts: Path | None
    answers: tuple[Path, ...]
    out: Path
    work_dir: Path
    options: TrainingOptions
    resume: bool = False
    max_new_tokens: int = 192
    command: str = ""


def train_heads(backbone: Backbone, run: TrainingRun, *, log: Callable[[str], object] = print) -> EvaluationReport:
    """Run all stages, write ``run.out`` and return the evaluation on held-out answers.

    Raises :class:`AnswersError` for unusable input, :class:`TrainingError` when a checkpoint can't be resumed.
    """
    answers = read_answers(run.answers or (_generate(backbone, run, log),))
    if not any(answer.held_out for answer in answers):
        raise TrainingError("no held-out answers: bring more prompts (5% are kept for evaluation)")
    states = collect_states(backbone, answers, run.work_dir / "hidden", log=log)
    log(f"{len(answers)} answers, {len(states.tokens)} tokens")
    draft_ids = frequent_tokens(states, run.options.draft_vocab_size, keep=backbone.end_token_ids)
    projection = OutputProjection.of_model(backbone.model, draft_ids)
    trainer = HeadsTrainer(states, projection, run.options, work_dir=run.work_dir)
    if run.resume and trainer.resume():
        log(f"resumed at step {trainer.step} of {trainer.total_steps}")
    started = time.monotonic()
    with _bar(trainer.total_steps, "training", "step", initial=trainer.step) as advance:

        def on_epoch(epoch: int) -> None:
            log(f"after epoch {epoch}: {_brief(evaluate(trainer.heads, projection, states, node_counts=(7,)))}")

        heads = trainer.run(progress=lambda p: advance(1, f"loss {p.loss:.3f}"), on_epoch=on_epoch)
    log(f"trained in {time.monotonic() - started:.0f} s")
    report = evaluate_and_save(backbone, heads, states, run)
    log(report_text(report))
    return report


def evaluate_and_save(
    backbone: Backbone, heads: MedusaHeads, states: HiddenStates, run: TrainingRun
) -> EvaluationReport:
    """Write the heads folder, read it back as an engine would, evaluate that on held-out answers, note the result."""
    training = [answer for answer in states.answers if not answer.held_out]
    config: dict[str, Any] = {
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
            "licences": count_licences(read_prompts(run.prompts) if run.prompts else (), training),
            "command": run.command,
        },
    }
    save_heads(heads, run.out, config=config)
    saved = load_heads(run.out, hidden_size=backbone.hidden_size, vocab_size=backbone.vocab_size)
    report = evaluate(saved, OutputProjection.of_model(backbone.model, saved.draft_token_ids), states)
    config |= report.to_json()
    save_heads(saved, run.out, config=config)
    write_model_card(run.out)
    return report


def evaluate_folder(
    backbone: Backbone, folder: Path, answer_files: Sequence[Path], work_dir: Path, *, log: Callable[[str], object]
) -> EvaluationReport:
    """Evaluate a heads folder on the held-out share of ``answer_files``; the backbone runs over that share only."""
    heads = load_heads(folder, hidden_size=backbone.hidden_size, vocab_size=backbone.vocab_size)
    held_out = [answer for answer in read_answers(answer_files) if answer.held_out]
    if not held_out:
        raise AnswersError("none of these answers is in the held-out 5%; bring more")
    states = collect_states(backbone, held_out, work_dir, log=log)
    return evaluate(heads, OutputProjection.of_model(backbone.model, heads.draft_token_ids), states)


def collect_states(
    backbone: Backbone, answers: Sequence[Answer], folder: Path, *, log: Callable[[str], object]
) -> HiddenStates:
    """Hidden states of all ``answers``, from the cache in ``folder`` as far as it reaches."""
    started = time.monotonic()
    total = sum(len(answer.answer_ids) for answer in answers)
    with _bar(total, "hidden states", "token") as advance:
        cache_hidden_states(
            backbone.model, answers, folder, backbone_fingerprint=backbone.fingerprint, progress=advance
        )
    log(f"hidden states ready after {time.monotonic() - started:.0f} s")
    return load_hidden_states(
        folder, answers, hidden_size=backbone.hidden_size, backbone_fingerprint=backbone.fingerprint
    )


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


def _brief(report: EvaluationReport) -> str:
    top1 = "/".join(f"{100 * ranks[0]:.1f}" for ranks in report.accuracy[ALL_CLASSES])
    return f"held-out top-1 {top1}%, {report.dynamic[7][ALL_CLASSES].tokens_per_step:.3f} tokens per step at 7 nodes"


def _generate(backbone: Backbone, run: TrainingRun, log: Callable[[str], object]) -> Path:
    if run.prompts is None:
        raise AnswersError("give --answers, or --prompts to have the model answer them first")
    prompts = read_prompts(run.prompts)
    path = run.work_dir / "answers.jsonl.gz"
    run.work_dir.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with _bar(len(prompts), "answers", "answer") as advance:
        generate_answers(backbone, prompts, path, max_new_tokens=run.max_new_tokens, progress=advance)
    log(f"answers ready in {path} after {time.monotonic() - started:.0f} s")
    return path


@contextlib.contextmanager
def _bar(total: int, what: str, unit: str, *, initial: int = 0) -> Iterator[Callable[..., None]]:
    """A tqdm bar where tqdm is installed (the ``train`` extra), nothing otherwise."""
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda count, note="": None
        return
    with tqdm(total=total, initial=initial, desc=what, unit=unit, mininterval=2.0) as bar:

        def advance(count: int, note: str = "") -> None:
            if note:
                bar.set_postfix_str(note, refresh=False)
            bar.update(count)

        yield advance
