"""``medusa-gateway heads``: train, evaluate and inspect Medusa heads. The work is done in :mod:`backends.training`."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backends.tree import MAX_DEPTH
from gateway.commands.errors import CommandError
from gateway.commands.heads import evaluate as heads_eval
from gateway.commands.heads import refresh as heads_refresh
from gateway.commands.heads.common import (
    add_cleaning,
    add_model,
    cleaning_options,
    log_of,
    open_backbone,
    positive_int,
    reporting_errors,
)

if TYPE_CHECKING:
    from backends.training.joint import JointOptions


OUTPUTS = ("reduced", "shared", "own")
DRAFT_VOCAB = 8192


def add_parser(subparsers: Any) -> None:
    """Register ``heads`` with its subcommands; each sets ``run``, which takes the parsed arguments."""
    heads = subparsers.add_parser("heads", help="train, evaluate or inspect Medusa heads")
    commands = heads.add_subparsers(dest="heads_command", required=True)

    train = commands.add_parser("train", help="train heads on a model's own answers (self-distillation)")
    add_model(train)
    train.add_argument("--prompts", type=Path, help="JSON lines with id, prompt and (optional) label")
    train.add_argument(
        "--answers",
        type=Path,
        nargs="+",
        default=[],
        help="answers made before (.jsonl.gz): skips generation; held-out ones are taken from the first file",
    )
    train.add_argument("--init", type=Path, help="heads folder to start from, instead of random heads")
    train.add_argument("--out", type=Path, required=True, help="folder for the heads")
    train.add_argument("--work-dir", type=Path, help="answers, states and checkpoints; default: OUT.work")
    train.add_argument("--resume", action="store_true", help="go on from the checkpoint in the work dir")
    train.add_argument(
        "--stage",
        type=int,
        choices=(1, 2),
        default=1,
        help="1: heads on the frozen model; 2: heads from --init and the model together, which changes its answers",
    )
    train.add_argument("--heads", type=positive_int, default=4)
    train.add_argument("--layers", type=positive_int, default=1, help="blocks of each head; default: %(default)s")
    train.add_argument("--inner", type=positive_int, default=1152, help="width of each head's blocks")
    train.add_argument("--input", choices=("hidden", "hidden+token"), default="hidden+token")
    train.add_argument(
        "--sequential", action="store_true", help="each head also sees the token drafted before it, and its state"
    )
    train.add_argument(
        "--output",
        choices=OUTPUTS,
        help="the model's lm_head for all heads, cut to the draft vocabulary (reduced, the default) or whole (shared); "
        "or an output layer for each head, over the draft vocabulary (own)",
    )
    train.add_argument("--draft-vocab", type=int, help="most frequent tokens to draft from; default: 8192; 0: all")
    train.add_argument("--epochs", type=positive_int, help="default: 6; in stage 2: 1")
    train.add_argument(
        "--batch", type=positive_int, help="positions a step, default 1024; in stage 2 answers, default 8"
    )
    train.add_argument("--lr", type=float, help="peak for the heads; default: 3e-3; in stage 2: 1e-3")
    train.add_argument("--backbone-lr", type=float, default=2.5e-4, help="stage 2: peak for the model; %(default)s")
    train.add_argument("--lora-rank", type=positive_int, default=16, help="stage 2; default: %(default)s")
    train.add_argument(
        "--alignment",
        type=float,
        default=1.0,
        help="stage 2: how strongly the model is held to what it was; %(default)s",
    )
    train.add_argument(
        "--soft-share", type=float, default=0.8, help="share of a target that is the model's distribution"
    )
    train.add_argument("--dropout", type=float, default=0.15)
    train.add_argument("--weight-decay", type=float, default=0.05)
    train.add_argument(
        "--precision",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="of products; parameters are always float32",
    )
    train.add_argument("--accumulation", type=positive_int, default=1, help="parts in which a batch goes through")
    train.add_argument("--max-new-tokens", type=int, default=192, help="length of generated answers")
    train.add_argument(
        "--temperatures", type=float, nargs="+", default=[0.0, 0.7], help="one answer to each prompt at each"
    )
    add_cleaning(train)
    train.add_argument("--seed", type=int, default=0)
    train.set_defaults(run=run_train)

    prompts = commands.add_parser("prompts", help="write the project's own prompts to distil from")
    prompts.add_argument("--out", type=Path, required=True, help="file to write (.jsonl)")
    prompts.set_defaults(run=run_prompts)

    answers = commands.add_parser("answers", help="have a model answer prompts: more data for heads train --answers")
    add_model(answers)
    answers.add_argument("--prompts", type=Path, required=True)
    answers.add_argument("--out", type=Path, required=True, help="file to append to (.jsonl.gz)")
    answers.add_argument("--temperature", type=float, default=0.0)
    answers.add_argument("--max-new-tokens", type=int, default=192)
    answers.add_argument("--seed", type=int, default=0)
    answers.set_defaults(run=run_answers)

    heads_eval.add_parser(commands)
    heads_refresh.add_parser(commands)

    inspect = commands.add_parser("inspect", help="what heads of any flavour hold, and whether they fit a model")
    inspect.add_argument("heads", metavar="DIR_OR_ID")
    inspect.add_argument(
        "--model", nargs="?", const="", metavar="DIR_OR_ID", help="does it fit? no name: the demo model"
    )
    inspect.set_defaults(run=run_inspect)


def contradiction(args: argparse.Namespace) -> str | None:
    """What is wrong with the options of ``heads train``, alone or together."""
    if args.heads > MAX_DEPTH:
        return f"--heads is {args.heads}; at most {MAX_DEPTH} can be used, for a step verifies no deeper tree"
    if args.sequential and args.input == "hidden":
        return "--sequential needs --input hidden+token: each head sees the token before it"
    if args.stage == 2 and (args.layers != 1 or args.output is not None):
        return "--layers and --output belong to stage 1: in stage 2 the heads are those of --init"
    if args.output == "shared" and args.draft_vocab:
        return f"--output shared guesses among all tokens; leave --draft-vocab {args.draft_vocab} out"
    if args.output == "reduced" and args.draft_vocab == 0:
        return "--output reduced needs a draft vocabulary; for all tokens say --output shared"
    if args.draft_vocab is not None and args.draft_vocab < 0:
        return f"--draft-vocab is {args.draft_vocab}; give a number of tokens, or 0 for all"
    return None


def draft_vocab_size(output: str | None, asked: int | None) -> int | None:
    """Tokens of the draft vocabulary by ``--output`` and ``--draft-vocab``; None: all."""
    if output == "shared":
        return None
    return DRAFT_VOCAB if asked is None else asked or None


def run_train(args: argparse.Namespace) -> int:
    from backends.training.adapt import adapt_backbone
    from backends.training.distill import TrainingRun, train_heads
    from backends.training.trainer import TrainingOptions
    from backends.training.workers import joined_workers

    if problem := contradiction(args):
        raise CommandError(problem)
    options = TrainingOptions(
        num_heads=args.heads,
        inner_size=args.inner,
        head_input=args.input,
        sequential=args.sequential,
        layers=args.layers,
        own_output=args.output == "own",
        epochs=args.epochs or 6,
        batch_size=args.batch or 1024,
        learning_rate=args.lr or 3e-3,
        soft_share=args.soft_share,
        dropout=args.dropout,
        weight_decay=args.weight_decay,
        draft_vocab_size=draft_vocab_size(args.output, args.draft_vocab),
        seed=args.seed,
        precision=args.precision,
        accumulation=args.accumulation,
    )
    run = TrainingRun(
        prompts=args.prompts,
        answers=tuple(args.answers),
        out=args.out,
        work_dir=args.work_dir or args.out.with_name(args.out.name + ".work"),
        options=options,
        resume=args.resume,
        initial=args.init,
        max_new_tokens=args.max_new_tokens,
        command=shlex.join(["medusa-gateway", *sys.argv[1:]]),
        temperatures=tuple(args.temperatures),
        cleaning=cleaning_options(args),
    )

    def train() -> None:
        with joined_workers() as workers:
            backbone = open_backbone(args, str(workers.device))
            shared = replace(run, workers=workers)
            if args.stage == 2:
                adapt_backbone(backbone, shared, _joint_options(args), log=log_of(workers))
            else:
                train_heads(backbone, shared, log=log_of(workers))

    return reporting_errors(train)


def _joint_options(args: argparse.Namespace) -> JointOptions:
    from backends.training.joint import JointOptions

    return JointOptions(
        rank=args.lora_rank,
        alpha=2 * args.lora_rank,
        epochs=args.epochs or 1,
        answers_per_batch=args.batch or 8,
        heads_learning_rate=args.lr or 1e-3,
        backbone_learning_rate=args.backbone_lr,
        alignment=args.alignment,
        soft_share=args.soft_share,
        accumulation=args.accumulation,
        seed=args.seed,
    )


def run_prompts(args: argparse.Namespace) -> int:
    from backends.training.data.own_prompts import own_prompts

    def write() -> None:
        args.out.write_text("".join(json.dumps(record) + "\n" for record in own_prompts()))

    return reporting_errors(write)


def run_answers(args: argparse.Namespace) -> int:
    from backends.training.distill import AnswerOptions, answer_prompts

    options = AnswerOptions(temperature=args.temperature, max_new_tokens=args.max_new_tokens, seed=args.seed)
    return reporting_errors(lambda: answer_prompts(open_backbone(args), args.prompts, args.out, options))


def run_inspect(args: argparse.Namespace) -> int:
    from backends.checkpoints.inspection import fit_report, inspect_heads

    def inspect() -> None:
        facts = inspect_heads(args.heads)
        if args.model is not None:
            facts["fit"] = fit_report(args.heads, args.model or None)
        print(json.dumps(facts, indent=2))

    return reporting_errors(inspect)
