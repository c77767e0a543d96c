"""Stage two: heads and backbone trained together, the backbone through LoRA (Hu et al., 2021).

As in Medusa-2 (Cai et al., 2024, section 2.2.2): heads trained beforehand, a smaller learning rate for the backbone
than for the heads, and a loss that keeps the backbone to what it was. Here that is the KL divergence from the original
backbone's distribution at every answer token, whose hidden states are at hand from stage one.

What comes out is another model: its answers are not the original's, and all of this project's exactness is then
relative to the adapted one. :mod:`backends.training.adapt` says so in everything it writes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from backends.heads.module import MedusaHeads
from backends.training.checkpoint import TrainingError, read_checkpoint, write_checkpoint
from backends.training.data.dataset import HiddenStates
from backends.training.epochs import Epochs
from backends.training.objective import OutputProjection, Teacher, heads_loss, path_tokens
from backends.training.trainer import TrainingOptions, learning_rate_at
from backends.training.workers import Workers

CHECKPOINT_FILE = "checkpoint-stage2.pt"


@dataclass(frozen=True, slots=True)
class JointOptions:
    """``rank`` and ``alpha``: of LoRA, on all linear layers but ``lm_head``.

    ``answers_per_batch`` answers a step, in ``accumulation`` parts; learning rates are peaks, by linear warm-up and
    cosine. ``alignment``: weight of the KL divergence from the original backbone, beside ``heads_weight`` for the
    heads' loss (0.2 in the Medusa paper): less alignment buys more tokens per step and a larger change of the answers.
    """

    rank: int = 16
    alpha: int = 32
    epochs: int = 1
    answers_per_batch: int = 8
    heads_learning_rate: float = 1e-3
    backbone_learning_rate: float = 2.5e-4
    alignment: float = 1.0
    heads_weight: float = 0.2
    head_loss_decay: float = 0.8
    soft_share: float = 0.8
    soft_ranks: int = 16
    warmup_share: float = 0.05
    accumulation: int = 1
    seed: int = 0


@dataclass(frozen=True, slots=True)
class JointProgress:
    """``alignment``: mean KL divergence from the original backbone in nats; ``heads``: the heads' loss."""

    step: int
    total_steps: int
    alignment: float
    heads: float


class JointTrainer:
    """Trains ``heads`` and a LoRA adapter on ``model``, both in place. :meth:`merge` ends it.

    ``states``: of the *original* backbone. Equal options, states and steps give equal results, resumed or not.
    """

    def __init__(
        self,
        model: Any,
        heads: MedusaHeads,
        states: HiddenStates,
        options: JointOptions,
        *,
        work_dir: Path,
        workers: Workers | None = None,
    ) -> None:
        self.options, self.states, self.work_dir = options, states, work_dir
        self.workers = workers or Workers()
        answers = torch.tensor(states.training_indices)
        self.epochs = Epochs(answers, options.answers_per_batch, options.epochs, options.seed)
        if not len(answers):
            raise TrainingError("no training answers: all prompts fall into the held-out share; bring more prompts")
        self.heads = heads.to(self.workers.device).requires_grad_(True)
        # lm_head stays as it is, so the original's distributions can be had from its hidden states.
        self.projection = OutputProjection.of_model(model, heads.draft_token_ids)
        self.lm_head = model.get_output_embeddings().weight.detach()
        self.columns = self.projection.draft_index(states.targets(heads.num_heads))
        self.teacher = Teacher(states, self.projection, options.soft_ranks)
        self.adapted = _with_lora(model, options)
        self.adapter = [parameter for parameter in self.adapted.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": list(self.heads.parameters()), "peak": options.heads_learning_rate},
                {"params": self.adapter, "peak": options.backbone_learning_rate},
            ],
            betas=(0.9, 0.98),
            weight_decay=0.0,
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
        checkpoint_every: int = 200,
        progress: Callable[[JointProgress], object] = lambda progress: None,
    ) -> None:
        """Train to the end (or to ``until_step``), with a checkpoint every so many steps and at the end."""
        for answers in self.epochs.batches(self.step, until_step):
            alignment, loss = self._train_batch(answers)
            self.step += 1
            progress(JointProgress(self.step, self.total_steps, alignment, loss))
            if self.step % checkpoint_every == 0:
                self.save_checkpoint()
        self.save_checkpoint()

    def _train_batch(self, answers: torch.Tensor) -> tuple[float, float]:
        schedule = TrainingOptions(learning_rate=1.0, warmup_share=self.options.warmup_share)
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * learning_rate_at(self.step, self.total_steps, schedule)
        self.optimizer.zero_grad(set_to_none=True)
        rows = self._rows(answers.tolist())
        known = (self.columns[:, rows] >= 0).sum(dim=1).to(self.workers.device)
        losses = torch.zeros(2, device=self.workers.device)
        for _, part in self.workers.parts(answers, self.options.accumulation):
            losses += self._backward(part.tolist(), len(rows), known)
        parameters = [*self.heads.parameters(), *self.adapter]
        self.workers.sum_gradients(parameters)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        self.optimizer.step()
        alignment, loss = self.workers.sum(losses).tolist()
        return alignment, loss

    def _backward(self, answers: Sequence[int], batch_rows: int, known: torch.Tensor) -> torch.Tensor:
        """Add the gradients of some answers of a batch; returns their part of its two losses."""
        options, device = self.options, self.workers.device
        rows = self._rows(answers)
        hidden = answer_states(self.adapted, self.states, answers)
        original = self.states.hidden[rows].to(hidden)
        alignment = divergence(hidden, original, self.lm_head) / batch_rows
        columns = self.columns[:, rows]
        targets = self.teacher.mix(rows, columns, options.soft_share)
        loss = heads_loss(
            self.heads,
            self.projection,
            hidden,
            path_tokens(self.states, rows, self.heads.num_heads).to(device),
            targets.to(device),
            head_loss_decay=options.head_loss_decay,
            known_counts=known,
        )
        (options.alignment * alignment + options.heads_weight * loss).backward()
        return torch.stack([alignment.detach(), loss.detach()])

    def _rows(self, answers: Sequence[int]) -> torch.Tensor:
        return torch.cat([torch.arange(r.start, r.stop) for r in map(self.states.rows_of, answers)])

    def merge(self) -> Any:
        """The adapted model, LoRA folded into its weights; the trainer is of no use afterwards."""
        return self.adapted.merge_and_unload().eval().requires_grad_(False)

    @property
    def _identity(self) -> dict[str, Any]:
        """What a checkpoint must agree in."""
        return {"options": dataclasses.asdict(self.options), "answers": len(self.epochs.items)}

    def save_checkpoint(self) -> None:
        if not self.workers.is_main:
            return
        progress = {
            "step": self.step,
            "heads": self.heads.state_dict(),
            "adapter": [parameter.detach() for parameter in self.adapter],
            "optimizer": self.optimizer.state_dict(),
        }
        write_checkpoint(self.work_dir / CHECKPOINT_FILE, self._identity | progress)

    def resume(self) -> bool:
        """Go on from the checkpoint in ``work_dir``; False when there is none.

        Raises :class:`TrainingError` when it was made with other options or other data.
        """
        saved = read_checkpoint(self.work_dir / CHECKPOINT_FILE, self._identity)
        if saved is None:
            return False
        self.heads.load_state_dict(saved["heads"])
        with torch.no_grad():
            for parameter, value in zip(self.adapter, saved["adapter"], strict=True):
                parameter.copy_(value)
        self.optimizer.load_state_dict(saved["optimizer"])
        self.step = saved["step"]
        return True


