"""The training loop: heads on cached hidden states, cross-entropy over the draft vocabulary, exact resumption."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from backends.heads.module import HeadInput, MedusaHeads
from backends.training.checkpoint import TrainingError, read_checkpoint, write_checkpoint
from backends.training.data.dataset import HiddenStates
from backends.training.epochs import Epochs
from backends.training.objective import OutputProjection, Targets, Teacher, heads_loss, path_tokens
from backends.training.workers import Workers

CHECKPOINT_FILE = "checkpoint.pt"


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """``head_loss_decay``: head ``i`` counts ``decay ** i`` in the loss (0.8 in the Medusa paper, section 2.2.1).

    ``soft_share``: how much of a target is the backbone's distribution (its ``soft_ranks`` likeliest tokens) rather
    than the one token that the answer has (the loss is then a KL divergence to both, up to a constant).
    ``layers``: residual blocks of each head. ``own_output``: every head has an output layer of its own, over the draft
    vocabulary, which starts as ``lm_head`` and learns at ``output_rate`` times the learning rate.
    ``precision``: dtype of the matmuls, parameters and optimiser being float32 always; "auto": as the backbone was
    loaded. ``accumulation``: in how many parts a batch goes through, each worker's share being cut so.
    """

    num_heads: int = 4
    inner_size: int = 1152
    head_input: HeadInput = "hidden+token"
    sequential: bool = False
    layers: int = 1
    own_output: bool = False
    epochs: int = 6
    batch_size: int = 1024
    learning_rate: float = 3e-3
    output_rate: float = 0.1
    weight_decay: float = 0.05
    dropout: float = 0.15
    warmup_share: float = 0.03
    head_loss_decay: float = 0.8
    draft_vocab_size: int | None = 8192
    soft_share: float = 0.8
    soft_ranks: int = 16
    seed: int = 0
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    accumulation: int = 1

    @property
    def dtype(self) -> torch.dtype | None:
        """What ``precision`` asks for; None for "auto"."""
        return {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16}[self.precision]


def learning_rate_at(step: int, total_steps: int, options: TrainingOptions) -> float:
    """Linear warm-up, then a cosine down to 2% of the peak."""
    warmup = max(1, round(total_steps * options.warmup_share))
    if step < warmup:
        return options.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, total_steps - warmup)
    return options.learning_rate * (0.02 + 0.98 * (1 + math.cos(math.pi * progress)) / 2)


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    step: int
    total_steps: int
    loss: float
    learning_rate: float
    seconds: float


class HeadsTrainer:
    """Trains heads on cached states. Equal options, states and steps give equal heads, resumed or not."""

    def __init__(
        self,
        states: HiddenStates,
        projection: OutputProjection,
        options: TrainingOptions,
        *,
        work_dir: Path,
        initial: MedusaHeads | None = None,
        workers: Workers | None = None,
    ) -> None:
        self.states = states
        self.workers = workers or Workers()
        self.projection = projection = projection.to(self.workers.device, options.dtype)
        self.options = options
        self.work_dir = work_dir
        rows = states.select(held_out=False)
        self.epochs = Epochs(rows, options.batch_size, options.epochs, options.seed)
        if not len(rows):
            raise TrainingError("no training answers: all prompts fall into the held-out share; bring more prompts")
        self.target_columns = projection.draft_index(states.targets(options.num_heads))
        self.teacher = Teacher(states, projection, options.soft_ranks) if options.soft_share else None
        torch.manual_seed(options.seed)
        self.heads = MedusaHeads(
            projection.embeddings.shape[1],
            options.num_heads,
            options.inner_size,
            head_input=options.head_input,
            sequential=options.sequential,
            draft_token_ids=projection.draft_token_ids,
            layers=options.layers,
            output_rows=projection.lm_head_rows.float() if options.own_output else None,
        )
        if initial is not None:
            _start_from(self.heads, initial)
        self.heads.to(self.workers.device)
        self.optimizer = torch.optim.AdamW(
            _parameter_groups(self.heads, options),
            lr=options.learning_rate,
            betas=(0.9, 0.98),
            weight_decay=options.weight_decay,
            fused=True,
        )
        self.step = 0

    @property
    def steps_per_epoch(self) -> int:
        return self.epochs.steps_per_epoch

    @property
    def total_steps(self) -> int:
        return self.epochs.total_steps

    def run(
        self,
        *,
        until_step: int | None = None,
        checkpoint_every_s: float = 120.0,
        progress: Callable[[TrainingProgress], object] = lambda progress: None,
        on_epoch: Callable[[int], object] = lambda epoch: None,
    ) -> MedusaHeads:
        """Train from where this trainer stands to the end (or to ``until_step``), saving checkpoints on the way."""
        last_saved = started = time.monotonic()
        for rows in self.epochs.batches(self.step, until_step):
            loss = self._train_batch(rows)
            rate = learning_rate_at(self.step, self.total_steps, self.options)
            self.step += 1
            progress(TrainingProgress(self.step, self.total_steps, loss, rate, time.monotonic() - started))
            if self.step % self.steps_per_epoch == 0:
                on_epoch(self.step // self.steps_per_epoch)
            if time.monotonic() - last_saved > checkpoint_every_s:
                self.save_checkpoint()
                last_saved = time.monotonic()
        self.save_checkpoint()
        return self.heads

    def _train_batch(self, rows: torch.Tensor) -> float:
        self.heads.train()
        for group in self.optimizer.param_groups:
            group["lr"] = group.get("share", 1.0) * learning_rate_at(self.step, self.total_steps, self.options)
        # Known to every worker without asking the others, since all of them know the whole batch.
        known = (self.target_columns[:, rows] >= 0).sum(dim=1).to(self.workers.device)
        self.optimizer.zero_grad(set_to_none=True)
        loss = torch.zeros((), device=self.workers.device)
        for number, part in self.workers.parts(rows, self.options.accumulation):
            loss += self._backward(part, known, number)
        self.workers.sum_gradients(self.heads.parameters())
        nn.utils.clip_grad_norm_(self.heads.parameters(), 1.0)
        self.optimizer.step()
        return self.workers.sum(loss).item()

    def _backward(self, rows: torch.Tensor, known: torch.Tensor, number: int) -> torch.Tensor:
        """Add the gradients of a part of a batch; returns its loss, to be added to those of the other parts."""
        options, device = self.options, self.workers.device
        # Dropout is keyed by the step, so that a resumed run draws the same masks.
        part = self.workers.index * options.accumulation + number
        torch.manual_seed(options.seed * 1_000_003 + self.step + part * 1_000_000_007)
        columns = self.target_columns[:, rows]
        targets = self.teacher.mix(rows, columns, options.soft_share) if self.teacher else Targets.of_columns(columns)
        loss = heads_loss(
            self.heads,
            self.projection,
            self.states.hidden[rows].to(self.projection.lm_head_rows),
            path_tokens(self.states, rows, options.num_heads).to(device),
            targets.to(device),
            dropout=options.dropout,
            head_loss_decay=options.head_loss_decay,
            known_counts=known,
        )
        loss.backward()
        return loss.detach()

    @property
    def _identity(self) -> dict[str, Any]:
        """What a checkpoint must agree in."""
        return {"options": dataclasses.asdict(self.options), "training_rows": len(self.epochs.items)}

    def save_checkpoint(self) -> None:
        if not self.workers.is_main:
            return
        progress = {
            "step": self.step,
            "heads": self.heads.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        write_checkpoint(self.work_dir / CHECKPOINT_FILE, self._identity | progress)

    def resume(self) -> bool:
        """Go on from the checkpoint in ``work_dir``; False when there is none.

        Raises :class:`TrainingError` when it was made with other options or other data.
        """
        defaults = dataclasses.asdict(TrainingOptions())
        saved = read_checkpoint(self.work_dir / CHECKPOINT_FILE, self._identity, default_options=defaults)
        if saved is None:
            return False
        self.heads.load_state_dict(saved["heads"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.step = saved["step"]
        return True


def _parameter_groups(heads: MedusaHeads, options: TrainingOptions) -> list[dict[str, Any]]:
    """Output layers that start as ``lm_head`` have less to learn than blocks that start as nothing."""
    if heads.output is None:
        return [{"params": list(heads.parameters())}]
    output = list(heads.output.parameters())
    blocks = [parameter for name, parameter in heads.named_parameters() if not name.startswith("output.")]
    return [{"params": blocks}, {"params": output, "share": options.output_rate}]


def _start_from(heads: MedusaHeads, initial: MedusaHeads) -> None:
    """Take trained parameters over. New layers are left as they are, which changes nothing of what heads say.

    Raises :class:`TrainingError` when the trained heads are of another shape, or have more than the new ones.
    """
    names = ("num_heads", "inner_size", "head_input")
    trained, wanted = (tuple(getattr(each, name) for name in names) for each in (initial, heads))
    if trained != wanted:
        raise TrainingError(f"the heads to start from are {trained}, the options ask for {wanted}")
    for what, had, has in (
        ("layers", initial.layers, heads.layers),
        ("own output layers", initial.own_output, heads.own_output),
        ("a sequential form", initial.sequential, heads.sequential),
    ):
        if had > has:
            raise TrainingError(f"the heads to start from have {what} that the options don't ask for: {had}, not {has}")
    heads.load_state_dict(initial.state_dict(), strict=False)
    if heads.sequential and not initial.sequential:
        _repeat_first_head(heads)


@torch.no_grad()
def _repeat_first_head(heads: MedusaHeads) -> None:
    """The first head takes a state and a token to the next state, which is what every sequential head does."""
    for parameter in heads.parameters():
        parameter[1:] = parameter[:1]