def answer_states(model: Any, states: HiddenStates, answers: Sequence[int]) -> torch.Tensor:
    """Final-norm states of ``model`` at the rows of these answers, with gradients: [rows, H]."""
    chosen = [states.answers[i] for i in answers]
    sequences = [answer.prompt_ids + answer.answer_ids[:-1] for answer in chosen]
    # Padding on the right needs no mask: causal attention never looks there.
    ids = torch.zeros((len(sequences), max(map(len, sequences))), dtype=torch.int64)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = torch.tensor(sequence)
    device = model.get_input_embeddings().weight.device
    hidden = model.get_base_model().base_model(input_ids=ids.to(device), use_cache=False).last_hidden_state
    return torch.cat(
        [
            hidden[row, len(answer.prompt_ids) - 1 : len(sequence)]
            for row, (answer, sequence) in enumerate(zip(chosen, sequences, strict=True))
        ]
    )


class _Divergence(torch.autograd.Function):
    """Sum of KL(original || adapted) over rows, never holding more than ``chunk`` rows of logits."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        hidden, original, lm_head, chunk = inputs
        gradient = torch.empty_like(hidden)
        total = hidden.new_zeros((), dtype=torch.float32)
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            log_q = nn.functional.linear(original[part], lm_head).float().log_softmax(dim=1)
            log_p = nn.functional.linear(hidden[part], lm_head).float().log_softmax(dim=1)
            q = log_q.exp()
            total += (q * (log_q - log_p)).sum()
            gradient[part] = (log_p.exp() - q).to(hidden.dtype) @ lm_head
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = ctx.saved_tensors
        return gradient * gradients[0].to(gradient.dtype), None, None, None


def divergence(
    hidden: torch.Tensor, original: torch.Tensor, lm_head: torch.Tensor, *, chunk: int = 256
) -> torch.Tensor:
    """KL divergence of the next-token distribution at ``hidden`` from that at ``original``, summed over rows, in nats.

    ``hidden`` and ``original`` [n, H] final-norm states, ``lm_head`` [V, H]; differentiable in ``hidden`` only.
    """
    summed = _Divergence.apply(hidden, original, lm_head, chunk)
    assert isinstance(summed, torch.Tensor)
    return summed


def _with_lora(model: Any, options: JointOptions) -> Any:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise TrainingError("stage 2 needs peft; install it with: pip install 'medusa-gateway[train]'") from None
    torch.manual_seed(options.seed)
    config = LoraConfig(r=options.rank, lora_alpha=options.alpha, lora_dropout=0.0, target_modules="all-linear")
    # Without the dropout that some backbones have: a resumed run then needs no state of the random generator.
    return get_peft_model(model, config).eval()
